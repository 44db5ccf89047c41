"""Exported ONNX graphs against PyTorch."""

import math
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from models.graph import export_graph
from models.stream import Decoder, StreamModel
from nas import export, load_model
from nas.core import errors
from nas.core.errors import InputError, check_onnx
from nas.core.files import read_yaml
from nas.data.corpus import Corpus, prepare
from nas.inference import onnx_graph
from nas.inference.exporting import model_card
from nas.inference.generation import Sampling
from nas.inference.harness import Harness, generation_options, new_harness
from nas.inference.onnx_graph import graph_reader, largest_difference, model_reader, stream_model, write_graph
from nas.training.evaluation import token_nll
from tests.making import BLOCKS as BLOCK_OF
from tests.making import generator, streaming_model
from tests.processes import succeed

VOCAB, CONTEXT = 23, 14
BLOCKS = [*BLOCK_OF.values(), "attention key_heads=1"]
OTHERS = {
    "pre": (BLOCKS, {}),
    "post": (BLOCKS, {"norm": "post"}),
    "adaptive softmax and n-grams": (BLOCKS, {"cutoffs": (4, 11), "ngram_rows": (13, 11)}),
    "images": (BLOCKS, {"grid": (2, 3, 1)}),
}


def model_of(pattern, **options):
    return streaming_model(pattern, VOCAB, **options)


def with_vocabulary(folder):
    """The folder with a file in the place of the exported vocabulary."""
    (folder / "vocabulary").mkdir()
    (folder / "vocabulary" / "vocabulary.yaml").touch()
    return folder


@pytest.mark.parametrize(("pattern", "options"), OTHERS.values(), ids=OTHERS)
@torch.no_grad()
def test_the_function_of_the_graph_equals_the_decoder(pattern, options):
    model = model_of(pattern, **options).double()
    tokens, network = torch.randint(VOCAB, (2, 60), generator=generator(5)), StreamModel(model, CONTEXT)
    fixed = StreamModel(model, CONTEXT, fixed=True)
    assert fixed.fixed
    for own, length in ((network, 1), (network, 3), (network, 8), (fixed, 1)):
        decoder, state, place = Decoder(model, CONTEXT), own.start(2), 0
        while place + length <= 60:
            piece = tokens[:, place : place + length]
            log_p, _, state = own(piece, state)
            torch.testing.assert_close(log_p[:, -1], decoder.read(piece), rtol=0, atol=1e-10)
            place += length


