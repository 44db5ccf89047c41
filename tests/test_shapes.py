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
from nas.core.pattern import interleaved
from nas.costs.flops import count_flops
from nas.shapes.choice import Probes, best_by_probes, first_probes
from nas.shapes.costs import shape_costs
from nas.shapes.law import NOISE, TERMS, Law, Point
from nas.shapes.space import NetworkShape, candidate_shapes, options_of, with_shape
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


def test_a_shape_keeps_the_channels_of_a_head(small_config):
    config, shape = small_config("model.d_model=16", "model.heads=2"), NetworkShape(900, 24, 3)
    shaped = with_shape(config, shape)
    assert (shaped.data.vocab_size, shaped.model.d_model, shaped.model.heads, shaped.model.blocks) == (900, 24, 3, 3)
    assert small_config("model.d_model=16", "model.heads=2", *options_of(shape, config)) == shaped


def test_costs_count_a_text_in_any_vocabulary(small_config):
    """A vocabulary that needs half of the tokens halves the cost of blocks."""
    config = small_config("data.vocab_size=40", "model.blocks=4", "search.latency.source=flops")
    corpora = {40: ArrayCorpus(40, train=np.arange(8000) % 40, valid=np.arange(9))}
    corpora[80] = ArrayCorpus(80, train=np.arange(4000) % 80, valid=np.arange(9))
    corpora[80].meta["splits"]["train"]["bytes"] = 8000
    shapes = [NetworkShape(40, 16, 4), NetworkShape(80, 16, 5), NetworkShape(80, 32, 2)]
    costs = shape_costs(config, corpora, shapes, CPU)
    for shape in shapes:
        table = count_flops(with_shape(config, shape), corpora[shape.vocab_size].counts())
        expected = table.cost(interleaved(shape.blocks)) * {40: 1000, 80: 500}[shape.vocab_size]
        assert costs.cost(shape) == pytest.approx(expected, rel=1e-12)
    assert costs.ratio(shapes[0]) == 1


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
    """Probes of a known law, with noise."""

    def __init__(self):
        self.valid, self.steps, self.config, self.generator = {}, {1000: 4000}, Config(), np.random.default_rng(0)

    def run(self, shapes, share):
        for shape in shapes:
            noise = 1 + 0.001 * self.generator.normal()
            self.valid[shape, share] = {"bits_per_byte": true_loss(shape, share) * noise}


def test_probes_find_the_best_shape_of_a_known_law_although_vocabularies_change_their_order():
    shapes = [NetworkShape(*v) for v in itertools.product((1000, 2000, 4000, 8000), (64, 96, 128, 192), (2, 4, 8, 12))]
    fitting = [shape for shape in shapes if shape.d_model**1.3 * shape.blocks < 2500]
    probes = KnownProbes()
    best = best_by_probes(probes, fitting)
    rungs = [{shape for shape, share in probes.valid if share == wanted} for wanted in (1 / 8, 1 / 4, 1 / 2)]
    assert [*map(len, rungs)] == [4, 4, 2] and rungs[2] < rungs[1] and best in rungs[2]
    assert len({shape.vocab_size for shape in rungs[1]}) == 3
    losses = [true_loss(shape, 1.0) for shape in fitting]
    assert true_loss(best, 1.0) < 1.01 * min(losses) and np.mean(losses) > 1.02 * min(losses)
    assert best_by_probes(probes, fitting[:1]) == fitting[0]


def test_the_law_is_the_regression_with_its_prior_as_a_slow_reference():
    generator, shapes = np.random.default_rng(0), [NetworkShape(1000, 64, 2), NetworkShape(4000, 96, 3)]
    points = [Point(shape, text, 2 + generator.random()) for shape in shapes for text in (0.125, 0.25)]
    law, rows, values = Law(points), [], []
    for point in points:
        logs = *(np.log(np.array(point.shape)) - np.log(np.array(shapes, dtype=float)).mean(axis=0)), np.log(point.text)
        rows.append([np.prod([logs["VDNT".index(letter)] for letter in term]) / NOISE for term in TERMS])
        values.append(np.log(point.loss) / NOISE)
    means, spreads = zip(*TERMS.values(), strict=True)
    rows, values = [*rows, *np.diag(np.reciprocal(spreads, dtype=float))], [*values, *np.divide(means, spreads)]
    np.testing.assert_allclose(law.factors, np.linalg.lstsq(np.array(rows), np.array(values))[0], rtol=1e-6, atol=1e-9)
    r = np.linalg.qr(np.array(rows), mode="r")
    first, second = (law.features([shape], np.ones(1))[0] for shape in shapes)
    error = np.linalg.norm(np.linalg.solve(r.T, first - second))
    np.testing.assert_allclose(law.errors(shapes, shapes[1]), [error, 0], rtol=1e-6)
    assert np.log(law.predict(shapes)) @ [1, -1] == pytest.approx((first - second) @ law.factors)


SHAPES = [
    *("data.tokenizer=bpe", "data.vocab_size=310", "search.vocab_size=[300,310]", "search.d_model=[8,16,24]"),
    *("search.blocks=auto", "search.latency.source=flops", "search.latency.target=0.9"),
    "train.epochs=4",
]


@pytest.mark.slow
def test_a_search_chooses_its_shape_again_after_a_kill_and_its_pattern_needs_no_other_option(tmp_path, small_yaml):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shown = succeed("search", small_yaml, "--run", whole, *SHAPES)
    assert "takes at most 2 trainings" in shown and "\n0.5 of a training of 3" in shown
    choice = yaml.safe_load((whole / "shapes" / "choice.yaml").read_text())
    (shape,) = [shape for shape in choice["shapes"] if choice["shape"].items() <= shape.items()]
    last = [probe for probe in choice["probes"] if probe["share"] == 0.5]
    assert choice["shape"].items() <= min(last, key=lambda probe: probe["bits_per_byte"]).items() and len(last) == 2
    assert choice["ratio"] <= 0.9 and choice["ratio"] == shape["ratio"] and shape["behind"] == shape["interval"] == 0
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
