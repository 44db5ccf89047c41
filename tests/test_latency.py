"""Cost tables: fitting, reuse and predictions. No test depends on real times."""

import itertools
import math

import numpy as np
import pytest
import torch

from experiments.helpers import ArrayCorpus
from nas.core.config import Config
from nas.core.errors import InputError
from nas.costs import measurement
from nas.costs.cost_table import MILLISECONDS, CostTable, latency_report, least_ratio
from nas.costs.flops import batch_shape, count_flops
from nas.costs.measurement import (
    device_conditions,
    measure_pattern,
    measure_tables,
    new_work,
    size_conditions,
    text_times,
    timed_rounds,
)
from nas.data.corpus import Corpus, prepare
from nas.retraining.phase import valid_prediction
from nas.training.device import choose_runtime
from tests.making import flops_of

CPU = choose_runtime(Config().train)


@pytest.fixture
def corpus(small_config):
    return Corpus(prepare(small_config().data))


@pytest.fixture
def counts(corpus):
    return corpus.counts()


# Costs in milliseconds: of embedding and output layer for each vocabulary and width, and of operations for each width.
OVERHEADS = {(40, 16): 1.0, (80, 16): 3.0, (80, 32): 4.0}
BLOCKS = {16: {"attention": 0.5, "dense": 0.25}, 32: {"attention": 2.0, "dense": 0.75}}
FREE_DENSE, UNSTEADY = {"dense": -0.1}, {"attention": [0.1, 8.0]}


@pytest.fixture
def measure(small_config, monkeypatch):
    """measure(*others) -> tables. others: costs at width 32 in each measurement, as they differ from BLOCKS.

    The last one stays. A cost of two values alternates over the rounds. In two of six rounds, the clock is slower.
    """

    def tables(*others):
        waiting = [*others]

        def times(works, *_):
            other = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            costs, clock = BLOCKS | {32: BLOCKS[32] | other}, np.array([1, 2, 1, 1, 1.5, 1])
            return {
                (sizes, name): 1e-3 * clock * (OVERHEADS[sizes] + 8 * np.resize(costs[sizes[1]].get(name, 0), 6))
                for sizes, name in works
            }

        monkeypatch.setattr(measurement, "timed_rounds", times)
        configs = {key: small_config(f"data.vocab_size={key[0]}", f"model.d_model={key[1]}") for key in OVERHEADS}
        return measure_tables(configs, {size: np.arange(size) for size in (40, 80)}, CPU)

    return tables


@pytest.mark.parametrize("bad", [{}, FREE_DENSE, UNSTEADY])
def test_measured_costs_have_the_blocks_of_a_width_and_the_overhead_of_each_vocabulary(bad, measure, capsys):
    """A slow clock in some rounds changes no median. A table that makes no sense is measured again, twice."""
    for sizes, table in measure(bad, bad, {}).items():
        exact = {"overhead": OVERHEADS[sizes], **BLOCKS[sizes[1]], "identity": 0.0}
        assert {"overhead": table.overhead, **table.blocks} == pytest.approx(exact)
        for name, cost in exact.items():  # the clock is in the spread
            assert table.quartiles[name] == pytest.approx([cost, 1.375 * cost])
    assert capsys.readouterr().out.count("measuring again") == (2 if bad else 0)


@pytest.mark.parametrize(
    ("bad", "named"),
    [(FREE_DENSE, r"dense .* has a median of 0\.0000 ms"), (UNSTEADY, "attention .* and quartiles of 0")],
)
def test_a_table_that_makes_no_sense_three_times_is_refused(bad, named, measure, capsys):
    with pytest.raises(InputError, match=f"{named}.*nothing is lost: stop other programs") as refused:
        measure(bad)
    assert " of 80 pieces, width 32 has" in str(refused.value) and "\n" not in str(refused.value)
    assert capsys.readouterr().out.count("measuring again") == 2


