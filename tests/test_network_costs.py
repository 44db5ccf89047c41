"""Candidates of the search by trials, and their costs."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from experiments.helpers import ArrayCorpus
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.costs.cost_table import FLOPS, MILLISECONDS, CostTable
from nas.costs.flops import count_flops
from nas.search import network_costs as costs
from nas.search.network_costs import NetworkCosts, network_costs, shared_conditions
from nas.search.space import (
    Network,
    candidate_sizes,
    first_candidates,
    neighbours,
    options_of,
    with_sizes,
)
from nas.training.device import device_context
from tests.making import plain

CPU = device_context(Config().train)
TABLE = CostTable(FLOPS, 1.0, {"attention": 2.0, "dense": 1.0, "dense 8x": 2.0, "identity": 0.0})


def test_candidates_for_the_sizes_are_those_given_or_the_automatic_ones_that_the_text_allows(small_config):
    config = small_config("data.vocab_size=500", "model.d_model=16", "model.heads=2")
    config.search.vocab_size, config.search.d_model = [700, 500], "auto"
    found = candidate_sizes(config, 500, 10**9)
    assert found == list(itertools.product((500, 700), (16, 24, 32, 48, 64)))
    config.search.vocab_size, config.search.d_model = "auto", []
    auto = "search.method=trials", "search.d_model=auto", "model.d_model=30", "model.heads=2"
    odd = candidate_sizes(small_config("data.vocab_size=500", *auto), 500, 10**9)
    assert [width for _, width in odd] == [30, 60, 90, 120]  # 45 is odd
    assert candidate_sizes(config, 500, 1_300_000) == [(size, 16) for size in (500, 1000, 2000, 4000)]


def test_other_sizes_keep_the_channels_of_a_head(small_config):
    own = "model.d_model=64", "model.heads=4", "data.vocab_size=50"
    config = small_config(*own)
    shaped = with_sizes(config, 900, 96)
    assert (shaped.data.vocab_size, shaped.model.d_model, shaped.model.heads) == (900, 96, 6)
    assert small_config(*own, *options_of(plain(900, 96, 3), config)) == shaped
    assert with_sizes(small_config(), 900, 16) == small_config()  # words are not pieces


def test_a_search_begins_with_interleaved_networks_or_else_with_those_of_one_operation(small_config):
    config = small_config("model.blocks=6", "search.method=trials", "search.operations=[attention,dense,d8x,identity]")
    tables = {(100, 8): TABLE, (200, 8): TABLE}

    def patterns(limit):
        found = first_candidates(config, tables, limit)
        assert len(found) == 2 * len({network.blocks for network in found}) == len({*found})
        return {"".join(name[0] for name in network.blocks) for network in found}

    assert patterns(8.0) == {"a", "ad", "ada", "adad"}
    assert patterns(2.5) == {"d"}  # no interleaved one
    assert first_candidates(config, tables, 1.5) == []
    dear = replace(TABLE, overhead=6.0)  # leaves no room for an interleaved network of this size
    assert Network(200, 8, ("dense",)) in first_candidates(config, tables | {(200, 8): dear}, 7.5)
    config.search.operations.remove("identity")
    assert patterns(12.0) == {"adadad"} and patterns(9.5) == {"dddddd"}
    config.search.operations.remove("dense")
    assert patterns(13.0) == {"aaaaaa", "dddddd"}  # dense 8x


def test_neighbours_are_one_change_away():
    def near(blocks, operations):
        return {"".join(name[0] for name in other.blocks) for other in neighbours(Network(9, 8, blocks), operations, 3)}

    found = near(("attention", "dense"), ["attention", "dense", "identity"])
    assert found == {"aa", "dd", "da", "a", "d", "aad", "dad", "ada", "add"}
    assert near(("dense", "dense"), ["attention", "dense"]) == {"ad", "da"}


def test_costs_count_a_text_in_any_vocabulary(small_config):
    """A vocabulary that needs half of the tokens halves the cost of blocks."""
    config = small_config("data.vocab_size=40", "model.blocks=4", "search.latency.source=flops")
    corpora = {40: ArrayCorpus(40, train=np.arange(8000) % 40, valid=np.arange(9))}
    corpora[80] = ArrayCorpus(80, train=np.arange(4000) % 80, valid=np.arange(9))
    corpora[80].meta["splits"]["train"]["bytes"] = 8000
    networks = [plain(40, 16, 4), plain(80, 16, 5), plain(80, 32, 2)]
    found = network_costs(config, corpora, [network[:2] for network in networks], networks[0], CPU)
    for network in networks:
        table = count_flops(with_sizes(config, *network[:2]), corpora[network.vocab_size].counts())
        expected = table.cost(network.blocks) * {40: 1000, 80: 500}[network.vocab_size]
        assert found.cost(network) == pytest.approx(expected, rel=1e-12)
    assert found.ratio(networks[0]) == 1


def test_measured_costs_have_the_blocks_of_a_width_and_the_overhead_of_each_vocabulary(
    small_config, monkeypatch, capsys
):
    """A round at half of the clock speed changes no median, but tables with a negative cost are measured again."""
    overheads, blocks = {(40, 16): 1.0, (80, 16): 3.0, (80, 32): 4.0}, {16: {"attention": 0.5, "dense": 0.25}}
    blocks[32] = {"attention": 2.0, "dense": 0.75}
    exact = {width: dict(own) for width, own in blocks.items()}

    def timed(works, rounds, seconds):
        times = {key: overheads[key[0]] + 8 * blocks[key[0][1]].get(key[1], 0) for key in works}
        found = {key: np.array([taken, 2 * taken, taken, taken, 99, taken]) / 1e3 for key, taken in times.items()}
        blocks[32] = exact[32]
        return found

    monkeypatch.setattr(costs, "timed_rounds", timed)
    configs = {key: small_config(f"data.vocab_size={key[0]}", f"model.d_model={key[1]}") for key in overheads}
    counts = {size: np.arange(size) for size in (40, 80)}
    for dense in 0.75, -0.1:
        blocks[32] = exact[32] | {"dense": dense}
        for key, table in costs.measured_parts(configs, counts, CPU).items():
            assert table.overhead == pytest.approx(overheads[key])
            assert table.blocks == pytest.approx(exact[key[1]] | {"identity": 0})
        assert capsys.readouterr().out.count("measuring again") == (dense < 0)
    exact[32]["dense"] = -0.1
    with pytest.raises(InputError, match=r"dense of 80 pieces, width 32 has a median of 0\.0000 ms.*stop other"):
        costs.measured_parts(configs, counts, CPU)


def test_the_costs_of_segments_are_those_for_a_text(small_config, tmp_path):
    config = small_config("search.latency.source=measured", "data.vocab_size=40")
    corpus = ArrayCorpus(40, train=np.arange(4000) % 40, valid=np.arange(9))
    corpus.meta["splits"]["train"]["bytes"] = 12_000
    network, table = plain(40, 16, 3), CostTable(MILLISECONDS, 2.0, {"attention": 0.5, "dense": 0.25, "identity": 0.0})
    measured = NetworkCosts({(40, 16): table}, network, {"processor": "another"})
    write_yaml(tmp_path / "costs.yaml", measured.to_dict())
    assert NetworkCosts.read(tmp_path / "costs.yaml") == measured
    for damage in ({"overhead": -1.0}, {"overhead": math.nan}, {"blocks": None}, {"sizes": 7}, {"costs": 1}):
        content = measured.to_dict()
        content["tables"][0] |= damage
        write_yaml(tmp_path / "damaged.yaml", content)
        with pytest.raises(InputError, match=r"damaged.yaml is damaged: each table needs sizes"):
            NetworkCosts.read(tmp_path / "damaged.yaml")
    found = measured.of_segments(network, config, corpus)
    assert found.cost(network.blocks) == pytest.approx(3.25 * 16 * 8 * 3 / 1000)  # 16 x 8 tokens of 3 bytes
    assert found.per_kilobyte(found.cost(network.blocks)) == pytest.approx(table.cost(network.blocks))
    assert found.holds_for["segment"] == 8 and found.holds_for["processor"] == "another"


def test_costs_hold_for_the_sizes_operations_and_source_that_they_were_measured_with(small_config):
    config, network = small_config("search.latency.source=measured", "data.vocab_size=40"), plain(40, 16, 3)
    table = CostTable(MILLISECONDS, 2.0, {"attention": 0.5, "dense": 0.25, "identity": 0.0})
    measured = NetworkCosts({(40, 16): table}, network, {"timing": "inference"})
    corpus = ArrayCorpus(40, train=np.arange(40), valid=np.arange(9))

    def reason(costs, *changed, shapes=((40, 16),), reference=network):
        options = small_config("search.latency.source=measured", "data.vocab_size=40", *changed)
        return costs.differ(options, list(shapes), reference, corpus)

    assert reason(measured) == ""
    assert reason(measured, shapes=[(40, 16), (80, 16)]) == "it lacks a vocabulary of 80 with a width of 16"
    assert reason(measured, reference=plain(40, 16, 2)) == "its reference is 40-16-ada"
    for changed, other in (
        ("search.operations=[attention,dense,conv]", "it lacks conv"),
        ("search.latency.source=flops", "it has costs in ms"),
        ("search.latency.timing=generation", "it was measured with timing inference"),
    ):
        assert reason(measured, changed) == other
    table_of = ["search.latency.source=table.yaml"]
    known = NetworkCosts({(40, 16): table}, network, measured.device | shared_conditions(config, corpus))
    assert reason(known, *table_of) == ""
    assert reason(known, *table_of, "model.cutoffs=[7]", "model.norm=post") == (
        "it was measured with norm pre, cutoffs []"
    )
    assert (
        reason(known, *table_of, "model.heads=1") == "it was measured with head_width 8, attention heads=2 key_heads=2"
    )
    more = ArrayCorpus(40, train=np.arange(41) % 40, valid=np.arange(9))  # another tokenizer
    options = small_config(*table_of, "data.vocab_size=40")
    assert known.differ(options, [(40, 16)], network, more) == "it was measured with train_tokens 40"
    training = [*table_of, "search.latency.timing=training"]
    trained = shared_conditions(small_config(*training, "data.vocab_size=40", "model.dropout=0.5"), corpus)
    slow = NetworkCosts({(40, 16): table}, network, {"timing": "training"} | trained)
    assert reason(slow, *training) == "it was measured with dropout 0.5"
    by_passes = shared_conditions(small_config(*training, "data.vocab_size=40", "model.dropout=auto"), corpus)
    slow.device.update(by_passes)
    assert reason(slow, *training, "model.dropout=auto") == ""
    assert reason(slow, *training, "model.dropout=auto", "train.epochs=9", "train.steps=null") == (
        f"it was measured with passes {by_passes['passes']}"
    )
    onnx = ["search.latency.source=onnx", "search.latency.timing=generation"]
    generation = NetworkCosts({(40, 16): table}, network, {"timing": "generation"})
    assert reason(generation, *onnx) == "it was measured in another runtime"
    generation.device["onnxruntime"] = "1.2"
    assert reason(generation, *onnx) == ""
    generation.device.update(shared_conditions(small_config(*onnx, "data.vocab_size=40"), corpus))
    assert reason(generation, *table_of, "search.latency.timing=generation") == ""