@pytest.mark.slow
@torch.no_grad()
def test_a_graph_equals_pytorch_for_any_rows_and_lengths(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_graph, "evaluation_lengths", lambda config: (8, 6))
    model = model_of(BLOCKS)
    assert write_graph(SimpleNamespace(module=model, config=None), with_vocabulary(tmp_path)) < 1e-4
    session, network = onnxruntime.InferenceSession(tmp_path / "model.onnx"), StreamModel(model, CONTEXT)
    for rows, length in ((3, 1), (1, 14), (2, 5), (1, 1)):
        if rows == length:  # a graph of fixed sizes
            network = StreamModel(model, CONTEXT, fixed=True)
            export_graph(network, tmp_path / "model.onnx")
            session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
            assert not any(isinstance(size, str) for one in session.get_inputs() for size in one.shape)
        state = network.start(rows)
        for _ in range(4):
            tokens = torch.randint(VOCAB, (rows, length), generator=generator(length))
            given = {key: value.numpy() for key, value in state.items()}
            found = session.run(None, {"tokens": tokens.numpy()} | given)
            log_p, hidden, state = network(tokens, state)
            for one, other in zip(found, [log_p, hidden, *state.values()], strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def graph(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("graph") / "out"
    succeed("export", trained["sentencepiece"], "--out", out, "--format", "onnx")
    return out


@pytest.mark.slow
def test_graphs_run_by_the_card_and_have_the_figures_of_the_training(trained, graph, tmp_path, capsys, monkeypatch):
    out, model = tmp_path / "out", load_model(trained["sentencepiece"], "cpu")
    command = ["export", trained["sentencepiece"], "--out", out, "--format", "onnx-int8"]
    monkeypatch.setattr("sys.argv", [*map(str, command)])
    export.main()
    told = capsys.readouterr().out
    assert "ONNX Runtime differs from PyTorch by at most" in told
    judged = dict(re.findall(r"(float32|int8): word perplexity (\S+) on valid", told))
    corpus, reader = Corpus(prepare(model.config.data)), model_reader(stream_model(model)[0], 1)
    nll, meta = -reader.score(corpus.tokens("valid"))[0].sum(), corpus.meta["splits"]["valid"]
    expected = math.exp(nll / meta["words"])
    assert judged["float32"] == f"{expected:.4g}" and judged.keys() == {"float32", "int8"}
    assert 0 < abs(float(judged["int8"]) / expected - 1) < 0.05
    card = (out / "README.md").read_text()
    assert f"- int8: word perplexity {judged['int8']} on valid" in card
    files = {path.name for path in out.iterdir()}
    assert files == {"model.onnx", "start.npz", "pattern.yaml", "pattern.png", "vocabulary", "README.md"}
    code, _ = re.findall("```python\n(.*?)```", card, re.DOTALL)  # _ needs sentencepiece
    assert len(code.splitlines()) == 10
    exec(code.replace("FOLDER", str(out)), {})
    reader, tokens, drawn = graph_reader(out), np.array([[0]]), []
    for _ in range(10):
        tokens = reader.read(tokens)[:, -1:].argmax(axis=-1)
        drawn.append(tokens.item())
    assert capsys.readouterr().out.split() == [str(token) for token in drawn]


@pytest.mark.slow
@torch.no_grad()
def test_int8_quantises_nearly_all_weights_and_reads_single_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_graph, "evaluation_lengths", lambda config: (8, 6))
    model = streaming_model(["dense", "conv"], 500, cutoffs=(50, 200), tie_embeddings=False)
    write_graph(SimpleNamespace(module=model, config=None), with_vocabulary(tmp_path), fixed=True)
    ids, exact = np.arange(30) * 7, graph_reader(tmp_path)
    onnx_graph.quantize_graph(tmp_path)
    weights = onnx.load(tmp_path / "model.onnx").graph.initializer
    floats = sum(np.prod(one.dims) for one in weights if one.data_type == onnx.TensorProto.FLOAT)
    assert floats < 0.1 * sum(parameter.numel() for parameter in model.parameters())
    rounded = graph_reader(tmp_path)
    assert rounded.segment == exact.segment == 1
    assert 0 < np.abs(exact.score(ids)[0] - rounded.score(ids)[0]).max() < 0.2


@torch.no_grad()
def test_a_text_is_judged_by_the_evaluation_protocol_up_to_its_last_token():
    model = model_of(BLOCKS, ngram_rows=(13, 11)).double()
    for length in (29, 33):  # 3.5 and 4 segments
        ids = np.random.default_rng(length).integers(VOCAB, size=length)
        found, greedy = model_reader(StreamModel(model, CONTEXT), 8).score(ids)
        np.testing.assert_allclose(-found, token_nll(model, ids, 1, 8, 6, None, 20)[0], rtol=0, atol=1e-10)
        assert len(greedy) == length - 1


def test_a_model_without_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_graph, "evaluation_lengths", lambda config: (8, 0))
    with pytest.raises(InputError, match="a stream needs memory, but evaluation has a segment of 8 and a memory of 0"):
        write_graph(SimpleNamespace(module=model_of(["attention"]), config=None), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_graph_that_gives_nan_differs():
    network = StreamModel(model_of(["dense"]), CONTEXT)
    damaged = SimpleNamespace(read=lambda tokens: np.full((*tokens.shape, VOCAB), np.nan))
    assert np.isnan(largest_difference(network, damaged, model_reader(network, 8)))
    assert largest_difference(network, model_reader(network, 8), model_reader(network, 8)) == 0


@pytest.mark.slow
def test_files_of_several_exports_are_refused(trained, graph, tmp_path):
    mixed, other = tmp_path / "mixed", trained["words"] / "vocabulary"
    for name, damage in {
        "vocabulary": lambda: shutil.copytree(other, mixed / "vocabulary", dirs_exist_ok=True),
        "start.npz": lambda: np.savez(mixed / "start.npz", start=0),
        "no ONNX folder": lambda: (mixed / "model.onnx").write_bytes(b"damaged"),
    }.items():
        shutil.copytree(graph, mixed)
        damage()
        with pytest.raises(InputError, match=f"{name}.*" + ("damaged" if "no" in name else "export the run again")):
            Harness(mixed)
        shutil.rmtree(mixed)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "onnxscript" else True)
    with pytest.raises(InputError, match=r"ONNX needs the package onnxscript, which is not installed: pip install -e"):
        check_onnx()