@pytest.mark.parametrize(("timing", "shape"), [("inference", (3, 5, 7)), ("training", (4, 8, 8))])
def test_timed_work_is_a_segment_with_full_memories(timing, shape, small_config, counts):
    lengths = ["evaluate.batch_size=3", "evaluate.segment=5", "evaluate.memory=7"]
    config = small_config(*lengths, f"search.latency.timing={timing}")
    batch, segment, memory = shape
    work = new_work(["attention", "dense"], config, counts, CPU)
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
    work = new_work(["attention", "window 3", "dense"], config, counts, CPU)
    seen = []
    for reader in work.decoder.readers[:2]:
        append = reader.append
        reader.append = lambda *new, append=append: seen.append(append(*new)) or seen[-1]
    for _ in range(30):
        work()
    assert len(seen) == 60 and {x.shape[3] for x in seen} == {12, 4}  # positions of attention, and of the window
    assert batch_shape(config) == (1, 1, 11)


@pytest.mark.slow
def test_onnx_runtime_reads_a_token_with_full_memories(small_config, corpus):
    options = ["search.latency.source=onnx", "search.latency.timing=generation"]
    config = small_config("evaluate.segment=5", "evaluate.memory=7", *options)
    work = new_work(["attention", "conv"], config, corpus.counts(), CPU)
    lengths = {name: value.shape[-2] for name, value in work.args[1].items() if name != "tokens"}
    assert lengths == {"keys_0": 11, "values_0": 11, "products_1": 3}
    work()
    device, sizes = device_conditions(config, CPU), size_conditions(config, corpus, ["attention"])
    assert device["engine"] == "ONNX Runtime" and "torch" not in device
    assert (sizes["batch_size"], sizes["segment"], sizes["memory"]) == (1, 1, 11)


def test_tokens_are_as_frequent_as_in_the_text(small_config):
    counts = np.array([900, 90, 10, 0])
    work = new_work([], small_config("evaluate.batch_size=64", "evaluate.segment=64"), counts, CPU)
    shares = torch.bincount(work.inputs[0].flatten(), minlength=4) / 4096
    assert shares.tolist() == pytest.approx([0.9, 0.09, 0.01, 0.0], abs=0.02)


@pytest.mark.parametrize("timing", ["inference", "training", "generation"])
def test_measuring_does_not_change_the_training_after_it(timing, small_config, corpus, monkeypatch):
    """The random state must not depend on the timed steps, whose number depends on the clock."""
    monkeypatch.setattr(measurement, "ROUNDS", 1)
    monkeypatch.setattr(measurement, "SECONDS", 0.0)
    monkeypatch.setattr(measurement, "unusable_cost", lambda tables: "")  # one round says little
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    config = small_config(f"search.latency.timing={timing}", "model.dropout=0.5")
    measure_pattern(["dense"], config, corpus, CPU, {})
    measure_tables({(corpus.vocab_size, 16): config}, {corpus.vocab_size: corpus.counts()}, CPU)
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
    assert table.overhead == 2 * 16 * len(counts)
    training = count_flops(small_config("search.latency.timing=training"), counts)
    assert training.blocks["attention"] == flops_of("attention", 4, 8, 8, heads=2)
    assert count_flops(small_config("model.cutoffs=[5,20]"), counts).overhead < table.overhead


