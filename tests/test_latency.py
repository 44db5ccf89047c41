"""Cost tables: fitting, reuse and predictions. No test depends on real times."""

import itertools
import math

import numpy as np
import pytest
import torch

from experiments.helpers import ArrayCorpus
from nas.core.config import Config
from nas.core.errors import InputError
from nas.costs import measurement as latency
from nas.costs.cost_table import MILLISECONDS, CostTable, latency_report, least_ratio, read_costs
from nas.costs.flops import batch_shape, count_flops
from nas.costs.measurement import (
    calibration_patterns,
    current_costs,
    measure_costs,
    measure_models,
    measure_pattern,
    measurement_conditions,
    timed_rounds,
)
from nas.costs.workloads import new_works
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.retraining.results import valid_prediction
from nas.training.device import device_context
from tests.making import flops_of

CPU = device_context(Config().train)
TRUE = {"overhead": 4.0, "attention": 3.0, "dense": 1.25, "identity": 0.125}  # ms


@pytest.fixture
def counts(small_config):
    return Corpus(prepare(small_config().data)).counts()


@pytest.fixture
def timed(monkeypatch):
    """timed(*times) replaces timing: in each measurement, patterns take the milliseconds [R] of the next function.

    The last function stays. Returns the list of the measurements so far.
    """

    def replace_timing(*times):
        done = []

        def segment_times(patterns, *_):
            take = times[min(len(done), len(times) - 1)]
            done.append(len(patterns))
            return 1e-3 * np.array([np.resize(take(pattern), 20) for pattern in patterns])

        monkeypatch.setattr(latency, "segment_times", segment_times)
        return done

    return replace_timing


def sums(costs: dict):
    """The time of a pattern as the sum of its costs. A cost of two values alternates over the rounds."""
    return lambda pattern: np.resize(costs["overhead"], 20) + sum(np.resize(costs[name], 20) for name in pattern)


def test_fitted_costs_do_not_depend_on_drift_of_the_clock(small_config, counts, timed):
    noise, drift = np.random.default_rng(0), np.repeat([1.0, 1.5, 0.9, 1.0], 5)
    timed(lambda pattern: sums(TRUE)(pattern) * drift * noise.normal(1, 1e-4, 20))
    table = measure_costs(small_config("model.blocks=8"), counts, CPU)
    for name, cost in TRUE.items():
        found = table.overhead if name == "overhead" else table.blocks[name]
        assert found == pytest.approx(cost, rel=0.02, abs=0.02)
        low, high = table.quartiles[name]
        assert low <= found <= high and high >= 1.1 * cost  # the drift is in the spread


def test_costs_lie_between_those_of_pure_and_of_mixed_models(small_config, counts, timed):
    """If mixtures take 10% longer than the sum of their parts, the fitted costs lie between the two."""
    timed(lambda pattern: sums(TRUE)(pattern) * (1.1 if len(set(pattern)) > 1 else 1.0))
    table = measure_costs(small_config("model.blocks=9"), counts, CPU)
    mixture = ["attention", "dense", "identity"] * 3
    exact = sums(TRUE)(mixture)[0]
    assert 1.02 * exact < table.cost(mixture) < 1.09 * exact


FREE_DENSE, UNSTEADY = {**TRUE, "dense": -0.25}, {**TRUE, "attention": [0.5, 4.0]}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (FREE_DENSE, "dense has a median of 0.0000 ms"),
        (UNSTEADY, "quartiles of 0.5000 and 4.0000 ms"),
        ({**TRUE, "overhead": [0.5, 8.0]}, "overhead has a median of"),
    ],
)
def test_a_table_that_makes_no_sense_is_measured_again_and_then_refused(
    bad, named, small_config, counts, timed, capsys
):
    config = small_config("model.blocks=8")
    done = timed(sums(bad), sums(bad), sums(TRUE))
    table = measure_costs(config, counts, CPU)
    assert table.blocks["dense"] == pytest.approx(1.25) and table.overhead == pytest.approx(4.0)
    assert len(done) == 3 and capsys.readouterr().out.count("measuring again") == 2
    done = timed(sums(bad))
    with pytest.raises(InputError, match=f"{named}.*nothing is lost: stop other programs") as refused:
        measure_costs(config, counts, CPU)
    assert len(done) == 3 and "\n" not in str(refused.value)


def test_a_free_identity_is_accepted(small_config, counts, timed):
    timed(sums({**TRUE, "identity": [-0.1, 0.1]}))
    assert measure_costs(small_config("model.blocks=8"), counts, CPU).blocks["identity"] == pytest.approx(0, abs=1e-9)


