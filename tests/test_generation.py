from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from nas.core.config import DataOptions
from nas.core.errors import InputError
from nas.data.corpus import Corpus, prepare
from nas.inference.generation import Sampling, TextWriter
from nas.inference.language_model import LanguageModel
from nas.training.build import build_fixed
from nas.training.device import Runtime
from tests.making import generator

PATTERN = ["attention", "window 5", "dense", "linear", "conv", "sparse_strided"]
CPU = Runtime(torch.device("cpu"), "fp32", False, 1)


@pytest.fixture
def model_of(small_config, text_folder, cache):
    """model_of(**data options): an untrained model in float64. Its segment and memory have 8 tokens."""

    def make(**data):
        options = DataOptions(source=str(text_folder), cache=str(cache), vocab_size=310, **data)
        vocabulary, config = Corpus(prepare(options)).vocabulary, small_config()
        torch.manual_seed(4)
        module = build_fixed(PATTERN, config, vocabulary.size).double().eval()
        return LanguageModel(module, vocabulary, PATTERN, config, CPU)

    return make


@pytest.fixture(params=["words", "bytes", "bpe"])
def model(request, model_of):
    return model_of(tokenizer=request.param)


def next_nll(model, ids: np.ndarray, memory: int) -> torch.Tensor:
    """The nll [V] of each token of the vocabulary after a text of one segment."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None].expand(model.tokenizer.size, -1)
    targets = torch.cat([tokens[:, 1:], torch.arange(model.tokenizer.size)[:, None]], dim=1)
    with torch.no_grad():
        nll, _ = model.module(tokens, targets, None, memory)
    return nll[:, -1]


def test_greedy_text_is_the_argmax_of_the_model_over_the_whole_prefix(model):
    """Attention sees 16 positions here, so the whole text is in reach."""
    prompt = model.tokenizer.decode(model.tokenizer.encode("my sister sees it")[:4])
    written = model.generate(prompt, tokens=10, temperature=0).encode()
    ids = model.tokenizer.encode(prompt)
    expected, text = TextWriter(model.tokenizer, ids), b""
    for _ in range(10):
        ids = np.append(ids, next_nll(model, ids, 16).argmin().item())
        text += expected.write(int(ids[-1]))
    assert written == (text + expected.rest()).decode(errors="replace").encode()


@pytest.mark.parametrize(("segment", "memory"), [(8, 8), (4, 6)])
def test_a_prompt_longer_than_the_memory_is_read_in_segments(segment, memory, model, small_config):
    """The first new token is that of an evaluation with the same segment and memory."""
    lengths = [f"evaluate.segment={segment}", f"evaluate.memory={memory}"]
    model = replace(model, config=small_config(*lengths))
    ids = model.tokenizer.encode("the old man sees the river .\n" * 8)[:54]
    candidates, memories = torch.arange(model.tokenizer.size), None
    stream = torch.from_numpy(ids.astype(np.int64))[None].expand(len(candidates), -1)
    for start in range(0, 54, segment):
        tokens = stream[:, start : start + segment]
        targets = torch.cat([tokens[:, 1:], candidates[:, None]], dim=1)
        with torch.no_grad():
            nll, memories = model.module(tokens, targets, memories, memory)
    (log_p,) = predictions(model, model.tokenizer.decode(ids), 1)
    torch.testing.assert_close(log_p, -nll[:, -1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_without_memory_whole_segments_are_read_as_in_an_evaluation(segments, model_of, small_config):
    """The last token of a segment sees only the segment, also through the state of linear attention."""
    model = model_of(tokenizer="words")
    model = replace(model, config=small_config("train.memory=0"))
    ids = model.tokenizer.encode("the old man sees the river .\n" * 8)[: 8 * segments]
    (log_p,) = predictions(model, model.tokenizer.decode(ids), 1)
    torch.testing.assert_close(log_p, -next_nll(model, ids[-8:], 0), rtol=0, atol=1e-10)


def test_generation_has_the_precision_of_the_model(model_of):
    model = model_of(tokenizer="words")
    model = replace(model, module=model.module.float())
    exact = predictions(model, "the old man", 2)  # of the prompt, and of a single token
    rounded = predictions(replace(model, runtime=replace(CPU, precision="bf16")), "the old man", 2)
    for one, other in zip(exact, rounded, strict=True):
        assert 1e-4 < (one - other).abs().max() < 0.1


def predictions(model, prompt, tokens):
    """The log-probabilities [V] from which each new token is drawn."""
    seen = []

    class Recording(Sampling):
        def draw(self, log_p, generator):
            seen.append(log_p[0])
            return super().draw(log_p, generator)

    list(model.stream(prompt, tokens, Recording(0)))
    return seen


def test_tokens_are_drawn_as_often_as_the_distribution_says():
    log_p = torch.randn(1, 12, generator=generator(1), dtype=torch.float64).log_softmax(1)
    for sampling in (Sampling(), Sampling(0.5), Sampling(1.0, 5, 0.9)):
        expected = sampling.probabilities(log_p)[0].numpy()
        drawn = sampling.draw(log_p.expand(20_000, -1), generator(2)).numpy()
        counts = np.bincount(drawn, minlength=12)
        possible = expected > 0
        assert counts[~possible].sum() == 0
        assert stats.chisquare(counts[possible], 20_000 * expected[possible]).pvalue > 1e-3
    np.testing.assert_allclose(Sampling().probabilities(log_p)[0], log_p.exp()[0], rtol=1e-12)


def test_the_restrictions_are_exact():
    log_p = torch.tensor([[0.1, 0.4, 0.1, 0.25, 0.15]], dtype=torch.float64).log()
    for sampling, expected in (
        (Sampling(top_k=2), [0, 0.4, 0, 0.25, 0]),
        (Sampling(top_k=9), [0.1, 0.4, 0.1, 0.25, 0.15]),
        (Sampling(top_k=4), [0.1, 0.4, 0, 0.25, 0.15]),  # of equal tokens, the first
        (Sampling(top_p=0.4), [0, 0.4, 0, 0, 0]),
        (Sampling(top_p=0.41), [0, 0.4, 0, 0.25, 0]),
        (Sampling(top_p=1e-9), [0, 0.4, 0, 0, 0]),
        (Sampling(top_p=1.0), [0.1, 0.4, 0.1, 0.25, 0.15]),
        (Sampling(temperature=0.5, top_k=2), [0, 0.16, 0, 0.0625, 0]),
        (Sampling(top_k=3, top_p=0.5), [0, 0.4, 0, 0, 0]),  # 0.4 of the 0.8 that remain
        (Sampling(temperature=0.5, top_p=0.55), [0, 0.16, 0, 0, 0]),  # 0.16 of 0.265
        (Sampling(temperature=1e-310), [0, 1, 0, 0, 0]),
        (Sampling(temperature=0), [0, 1, 0, 0, 0]),
    ):
        expected = torch.tensor([expected], dtype=torch.float64)
        torch.testing.assert_close(sampling.probabilities(log_p), expected / expected.sum(), rtol=1e-12, atol=0)


def test_values_out_of_range_and_predictions_of_nan_are_refused():
    for options, message in (
        ({"temperature": -1.0}, "temperature -1.0 must be 0 or more"),
        ({"temperature": float("nan")}, "temperature nan must be 0 or more"),
        ({"top_k": -1}, "top-k -1 must be at least 1, or 0"),
        ({"top_p": 0.0}, "top-p 0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top-p 1.5 must be above 0 and at most 1"),
    ):
        with pytest.raises(InputError, match=message):
            Sampling(**options)
    for sampling in (Sampling(), Sampling(0), Sampling(0.5, top_p=0.9)):
        with pytest.raises(InputError, match="predicts NaN"):
            sampling.draw(torch.full((1, 3), torch.nan), generator(1))


def test_the_distribution_of_float32_loses_no_token_and_no_temperature_is_too_low():
    log_p = torch.randn(2, 50_000, generator=generator(1)).log_softmax(1)
    assert (Sampling(top_p=1.0).probabilities(log_p) > 0).all()
    assert Sampling(1e-300).draw(log_p, generator(1)).tolist() == log_p.argmax(dim=1).tolist()


def test_a_seed_repeats_the_text_and_another_changes_it(model):
    first, again, other = (model.generate("the", 30, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert model.generate("the", 30) != model.generate("the", 30)
    several = list(zip(*model.stream("the", 30, Sampling(), 1, samples=3), strict=True))
    assert len({b"".join(pieces) for pieces in several}) == 3
    same = zip(*model.stream("every child", 9, Sampling(0), samples=3), strict=True)
    greedy = model.generate("every child", 9, temperature=0)
    assert [b"".join(pieces).decode(errors="replace") for pieces in same] == [greedy] * 3
    assert model.generate("", 12, seed=3) == model.generate("\n", 12, seed=3)  # after a line end


def test_an_empty_prompt_needs_a_line_end_and_no_images(model_of, small_config):
    model = model_of(tokenizer="words", newline="drop")
    with pytest.raises(InputError, match="the prompt has no tokens"):
        model.generate("")
    assert len(model.generate("my sister", 4, seed=1).split()) == 4
    images = replace(model, config=small_config("model.grid=[2,2,3]", "data.tokenizer=bytes"))
    with pytest.raises(InputError, match="a model of images cannot begin after a line end"):
        images.generate("")


def test_the_number_of_tokens_is_checked(model):
    with pytest.raises(InputError, match="-1 tokens of 1 samples, 0 lines: give 0, 1 and 0 or more"):
        model.generate("the", -1)
    assert model.generate("the", 0) == ""
    with pytest.raises(InputError, match="seed -1 must be from 0"):
        model.generate("the", 1, seed=-1)


def test_the_pieces_of_a_stream_join_to_the_decoded_text(model):
    """Whatever the tokens are: also bytes of incomplete characters, and spaces between words."""
    prompt = model.tokenizer.encode("the naïve king\nmy sister")
    source = np.random.default_rng(1)
    for _ in range(20):
        ids = source.integers(model.tokenizer.size, size=40)
        writer = TextWriter(model.tokenizer, prompt)
        written = b"".join([*(writer.write(int(token)) for token in ids), writer.rest()])
        before = model.tokenizer.decode(prompt)
        assert before + written == model.tokenizer.decode(np.concatenate([prompt, ids]))


def test_a_text_ends_before_a_stop_or_after_its_lines(model_of):
    """Whatever the tokens are: what is written never holds a part of a stop, and nothing else is lost."""
    model = model_of(tokenizer="bpe")
    for text, stops, lines, expected in (
        ("the old man\nsees the river\nand", ["sees", "xy"], 0, "the old man\n"),
        ("the old man\nsees the river\nand", ["e river\nand", "river"], 0, "the old man\nsees the "),
        ("the old man\nsees the river\nand", ["n\nx"], 2, "the old man\nsees the river"),
        ("aab 好 aaab 好", ["aaab", "ab 好 b"], 1, "aab 好 "),
        ("no stop at al", ["all"], 5, "no stop at al"),
    ):
        writer = TextWriter(model.tokenizer, model.tokenizer.encode("x"), stops, lines)
        pieces = [writer.write(int(token)) for token in model.tokenizer.encode(text)]
        assert b"".join([*pieces, writer.rest()]).decode() == expected
    sampling = {"temperature": 2.0, "seed": 1}
    model = model_of(tokenizer="words")
    whole = model.generate("the", 200, **sampling)
    stop = whole[40:43]
    assert model.generate("the", 200, stop=[stop], **sampling) == whole[: whole.index(stop)]
    assert model.generate("the", 200, lines=1, **sampling) == whole.split("\n")[0]


def test_after_a_space_the_next_token_is_the_rest_of_a_word_with_that_space(model_of):
    model = model_of(tokenizer="bpe")
    ids = model.tokenizer.encode("my sister")
    log_p, pieces = -next_nll(model, ids, 16), model.tokenizer.pieces()
    words = torch.tensor([piece.startswith(b" ") and piece != b" " * len(piece) for piece in pieces])
    likely = pieces[int(log_p.where(words, -torch.inf).argmax())].decode()
    assert " " + model.generate("my sister ", 1, temperature=0) == likely