@pytest.mark.slow
def test_the_card_tells_how_a_text_becomes_tokens(trained, graph):
    records = [read_yaml(trained["words"] / name) for name in ("results.yaml", "provenance.yaml")]
    words = model_card(load_model(trained["words"]), *records, "onnx", [])
    assert words.count("```python") == 1 and "the line of a word in `vocabulary/words.txt`" in words
    _, code = re.findall("```python\n(.*?)```", (graph / "README.md").read_text(), re.DOTALL)
    told, vocabulary = {}, load_model(trained["sentencepiece"]).tokenizer
    exec(code.replace("FOLDER", str(graph)), told)
    for text in ("my sister sees\nthe\n", "", "\n\n a", "\u00fc\u4e2d", " \u2581a\u2581\u2581b"):
        ids = told["encode"](text)
        np.testing.assert_array_equal(ids, vocabulary.encode(text))
        assert told["decode"](ids) == text == vocabulary.decode(ids).decode()


def requests_of(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["run", "graph"])
def test_the_harness_judges_and_generates_as_the_model_does(form, trained, graph, text_folder):
    harness = Harness(graph if form == "graph" else trained["sentencepiece"])
    model = load_model(trained["sentencepiece"])
    text = (text_folder / "test.txt").read_text()
    for part in ("\n" + text, text, text[:-3]):
        (rolling,) = harness.loglikelihood_rolling(requests_of((part,)))
        assert rolling == pytest.approx(-model.score("\n" + part.removeprefix("\n")).metrics["nll"], rel=1e-6)
    context, continuation = "my sister sees", " the river ."
    whole, part = model.score("\n" + context + continuation), model.score("\n" + context)
    expected = part.metrics["nll"] - whole.metrics["nll"]
    count, greedy = len(whole.ids) - len(part.ids), model.generate("\n" + context, 20, temperature=0)
    split = f"{context} ", continuation[1:]  # the same: the space belongs to the continuation
    line = model.score("\n" + context + "\nthe").metrics["nll"] - part.metrics["nll"]
    pairs = (context, continuation), (context, greedy), ("", "the"), split, ("th", "e"), (context + "\n", "the")
    found = harness.loglikelihood(requests_of(*pairs))
    assert found[5][0] == pytest.approx(-line, rel=1e-4)  # with the line end
    assert found[0][0] == pytest.approx(expected, rel=1e-4) and count > 1 and not found[0][1]
    assert found[1][1] and found[3] == found[0]
    assert found[2][0] == pytest.approx(-model.score("\nthe").metrics["nll"], rel=1e-4)
    assert len(model.tokenizer.encode("the")) == 1 and found[4] == found[2]  # no token is left of "th"
    options = {"until": ["xyz"], "max_gen_toks": 20}
    assert harness.generate_until(requests_of((context, options))) == [greedy]
    stop = greedy[3:5]
    (cut,) = harness.generate_until(requests_of((context, options | {"until": [stop, "xyz"]})))
    assert cut == greedy[: greedy.index(stop)]


def test_options_of_generation_are_those_of_lm_eval():
    for options, expected in (
        ({}, (Sampling(0), [], 256)),
        ({"until": "q\n", "do_sample": None, "max_gen_toks": None}, (Sampling(0), ["q\n"], 256)),
        ({"until": ["", "a"], "temperature": 0.5, "max_new_tokens": 3}, (Sampling(0.5), ["a"], 3)),
        ({"until": None, "do_sample": False, "temperature": 0.5, "max_gen_toks": 0}, (Sampling(0), [], 0)),
        ({"do_sample": True, "top_k": 3, "top_p": 0.5}, (Sampling(1.0, 3, 0.5), [], 256)),
    ):
        assert generation_options(options) == expected


def test_the_harness_names_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(InputError, match=r"needs the package lm_eval, which is not installed: pip install -e"):
        new_harness(tmp_path)
