"""Candidates of the search by trials, and their costs."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save

from experiments.helpers import ArrayCorpus
from nas.core.config import NETWORK, STEP_COSTS, Config, marked
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import interleaved
from nas.costs import measurement
from nas.costs.cost_table import FLOPS, MILLISECONDS, CostTable, changed_conditions
from nas.costs.flops import count_flops
from nas.costs.measurement import size_conditions
from nas.costs.sizes import BLOCK, operation_bytes, weight_bytes
from nas.retraining.weights import dequantize, quantize
from nas.search import candidate_costs
from nas.search.candidate_costs import Candidates, count_costs, find_costs, measure_costs
from nas.search.space import (
    Network,
    NetworkCosts,
    candidate_sizes,
    cheapest,
    first_candidates,
    neighbours,
    options_of,
    read_table,
    with_sizes,
    within_budget,
)
from nas.training.build import build_fixed
from nas.training.device import choose_runtime
from nas.training.passes import judged_text
from tests.making import plain

CPU = choose_runtime(Config().train)
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
    assert patterns(1.5) == {""} and first_candidates(config, tables, 0.5) == []
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
    assert near(("dense",), ["dense", "identity"]) == {"", "dd"} and near((), ["dense", "identity"]) == {"d"}
    assert near(("dense", "dense"), ["attention", "dense"]) == {"ad", "da"}


def text_of(size, tokens=8000, bytes=8000) -> ArrayCorpus:
    corpus = ArrayCorpus(size, train=np.arange(tokens) % size, valid=np.arange(9))
    corpus.meta["splits"]["train"]["bytes"] = bytes
    return corpus


def test_costs_count_a_text_in_any_vocabulary(small_config):
    """A vocabulary that needs half of the tokens halves the cost of blocks."""
    config = small_config("data.vocab_size=40", "model.blocks=4", "search.latency.source=flops")
    corpora = {40: text_of(40), 80: text_of(80, tokens=4000)}
    networks = [plain(40, 16, 4), plain(80, 16, 5), plain(80, 32, 2)]
    found = count_costs(Candidates(config, corpora, [network[:2] for network in networks[1:]], networks[0]))
    for network in networks:
        table = count_flops(with_sizes(config, *network[:2]), corpora[network.vocab_size].counts())
        expected = table.cost(network.blocks) * {40: 1000, 80: 500}[network.vocab_size]
        assert found.cost(network) == pytest.approx(expected, rel=1e-12)
    assert found.ratio(networks[0]) == 1
    assert found.table(80, 32).reference_cost == found.cost(networks[0])
    assert found.only((80, 16)).tables.keys() == {(80, 16), (40, 16)}


MEASURED = CostTable(MILLISECONDS, 2.0, {"attention": 0.5, "dense": 0.25, "identity": 0.0}, {"dense": [0.2, 0.3]})


@pytest.fixture
def measured(monkeypatch):
    """Replaces measurements by MEASURED. Returns the list of the measured sizes."""
    done = []

    def measure_tables(configs, counts, runtime):
        done.append([*configs])
        return dict.fromkeys(configs, MEASURED)

    monkeypatch.setattr(candidate_costs, "measure_tables", measure_tables)
    return done


OWN = "search.latency.source=measured", "data.vocab_size=40"
CORPORA = {40: text_of(40, bytes=24_000), 80: text_of(80)}


def test_a_cost_file_has_the_costs_for_a_text_with_their_conditions(small_config, measured, tmp_path):
    found = measure_costs(Candidates(small_config(*OWN), CORPORA, [(80, 16)], plain(40, 16, 3)), CPU)
    assert measured == [[(40, 16), (80, 16)]]
    per = 1000 / (16 * 8 * 3)  # 16 x 8 tokens of 3 bytes
    assert found.tables[40, 16].blocks["attention"] == pytest.approx(0.5 * per)
    assert found.tables[40, 16].quartiles["dense"] == pytest.approx([0.2 * per, 0.3 * per])
    assert found.reference_cost == pytest.approx(3.25 * per)
    assert found.ratio(plain(80, 16, 1)) == pytest.approx(3 * 2.5 / 3.25)
    write_yaml(file := tmp_path / "costs.yaml", content := found.to_dict())
    assert NetworkCosts.read(file) == found
    assert (content["conditions"]["segment"], content["tables"][1]["conditions"]["vocab_size"]) == (8, 80)
    first, *others = content["tables"]
    damages = {"overhead": -1.0}, {"overhead": math.nan}, {"blocks": None}, {"sizes": 7}, {"costs": 1}
    damaged = [content | {"tables": [first | damage, *others]} for damage in damages]
    damaged += [
        {name: content[name] for name in content if name != key} for key in ("tables", "reference", "conditions")
    ]
    for other in damaged:
        write_yaml(file, other)
        with pytest.raises(InputError, match=r"costs.yaml is damaged: it needs a reference and, in each of its tables"):
            NetworkCosts.read(file)


def test_a_candidate_pays_for_its_mixture_and_the_reference_does_not(small_config, measured, monkeypatch):
    monkeypatch.setattr(candidate_costs, "measured_ms", lambda config, corpus, width: width / 1000)
    found, network = measure_costs(Candidates(small_config(*OWN), CORPORA, [], plain(40, 16, 3)), CPU), plain(40, 16, 1)
    table, own = found.tables[40, 16], 16 / 1000 * 1000 / 3  # 3 bytes a token
    assert table.mixture == pytest.approx(own) and own > 1
    assert found.cost(network) == pytest.approx(table.cost(network.blocks) + own)
    assert found.reference_cost == pytest.approx(table.cost(found.reference.blocks))
    for limit, fits in ((table.cost(network.blocks) + own, True), (table.cost(network.blocks) + own / 2, False)):
        assert within_budget(table, limit)(network.blocks) == fits
    assert cheapest(small_config(*OWN), table) > own


def test_a_run_reads_the_table_of_its_sizes(tmp_path):
    table = replace(TABLE, reference_cost=7.0)
    costs = NetworkCosts({(40, 16): TABLE, (80, 32): TABLE}, plain(40, 16, 4))
    write_yaml(file := tmp_path / "flops.yaml", costs.to_dict())
    for size in 80, None:
        assert read_table(file, {"data.vocab_size": size, "model.d_model": 32}, ["dense"]) == table
    with pytest.raises(InputError, match="the costs lack a width of 16 with this vocabulary"):
        read_table(file, {"data.vocab_size": 80, "model.d_model": 16}, [])
    with pytest.raises(InputError, match=r"flops.yaml lacks conv"):
        read_table(file, {"data.vocab_size": 80, "model.d_model": 32}, ["dense", "conv"])


@pytest.fixture
def known(small_config, tmp_path, measured, capsys):
    """known(*options) -> what is missing in a file that was measured with these options.

    The function that it returns takes the options of a search, and tells why it measures again; "" if it does not.
    """

    def write(*recorded):
        file, network = tmp_path / "costs.yaml", plain(40, 16, 3)
        write_yaml(file, measure_costs(Candidates(small_config(*OWN, *recorded), CORPORA, [], network), CPU).to_dict())

        def reason(*options, keep=False, shapes=((40, 16),), reference=network, corpora=CORPORA):
            capsys.readouterr()
            find_costs(Candidates(small_config(*OWN, *options), corpora, [*shapes], reference), file, CPU, keep)
            shown = capsys.readouterr().out
            assert bool(shown) == shown.startswith(f"NOTICE: {file} does not fit: ")
            return shown.partition("does not fit: ")[2].partition("; measuring again")[0]

        return reason

    return write


def test_costs_hold_for_the_device_text_sizes_operations_and_source_that_they_were_measured_with(known, monkeypatch):
    monkeypatch.setattr(candidate_costs, "measured_ms", lambda *given: 0.0)
    reason = known()
    assert reason() == reason("train.lr=0.1", "seed=5", "model.dropout=0.3", "train.optimizer=adamw") == ""
    assert reason(shapes=[(80, 16)]) == "it lacks a vocabulary of 80 with a width of 16"
    assert reason(reference=plain(40, 16, 2)) == "its reference is 40-16-ada"
    for options, other in (
        (["search.operations=[attention,dense,conv]"], "it lacks conv"),
        (["search.latency.source=flops"], "it has costs in ms, not in FLOPs"),
        (["search.latency.timing=training"], "timing inference"),
        (["evaluate.memory=4"], "memory 8"),
        (["model.d_ffn=32"], "dense d_ffn=24"),
        (["model.ngram_rows=[7]"], "ngram_rows []"),
        (["model.cutoffs=[7]", "model.norm=post"], "norm pre, cutoffs []"),
        (["mixture.counts=2"], "mixture counts 0"),
        (["model.heads=1"], "attention heads=2 key_heads=2"),
    ):
        assert reason(*options).removeprefix("it was measured with ").startswith(other)
    other = {40: text_of(40, tokens=8001, bytes=24_000)}  # another tokenizer
    assert reason(corpora=other) == "it was measured with train_tokens 8000"
    monkeypatch.setattr(measurement, "processor", lambda: "another")
    assert reason().startswith("it was measured with processor ") and reason(keep=True) == ""


# Other values of the options, in their order
OTHERS = (32, 4, "8x", 0.3, "post", "gelu", [7], 2, True, [7], [2, 2, 3], True, "adamw")


@pytest.mark.parametrize(("key", "value"), [*zip(marked(NETWORK, STEP_COSTS), OTHERS, strict=True)])
def test_costs_of_training_hold_for_every_option_that_is_marked_so(key, value, small_config):
    """Those of other timings do not depend on options of the training step."""
    section, name = key.split(".")
    for timing, differ in (("training", True), ("inference", key in marked(NETWORK))):
        config = small_config(*OWN, f"search.latency.timing={timing}")
        recorded = size_conditions(config, CORPORA[40], interleaved(2))
        setattr(getattr(config, section), name, value)
        assert bool(changed_conditions(recorded, size_conditions(config, CORPORA[40], interleaved(2)))) == differ


def test_costs_of_training_hold_for_the_optimizer_and_for_the_dropout_that_auto_becomes(known):
    training = "search.latency.timing=training", "model.dropout=auto"
    reason = known(*training)
    assert reason(*training) == "" == reason(*training, "train.steps=25")
    assert reason(*training, "train.optimizer=adamw") == "it was measured with optimizer muon"
    many = "train.epochs=28", "train.steps=null"
    assert reason(*training, *many) == "it was measured with dropout 0.0"


def test_a_search_keeps_its_costs_but_not_those_of_another_engine(known):
    reason, onnx = known("search.latency.timing=generation"), "search.latency.source=onnx"
    generation = "search.latency.timing=generation"
    assert reason(generation, "model.norm=post", keep=True) == ""
    assert reason(keep=True) == "it was measured with timing generation"
    assert reason(generation, onnx, keep=True) == "it was measured with engine PyTorch"


def test_a_given_table_is_of_any_device_but_not_for_other_sizes(small_config, measured, tmp_path, monkeypatch):
    network, file = plain(40, 16, 3), tmp_path / "given.yaml"
    write_yaml(file, measure_costs(Candidates(small_config(*OWN), CORPORA, [], network), CPU).to_dict())
    monkeypatch.setattr(measurement, "processor", lambda: "another")
    given = f"search.latency.source={file}", "data.vocab_size=40"
    where = tmp_path / "none.yaml", CPU, True
    found = find_costs(Candidates(small_config(*given), CORPORA, [], network), *where)
    assert found == NetworkCosts.read(file) and len(measured) == 1
    refused = f"{file} does not fit this search: it was measured with dense d_ffn=24; measure again with nas.latency"
    with pytest.raises(InputError, match=refused):
        find_costs(Candidates(small_config(*given, "model.d_ffn=32"), CORPORA, [], network), *where)


def test_the_bytes_of_weights_are_those_of_a_file(small_config):
    config = small_config("search.method=trials", "search.operations=[attention,dense,conv,linear,identity]")
    corpus = SimpleNamespace(vocab_size=500)
    for weights, save_as in (("int8", quantize), ("float32", dict)):
        config.search.size.weights = weights
        bytes_of = operation_bytes(config, corpus)
        assert bytes_of.pop("identity") == 0
        for names in ([], ["attention"] * 24, [*bytes_of] * 3):
            model = build_fixed(names, config, 500)
            file = len(save(save_as({name: own.detach() for name, own in model.named_parameters()})))
            base = weight_bytes(build_fixed([], config, 500), weights)
            assert file <= base + sum(bytes_of[name] - BLOCK for name in names) <= 1.2 * file
            if weights == "int8":
                exact = dict(model.named_parameters())
                for name, own in dequantize(quantize(exact)).items():
                    rows = exact[name].flatten(1) if own.dim() > 1 else torch.zeros(len(own), 1)
                    step = rows.abs().amax(dim=1).reshape(-1, *[1] * (own.dim() - 1)) / 127
                    assert ((own - exact[name]).abs() <= 0.51 * step).all()


def test_trials_of_all_vocabularies_are_judged_by_the_same_part_of_valid(small_config):
    class Decoding(ArrayCorpus):
        """Each token has as many bytes as there are in a text of 300,000 bytes."""

        def __init__(self, size, tokens):
            text = np.zeros(tokens, int)
            super().__init__(size, train=np.zeros(4 * tokens, int), valid=text)
            self.vocabulary = SimpleNamespace(decode=lambda ids: b"a " * (len(ids) * 150_000 // tokens))
            for split, times in (("train", 4), ("valid", 1)):
                self.meta["splits"][split]["bytes"] = times * 300_000

    for epochs, part in ((0.5, 5 / 16), (0.03, 4 / 16), (1.5, 1.0)):  # an eighth, at least 60,000 bytes, or all
        config = small_config("search.method=trials", f"train.epochs={epochs}")
        for tokens in (40_000, 61_000, 99_999):
            judged, text = judged_text(config, Decoding(40, tokens))
            assert len(judged) == int(part * tokens) and text["bytes"] == pytest.approx(part * 300_000, rel=1e-3)
            assert part == 1 or text["words"] == pytest.approx(text["bytes"] / 2, abs=2)
