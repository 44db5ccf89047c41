"""The choice of the shape: candidates, costs, the law, and the search that begins with it."""

import itertools
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from experiments.helpers import ArrayCorpus
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.pattern import interleaved
from nas.costs.flops import count_flops
from nas.networks import costs
from nas.networks.choice import Probes, best_by_probes, first_probes
from nas.networks.costs import shape_costs
from nas.networks.law import NOISE, OWN, TERMS, Law, Point
from nas.networks.space import NetworkShape, candidate_shapes, options_of, with_shape
from nas.training.device import device_context
from tests.processes import ROOT, refuse, succeed

CPU = device_context(Config().train)


def test_candidates_are_all_given_sizes_or_the_automatic_ones_that_the_text_allows(small_config):
    config = small_config("data.vocab_size=500", "model.d_model=16", "model.heads=2", "model.blocks=6")
    config.search.vocab_size, config.search.d_model, config.search.blocks = [700, 500], "auto", 5
    found = candidate_shapes(config, 10**9)
    assert {shape.vocab_size for shape in found} == {500, 700} and {shape.blocks for shape in found} == {2, 3, 4, 5, 6}
    assert {shape.d_model for shape in found} == {16, 24, 32, 48, 64} and len(found) == 2 * 4 * 5 + 1
    assert found[-1] == NetworkShape(500, 16, 6)  # the reference
    config.search.vocab_size, config.search.d_model, config.search.blocks = "auto", [], None
    assert candidate_shapes(config, 1_300_000) == [NetworkShape(size, 16, 6) for size in (500, 1000, 2000, 4000)]


@pytest.mark.parametrize(("lr", "other"), [("null", 0.01333), ("0.02", 0.01333), ("0.003", 0.003)])
def test_a_shape_keeps_the_channels_of_a_head_and_gets_the_default_rate_of_its_width(small_config, lr, other):
    own = "model.d_model=64", "model.heads=4", f"train.lr={lr}"
    config, shape = small_config(*own), NetworkShape(900, 96, 3)
    shaped = with_shape(config, shape)
    assert (shaped.data.vocab_size, shaped.model.d_model, shaped.model.heads, shaped.model.blocks) == (900, 96, 6, 3)
    assert shaped.train.lr == other
    assert small_config(*own, *options_of(shape, config)) == shaped


def test_costs_count_a_text_in_any_vocabulary(small_config):
    """A vocabulary that needs half of the tokens halves the cost of blocks."""
    config = small_config("data.vocab_size=40", "model.blocks=4", "search.latency.source=flops")
    corpora = {40: ArrayCorpus(40, train=np.arange(8000) % 40, valid=np.arange(9))}
    corpora[80] = ArrayCorpus(80, train=np.arange(4000) % 80, valid=np.arange(9))
    corpora[80].meta["splits"]["train"]["bytes"] = 8000
    shapes = [NetworkShape(40, 16, 4), NetworkShape(80, 16, 5), NetworkShape(80, 32, 2)]
    found = shape_costs(config, corpora, shapes, CPU)
    for shape in shapes:
        table = count_flops(with_shape(config, shape), corpora[shape.vocab_size].counts())
        expected = table.cost(interleaved(shape.blocks)) * {40: 1000, 80: 500}[shape.vocab_size]
        assert found.cost(shape) == pytest.approx(expected, rel=1e-12)
    assert found.ratio(shapes[0]) == 1


def test_the_widest_of_each_vocabulary_and_depth_are_probed_far_from_each_other():
    shapes = [NetworkShape(*values) for values in itertools.product((1000, 2000, 4000), (32, 64), (2, 4, 8))]
    found = first_probes(shapes, 8)
    assert len(found) == len({*found}) == 8 and {shape.d_model for shape in found} == {64}
    first, *others = found[:5]
    assert first == NetworkShape(2000, 64, 4)
    assert {*others} == {(size, 64, blocks) for size in (1000, 4000) for blocks in (2, 8)}  # the corners
    assert {*first_probes(shapes[:4], 8)} == {*shapes[:4]}  # narrower ones too, if there are few shapes