def test_expected_costs_are_sums_over_pi():
    table = CostTable(MILLISECONDS, 4.0, {"attention": 3.0, "dense": 1.0, "identity": 0.0})
    pi = np.array([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    assert table.expected_ratio(pi, ["attention", "dense", "identity"]) == pytest.approx((4 + 1.5 + 0.25 + 1) / 8)
    assert table.cheapest(["attention", "dense"], 2) == ["dense", "dense"]
    assert least_ratio(table.ratio(["dense", "identity"])) == "0.625"
    assert least_ratio(1 / 3) == "0.334"


def test_a_measurement_far_from_its_prediction_causes_a_warning():
    measured = {"timing": "inference", "batch_size": 1, "segment": 8, "memory": 8, "ms_per_1000_bytes": 10.0}
    measured["ratio_to_interleaved"] = 0.5
    predicted = measured | {"predicted_ms_per_1000_bytes": 5.0, "predicted_ratio_to_interleaved": 0.5}
    (line,) = latency_report(predicted)  # the ratios agree
    assert "measured 10 ms for 1,000 bytes of text, 0.50" in line and "predicted 5 ms, 0.50" in line
    for ratio, difference in ((0.45, "+11%"), (0.56, "-11%"), (0.25, "+100%")):
        line, warning = latency_report(predicted | {"predicted_ratio_to_interleaved": ratio})
        assert warning.startswith(f"WARNING: the measured ratio differs from the prediction by {difference}")
    assert len(latency_report(measured)) == 1 and latency_report({}) == []
    unsteady = latency_report(predicted | {"quartiles_ms": [7.0, 13.0]})
    assert "WARNING: the latency varies too much, quartiles 7 and 13 ms" in unsteady[1] and len(unsteady) == 2


@pytest.fixture
def rounds(monkeypatch):
    """rounds(*times) replaces timing: the networks take these milliseconds, in their order."""

    def replace_timing(*times):
        taken = [1e-3 * np.array(own) for own in times]
        monkeypatch.setattr(measurement, "timed_rounds", lambda works, *_: dict(zip(works, taken, strict=True)))

    return replace_timing


def test_times_for_a_text_are_lower_quartiles_per_byte_relative_to_the_first_network(small_config, rounds):
    config, taken = small_config(), np.array([4.0, 1.0, 2.0, 3.0, 5.0])  # the lower quartile is 2 ms
    rounds(taken, 3 * taken)
    corpora = [ArrayCorpus(9, valid=[1] * 10, train=[1] * 10) for _ in range(2)]
    corpora[1].meta["splits"]["train"]["bytes"] *= 2
    kilobytes = math.prod(batch_shape(config)[:2]) / 1000  # of the first text, which has a byte per token
    networks = {number: ([], config, corpus) for number, corpus in enumerate(corpora)}
    first, second = text_times(networks, CPU, 5).values()
    assert first["ms_per_1000_bytes"] == pytest.approx(2 / kilobytes) and first["ratio"] == 1
    assert first["quartiles_ms"] == pytest.approx([2 / kilobytes, 4 / kilobytes])
    assert second["ms_per_1000_bytes"] == pytest.approx(3 / kilobytes) and second["ratio"] == pytest.approx(1.5)


def test_latency_files_hold_predicted_and_measured_values(small_config, corpus, rounds):
    rounds([8.0] * 5, [6.0] * 5)
    corpus.meta["splits"]["train"] |= {"bytes": 1000, "tokens": 500}
    measured = measure_pattern(["attention", "identity"], small_config(), corpus, CPU, {"predicted": 1})
    assert measured["ms_per_1000_bytes"] == pytest.approx(6 / (16 * 8 * 2 / 1000)) and measured["predicted"] == 1
    assert measured["ratio_to_interleaved"] == pytest.approx(0.75)
    assert (measured["batch_size"], measured["segment"], measured["memory"]) == (16, 8, 8)
    rounds([8.0] * 5)
    assert measure_pattern(["attention", "dense"], small_config(), corpus, CPU, {})["ratio_to_interleaved"] == 1


def test_a_prediction_is_used_only_under_its_conditions(small_config, corpus, capsys):
    """The sizes of the pattern's operations belong to the conditions, but not those of others."""
    predicted = {"predicted_ms_per_1000_bytes": 2.0, "predicted_ratio_to_interleaved": 0.5}
    assert valid_prediction({}, small_config(), corpus, CPU) == {}
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
        config = small_config(timed)
        conditions = device_conditions(config, CPU) | size_conditions(config, corpus, blocks)
        content = {"blocks": blocks, "latency": {**predicted, "ms_per_1000_bytes": 2.5, "holds_for": conditions}}
        assert valid_prediction(content, config, corpus, CPU) == predicted
        assert capsys.readouterr().out == ""
        found = valid_prediction(content, small_config(timed, change), corpus, CPU)
        assert found == ({} if named else predicted)
        assert not named or f"predicted for {named}, which differs here" in capsys.readouterr().out
    assert conditions["optimizer"] == "muon"  # of training
    content["latency"]["holds_for"] = conditions | {"engine": "ONNX Runtime"}
    assert valid_prediction(content, config, corpus, CPU) == {}
    assert "it was predicted for engine ONNX Runtime, which differs" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_network_without_blocks_has_a_training_step_with_each_optimizer(small_config, counts, optimizer):
    """It has no matrices for Muon."""
    config = small_config("search.latency.timing=training", f"train.optimizer={optimizer}")
    work = new_work([], config, counts, CPU)
    before = work.model.embedding.weight.clone()
    work()
    assert not torch.equal(before, work.model.embedding.weight)