def test_calibration_patterns_are_empty_single_operations_and_even_mixtures():
    empty, attention, dense, *mixtures = calibration_patterns(["attention", "dense"], 6)
    assert (empty, attention, dense) == ([], ["attention"] * 6, ["dense"] * 6)
    assert all(sorted(mixture) == ["attention"] * 3 + ["dense"] * 3 for mixture in mixtures)
    assert len({tuple(mixture) for mixture in mixtures}) > 1
    *_, one, two, three = calibration_patterns(list("abcde"), 2)  # each operation is in some mixture
    assert len({*one, *two, *three}) > 2 and all(len(set(mixture)) == 2 for mixture in (one, two, three))


def test_a_table_is_used_again_on_the_same_device_at_the_same_sizes(
    small_config, counts, timed, tmp_path, capsys, monkeypatch
):
    kept, done = tmp_path / "latency.yaml", timed(sums(TRUE))
    current_costs(small_config(), counts, CPU, kept).write(kept)
    assert "measuring attention, dense, identity (inference, 16 x 8 tokens, memory 8)" in capsys.readouterr().out
    assert current_costs(small_config(), counts, CPU, kept) == read_costs(kept, ["attention", "dense", "identity"])
    current_costs(small_config("train.lr=0.1", "seed=5", "model.dropout=0.3"), counts, CPU, kept)
    assert len(done) == 1 and capsys.readouterr().out == ""
    changes = {
        "evaluate.memory=4": "memory 8",
        "model.d_ffn=32": "dense d_ffn=24",
        "model.ngram_rows=[7]": "ngram_rows",
        "search.latency.timing=training": "timing",
    }
    for change, named in changes.items():
        current_costs(small_config(change), counts, CPU, kept)
        assert f"was measured with {named}" in (shown := capsys.readouterr().out) and "measuring again" in shown
    monkeypatch.setattr(latency, "processor", lambda: "another processor")
    table = current_costs(small_config(), counts, CPU, kept)
    assert table.holds_for["processor"] == "another processor" and len(done) == 6


@pytest.mark.parametrize(("timing", "shape"), [("inference", (3, 5, 7)), ("training", (4, 8, 8))])
def test_timed_work_is_a_segment_with_full_memories(timing, shape, small_config, counts):
    lengths = ["evaluate.batch_size=3", "evaluate.segment=5", "evaluate.memory=7"]
    config = small_config(*lengths, f"search.latency.timing={timing}")
    batch, segment, memory = shape
    (work,) = new_works([["attention", "dense"]], config, counts, CPU)
    assert work.inputs[0].shape == (batch, segment)
    assert [x.shape for x in work.memories.tensors()] == [(batch, memory, 16)]  # of attention
    before = [parameter.clone() for parameter in work.model.parameters()]
    for _ in range(50):
        work()
    after = list(work.model.parameters())
    changed = any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert changed == (timing == "training") and all(torch.isfinite(parameter).all() for parameter in after)
    assert work.memories.tensors()[0].shape == (batch, memory, 16)


def test_the_work_of_generation_is_a_token_with_full_memories(small_config, counts):
    config = small_config("evaluate.segment=5", "evaluate.memory=7", "search.latency.timing=generation")
    (work,) = new_works([["attention", "window 3", "dense"]], config, counts, CPU)
    seen = []
    for reader in work.decoder.readers[:2]:
        append = reader.append
        reader.append = lambda *new, append=append: seen.append(append(*new)) or seen[-1]
    for _ in range(30):
        work()
    assert len(seen) == 60 and {x.shape[3] for x in seen} == {12, 4}  # positions of attention, and of the window
    assert batch_shape(config) == (1, 1, 11)


@pytest.mark.slow
def test_onnx_runtime_reads_a_token_with_full_memories(small_config, counts):
    options = ["search.latency.source=onnx", "search.latency.timing=generation"]
    config = small_config("evaluate.segment=5", "evaluate.memory=7", *options)
    (work,) = new_works([["attention", "window 3", "conv", "dense"]], config, counts, CPU)
    assert {name: value.shape[-2] for name, value in work.inputs.items() if name != "tokens"} == {
        "keys_0": 11,
        "values_0": 11,
        "keys_1": 3,
        "values_1": 3,
        "products_2": 3,
    }
    work()
    conditions = measurement_conditions(config, len(counts), ["attention"], CPU)
    assert "onnxruntime" in conditions and "torch" not in conditions
    assert (conditions["batch_size"], conditions["segment"], conditions["memory"]) == (1, 1, 11)