def true_loss(shape: NetworkShape, text: float) -> float:
    """8,000 pieces are the best after an eighth of a training, and 2,000 at its end."""
    size, width, blocks = shape
    early = 0.25 * (text * size / 2000) ** -0.35
    return 0.9 + 1.5 * size**-0.3 + 3 * width**-0.5 + 0.3 * blocks**-0.7 + early + 0.15 * np.log(size)


class KnownProbes(Probes):
    """Probes of a known law, with noise. surprise: a shape that is better than the law after half of a training."""

    surprise = None

    def __init__(self):
        self.valid, self.steps, self.config, self.generator = {}, {1000: 4000}, Config(), np.random.default_rng(0)

    def run(self, shapes, share):
        for shape in shapes:
            noise = 1 + 0.001 * self.generator.normal()
            noise *= 0.97 if shape == self.surprise and share == 1 / 2 else 1
            self.valid[shape, share] = {"bits_per_byte": true_loss(shape, share) * noise}


def test_probes_find_the_best_shape_of_a_known_law_although_vocabularies_change_their_order():
    shapes = [NetworkShape(*v) for v in itertools.product((1000, 2000, 4000, 8000), (64, 96, 128, 192), (2, 4, 8, 12))]
    fitting = [shape for shape in shapes if shape.d_model**1.3 * shape.blocks < 2500]
    probes = KnownProbes()
    best = best_by_probes(probes, fitting)
    rungs = [{shape for shape, share in probes.valid if share == wanted} for wanted in (1 / 8, 1 / 4, 1 / 2)]
    assert [*map(len, rungs)] == [4, 4, 2] and rungs[2] < rungs[1] and best in rungs[2]
    assert len({shape.vocab_size for shape in rungs[1]}) == 3
    assert best == min(rungs[2], key=lambda shape: probes.valid[shape, 1 / 2]["bits_per_byte"])
    losses = [true_loss(shape, 1.0) for shape in fitting]
    assert true_loss(best, 1.0) < 1.01 * min(losses) and np.mean(losses) > 1.02 * min(losses)
    other = KnownProbes()
    (other.surprise,) = rungs[2] - {best}
    assert best_by_probes(other, fitting) == other.surprise  # although the law does not expect it
    assert best_by_probes(probes, fitting[:1]) == fitting[0]


def test_the_law_is_a_regression_with_an_effect_of_each_shape_as_a_slow_reference():
    generator, shapes = np.random.default_rng(0), [NetworkShape(1000, 64, 2), NetworkShape(4000, 96, 3)]
    points = [Point(shape, text, 2 + generator.random()) for shape in shapes for text in (0.125, 0.25)]
    shapes.append(NetworkShape(2000, 64, 4))  # without a probe
    centre = np.log(np.array(shapes[:2], dtype=float)).mean(axis=0)
    means, spreads = (np.array([*column, *[value] * 3]) for column, value in zip(zip(*TERMS.values()), (0, OWN)))

    def row(shape, text):
        logs = dict(zip("VDNT", [*(np.log(np.array(shape)) - centre), np.log(text)], strict=True))
        return [
            *(np.prod([logs[letter] for letter in term]) for term in TERMS),
            *(float(one == shape) for one in shapes),
        ]

    rows = np.array([row(point.shape, point.text) for point in points]) / NOISE
    values = np.log([point.loss for point in points]) / NOISE
    q, r = np.linalg.qr(np.concatenate([rows, np.diag(1 / spreads)]))
    factors = np.linalg.solve(r, q.T @ np.concatenate([values, means / spreads]))
    law, ends = Law(points), np.array([row(shape, 1) for shape in shapes])
    np.testing.assert_allclose(law.predict(shapes), np.exp(ends @ factors), rtol=1e-6)
    errors = [np.linalg.norm(np.linalg.solve(r.T, end - ends[1])) for end in ends]
    np.testing.assert_allclose(law.errors(shapes, shapes[1]), errors, rtol=1e-6, atol=1e-6)


def test_measured_costs_have_the_blocks_of_a_width_and_the_overhead_of_each_vocabulary(small_config, monkeypatch):
    overheads, blocks = {(40, 16): 1.0, (80, 16): 3.0, (80, 32): 4.0}, {16: {"attention": 0.5, "dense": 0.25}}
    blocks[32] = {"attention": 2.0, "dense": 0.75}

    def timed(works, rounds, seconds):
        times = {key: overheads[key[0]] + 8 * blocks[key[0][1]].get(key[1], 0) for key in works}
        return {key: np.array([taken, taken, 99]) / 1e3 for key, taken in times.items()}

    monkeypatch.setattr(costs, "timed_rounds", timed)
    configs = {key: small_config(f"data.vocab_size={key[0]}", f"model.d_model={key[1]}") for key in overheads}
    counts = {size: np.arange(size) for size in (40, 80)}
    parts = costs.measured_parts(configs, counts, CPU)
    assert parts == {key: pytest.approx((overheads[key], *blocks[key[1]].values())) for key in overheads}
    blocks[32]["dense"] = -0.1
    with pytest.raises(InputError, match="no time: stop other programs"):
        costs.measured_parts(configs, counts, CPU)


SHAPES = [
    *("data.tokenizer=bpe", "data.vocab_size=310", "search.vocab_size=[300,310]", "search.d_model=[8,16,24]"),
    *("search.blocks=auto", "search.latency.source=flops", "search.latency.target=0.9"),
    "train.epochs=4",
]


@pytest.mark.slow
def test_a_search_chooses_its_shape_again_after_a_kill_and_its_pattern_needs_no_other_option(tmp_path, small_yaml):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shown = succeed("search", small_yaml, "--run", whole, *SHAPES)
    assert "takes the steps of at most 2 trainings" in shown and "\n0.5 of a training of 3" in shown
    choice = yaml.safe_load((whole / "shapes" / "choice.yaml").read_text())
    (shape,) = [shape for shape in choice["shapes"] if choice["shape"].items() <= shape.items()]
    last = [probe for probe in choice["probes"] if probe["share"] == 0.5]
    assert choice["shape"].items() <= min(last, key=lambda probe: probe["bits_per_byte"]).items() and len(last) == 2
    assert (
        choice["ratio"] <= 0.9
        and choice["ratio"] == shape["ratio"]
        and shape["behind"] == 0
        and shape["interval"] < 1e-4
    )
    command = [sys.executable, "search.py", small_yaml, "--run", killed, *SHAPES]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not list(killed.glob("shapes/*/trial-*.yaml")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert "already holds a run; add --resume" in refuse("search", small_yaml, "--run", killed, *SHAPES)
    changed = refuse(
        "search", small_yaml, "--run", killed, "--resume", *SHAPES, "train.lr=0.5", "search.latency.target=1"
    )
    assert (
        "was started with another configuration: train.lr (" in changed and "search.latency.target (0.9 -> 1" in changed
    )
    succeed("search", small_yaml, "--run", killed, "--resume", *SHAPES)
    assert yaml.safe_load((killed / "shapes" / "choice.yaml").read_text()) == choice
    assert (killed / "pi.jsonl").read_text() == (whole / "pi.jsonl").read_text()
    (killed / "shapes" / "choice.yaml").unlink()  # as after a kill in the last round, whose losses the first has not
    succeed("search", small_yaml, "--run", killed, "--resume", *SHAPES)
    assert yaml.safe_load((killed / "shapes" / "choice.yaml").read_text()) == choice
    assert f"written to {whole / 'shapes.png'}" in succeed("derive", whole)
    pattern = yaml.safe_load((whole / "pattern.yaml").read_text())
    assert {key: pattern[key] for key in ("vocab_size", "d_model")} == {k: shape[k] for k in ("vocab_size", "d_model")}
    assert pattern["heads"] == pattern["d_model"] // 8 and len(pattern["blocks"]) == shape["blocks"]
    run = ["--run", tmp_path / "run", "data.tokenizer=bpe", "train.steps=4"]
    shown = succeed("retrain", whole / "pattern.yaml", small_yaml, *run)
    assert f"a vocabulary of {shape['vocab_size']}\n" in shown and f"d_model {shape['d_model']}\n" in shown


@pytest.mark.slow
def test_a_budget_that_no_shape_meets_names_the_least(tmp_path, small_yaml):
    message = refuse("search", small_yaml, "--run", tmp_path / "run", *SHAPES, "search.latency.target=0.01")
    assert message.startswith("error: no shape is within search.latency.target=0.01: the cheapest, 3")
    assert "give at least that" in message and not (tmp_path / "run").exists()