def test_tokens_are_as_frequent_as_in_the_text(small_config):
    counts = np.array([900, 90, 10, 0])
    (work,) = new_works([[]], small_config("evaluate.batch_size=64", "evaluate.segment=64"), counts, CPU)
    shares = torch.bincount(work.inputs[0].flatten(), minlength=4) / 4096
    assert shares.tolist() == pytest.approx([0.9, 0.09, 0.01, 0.0], abs=0.02)


@pytest.mark.parametrize("timing", ["inference", "training", "generation"])
def test_measuring_does_not_change_the_training_after_it(timing, small_config, counts, monkeypatch):
    """The random state must not depend on the timed steps, whose number depends on the clock."""
    monkeypatch.setattr(latency, "SECONDS", 0.0)
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    config = small_config(f"search.latency.timing={timing}", "model.dropout=0.5")
    measure_models([["dense"]], config, counts, CPU, rounds=1)
    assert torch.equal(torch.randn(4), expected)


def test_rounds_run_every_piece_of_work_equally_often_in_changing_order():
    ran = []
    times = timed_rounds({name: lambda name=name: ran.append(name) for name in "abc"}, rounds=5)
    assert {name: len(taken) for name, taken in times.items()} == {"a": 5, "b": 5, "c": 5}
    in_rounds = ["".join(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert len(in_rounds) == 8 and all(sorted(one) == ["a", "b", "c"] for one in in_rounds) and len(set(in_rounds)) > 1


def test_flops_are_those_of_the_operations_at_the_sizes_that_are_timed(small_config, counts):
    config = small_config("evaluate.memory=4")
    table = count_flops(config, counts)
    assert table.blocks.keys() == {"attention", "dense", "identity"}
    for name in ("attention", "dense 8x", "window 3 key_heads=1"):
        blocks = count_flops(config, counts, [name, "identity"]).blocks  # attention and dense are always in a table
        assert blocks[name] == flops_of(name, 16, 8, 4, heads=2) and blocks.keys() >= {"attention", "dense", "identity"}
    assert table.overhead == 2 * 16 * len(counts) and table.holds_for["memory"] == 4
    training = count_flops(small_config("search.latency.timing=training"), counts)
    assert training.blocks["attention"] == flops_of("attention", 4, 8, 8, heads=2)
    assert count_flops(small_config("model.cutoffs=[5,20]"), counts).overhead < table.overhead


def test_expected_costs_are_sums_over_pi():
    table = CostTable(MILLISECONDS, 4.0, {"attention": 3.0, "dense": 1.0, "identity": 0.0})
    pi = np.array([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    assert table.expected(pi, ["attention", "dense", "identity"]) == pytest.approx(4 + 1.5 + 0.25 + 1)
    assert table.expected_ratio(pi, ["attention", "dense", "identity"]) == pytest.approx(6.75 / 8)
    assert table.cheapest(["attention", "dense"], 2) == ["dense", "dense"]
    assert least_ratio(table.ratio(["dense", "identity"])) == "0.625"
    assert least_ratio(1 / 3) == "0.334"


def test_latency_files_hold_predicted_and_measured_values(small_config, counts, timed):
    timed(sums(TRUE))
    table = CostTable(MILLISECONDS, 4.0, {"attention": 3.0, "dense": 1.25, "identity": 0.125})
    pattern = ["attention", "identity"]
    corpus = ArrayCorpus(len(counts), train=np.repeat(np.arange(len(counts)), counts), valid=np.arange(9))
    measured = measure_pattern(pattern, small_config(), corpus, CPU, table.predict(pattern))
    assert measured["predicted_ms"] == measured["median_ms"] == 7.125
    assert measured["ms_per_1000_bytes"] == pytest.approx(7.125 / (16 * 8 / 1000))  # a token is a byte
    assert measured["ratio_to_interleaved"] == pytest.approx(7.125 / 8.25)
    assert (measured["batch_size"], measured["segment"], measured["memory"]) == (16, 8, 8)


def test_a_measurement_far_from_its_prediction_causes_a_warning():
    measured = {"timing": "inference", "batch_size": 1, "segment": 8, "memory": 8, "median_ms": 10.0}
    measured |= {"ratio_to_interleaved": 0.5, "predicted_ms": 9.5, "predicted_ratio_to_interleaved": 0.5}
    (line,) = latency_report(measured)
    assert "measured 10.00 ms, 0.50" in line and "predicted 9.50 ms, 0.50" in line
    assert len(latency_report(measured | {"predicted_ms": 5.0})) == 1  # the ratios agree
    for predicted in (0.45, 0.56):
        line, warning = latency_report(measured | {"predicted_ratio_to_interleaved": predicted})
        assert warning.startswith("WARNING") and "differs from the prediction" in warning
    assert "+100%" in latency_report(measured | {"predicted_ratio_to_interleaved": 0.25})[1]
    assert len(latency_report({key: measured[key] for key in measured if not key.startswith("predicted")})) == 1
    assert latency_report({}) == []
    unsteady = latency_report(measured | {"quartiles_ms": [0.7 * measured["median_ms"], 1.3 * measured["median_ms"]]})
    assert "WARNING: the latency varies too much, quartiles" in unsteady[1] and len(unsteady) == 2


def test_a_ratio_of_latencies_is_the_median_over_rounds(timed):
    slow = np.array([1.0, 1.0, 9.0, 1.0, 9.0])  # two slow rounds of five
    timed(lambda pattern: slow * (np.array([2.0, 2.0, 2.0, 4.0, 2.0]) if pattern else 1.0))
    first, second = measure_models([[], ["dense"]], None, np.zeros(1), None)
    assert first["ratio_to_interleaved"] == 1.0 and second["ratio_to_interleaved"] == 2.0
    assert second["median_ms"] == pytest.approx(4.0)


def test_times_for_a_text_are_lower_quartiles_per_byte_relative_to_the_first_network(small_config, monkeypatch):
    config, taken = small_config(), 1e-3 * np.array([4.0, 1.0, 2.0, 3.0, 5.0])  # seconds; the lower quartile is 2 ms
    rounds = {"first": taken, "second": 3 * taken}
    monkeypatch.setattr(latency, "new_works", lambda patterns, *_: patterns)
    monkeypatch.setattr(latency, "timed_rounds", lambda works, *_: {name: rounds[name] for name in works})
    corpora = [ArrayCorpus(9, valid=[1] * 10, train=[1] * 10) for _ in rounds]
    corpora[1].meta["splits"]["train"]["bytes"] *= 2
    networks = {name: ([], config, corpus) for name, corpus in zip(rounds, corpora, strict=True)}
    kilobytes = math.prod(batch_shape(config)[:2]) / 1000  # of the first text, which has a byte per token
    first, second = latency.text_times(networks, CPU, 5).values()
    assert first == {"ms_per_1000_bytes": pytest.approx(2 / kilobytes), "ratio": 1.0}
    assert second == {"ms_per_1000_bytes": pytest.approx(3 / kilobytes), "ratio": pytest.approx(1.5)}


def test_a_prediction_is_used_only_under_its_conditions(small_config, counts, capsys):
    """The sizes of the pattern's operations belong to the conditions, but not those of others."""
    predicted = {"predicted_ms": 2.0, "predicted_ratio_to_interleaved": 0.5}
    assert valid_prediction({}, small_config(), len(counts), CPU) == {}
    for timing, (blocks, change, named) in itertools.product(
        ("inference", "training"),
        (
            (["attention", "dense"], "model.d_ffn=5", "dense d_ffn=24"),
            (["attention", "dense 40"], "model.d_ffn=5", None),
            (["conv", "dense"], "model.heads=4", None),
            (["window 3", "dense"], "model.heads=4", "window 3 window=3 heads=2 key_heads=2"),
        ),
    ):
        timed = f"search.latency.timing={timing}"
        conditions = measurement_conditions(small_config(timed), len(counts), blocks, CPU)
        content = {"blocks": blocks, "latency": {**predicted, "median_ms": 2.5, "holds_for": conditions}}
        assert valid_prediction(content, small_config(timed), len(counts), CPU) == predicted
        assert capsys.readouterr().out == ""
        found = valid_prediction(content, small_config(timed, change), len(counts), CPU)
        assert found == ({} if named else predicted)
        assert not named or f"predicted for {named}, which differs here" in capsys.readouterr().out
    del conditions["torch"]
    content["latency"]["holds_for"] = conditions | {"onnxruntime": "1.2"}
    assert valid_prediction(content, small_config(timed), len(counts), CPU) == {}
    assert "it was predicted for no torch, which differs" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_steps_are_measured_with_the_optimizer_of_the_run(small_config, counts, monkeypatch, optimizer):
    """The patterns include one without blocks, so without matrices for Muon."""
    monkeypatch.setattr(latency, "ROUNDS", 1)
    monkeypatch.setattr(latency, "SECONDS", 0.0)
    monkeypatch.setattr(latency, "unusable_cost", lambda tables: "")  # one round says little
    config = small_config("search.latency.timing=training", f"train.optimizer={optimizer}")
    assert measure_costs(config, counts, CPU).holds_for["optimizer"] == optimizer
