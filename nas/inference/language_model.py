"""A trained model with its vocabulary, as one object, and the nll of a text by the evaluation protocol."""

import io
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from models.transformer_xl import TransformerXL
from nas.core.config import Config
from nas.core.errors import InputError
from nas.data.sources import conversion_advice, count_words, has_words, has_zeros, split_words
from nas.data.vocabulary import VOCABULARY, Vocabulary, normalise
from nas.inference.generation import Predictor, Sampling, TextWriter, generate_tokens, which_fit
from nas.mixture.mixture import Mixture, load_mixture
from nas.retraining.weights import CODE, read_trained, set_weights
from nas.training.build import build_fixed
from nas.training.device import Runtime, choose_runtime
from nas.training.evaluation import NO_TEXT, NO_WORDS, evaluation_lengths, read_text, text_metrics

SHOWN = 60  # characters of a line in the printed form of a Score
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a terminal would obey them


def escape(text: str) -> str:
    """The text with escapes in place of control characters."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


@dataclass(frozen=True, repr=False)
class Score:
    """The nll of a text. Its printed form has a row per line of the text, and the metrics."""

    lines: list[bytes]  # of the text, with their ends
    ids: np.ndarray  # [N], the tokens
    line_of: np.ndarray  # [N], the index of each token's line
    nll: np.ndarray  # [N], in nats; NaN for the first token of a stream, which nothing predicts
    metrics: dict  # those of results.yaml, of the whole text
    network: "Score | None" = None  # of the network alone, if this one is of a mixture
    parts: list[str] = field(default_factory=list)  # of the mixture
    shares: np.ndarray | None = None  # [N, P], of each token's probability, by part

    def line_nll(self) -> np.ndarray:
        """The summed nll of each line's tokens [lines], in nats."""
        return np.bincount(self.line_of, np.nan_to_num(self.nll), minlength=len(self.lines))

    def __repr__(self) -> str:
        rows = [f"{'line':>6}{'tokens':>8}{'nll':>12}  text"]
        counts = np.bincount(self.line_of, minlength=len(self.lines))
        for number, (line, count, nll) in enumerate(zip(self.lines, counts, self.line_nll(), strict=True), start=1):
            text = line.decode("utf-8", errors="replace").rstrip("\r\n")
            shown = escape(text[:SHOWN]) + "..." * (len(text) > SHOWN)
            rows.append(f"{number:>6} {count:>7} {nll:>11.4f}  {shown}")
        if self.network:
            rows += ["", f"mixture of {', '.join(self.parts)}; the network alone has {self.network.quality()[-1]}"]
        return "\n".join([*rows, *self.quality()])

    def quality(self) -> list[str]:
        about = self.metrics
        words = NO_WORDS
        if about["word_perplexity_comparable"]:
            words = f"word perplexity {about['word_perplexity']:.4f}, {about['words']} words and line ends"
        compared = "" if about["bits_per_byte_comparable"] else f" ({NO_TEXT})"
        return [
            f"nll {about['nll']:.4f} in {about['tokens']} predicted tokens, {about['nll_per_token']:.4f} per token",
            f"perplexity {about['perplexity']:.4f} per token",
            words,
            f"bits per byte {about['bits_per_byte']:.4f}, {about['bytes']} bytes{compared}",
        ]


@dataclass(frozen=True)
class LanguageModel:
    module: TransformerXL | None  # in evaluation mode, on the device; None: no network
    tokenizer: Vocabulary
    pattern: list[str]  # the operations of the blocks
    config: Config  # of its training
    runtime: Runtime
    mixture: Mixture | None = None  # None: the network alone

    def generate(
        self,
        prompt: str | bytes = "",
        tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        lines: int = 0,
    ) -> str:
        """Continue a prompt by a number of tokens. Returns the new text.

        An empty prompt is a line end. Bytes that are no UTF-8 are replaced. temperature, top_k, top_p: see
        nas.inference.generation.Sampling. seed: repeats the text; None: another text in each call. stop: texts before
        which the new text ends. lines: it ends after so many lines; 0: no limit. Raises InputError if an argument is
        out of range, or the prompt has no tokens.
        """
        pieces = self.stream(prompt, tokens, Sampling(temperature, top_k, top_p), seed, stop=stop, lines=lines)
        return b"".join(piece for (piece,) in pieces).decode("utf-8", errors="replace")

    def stream(
        self,
        prompt: str | bytes,
        tokens: int,
        sampling: Sampling,
        seed: int | None = None,
        samples: int = 1,
        stop: Sequence[str] = (),
        lines: int = 0,
    ) -> Iterator[list[bytes]]:
        """Yield the new text of each sample after each token. A piece may be empty, see TextWriter.

        In training most words have the spaces before them, so the new text begins with those at the end of a prompt.
        Raises InputError at once if an argument is out of range, or the prompt has no tokens.
        """
        if "" in stop:
            raise InputError("a text before which to stop is empty")
        if tokens < 0 or samples < 1 or lines < 0:
            raise InputError(f"{tokens} tokens of {samples} samples, {lines} lines: give 0, 1 and 0 or more")
        if seed is not None and not 0 <= seed < 2**63:
            raise InputError(f"seed {seed} must be from 0 to 2**63 - 1")
        data = prompt.encode("utf-8", "surrogateescape") if isinstance(prompt, str) else prompt
        self.check_utf8(data)
        begun = self.begun_text(data)
        if not len(ids := self.tokenizer.encode(data.removesuffix(begun))):
            if self.config.model.grid:
                raise InputError("a model of images cannot begin after a line end; give the first bytes of an image")
            if self.tokenizer.line_end is None:
                raise InputError("the prompt has no tokens, and the vocabulary has no line end; give another prompt")
            ids = np.array([self.tokenizer.line_end])
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        writers = [TextWriter(self.tokenizer, ids, stop, lines, begun) for _ in range(samples)]
        predictor = Predictor(self.module, self.mixture, self.runtime, evaluation_lengths(self.config), ids, samples)
        drawn = generate_tokens(predictor, sampling, generator, self.tokenizer.pieces(), begun, samples)

        def pieces() -> Iterator[list[bytes]]:
            for chosen in itertools.islice(drawn, min(tokens, sys.maxsize)):
                yield [writer.write(token) for writer, token in zip(writers, chosen, strict=True)]
                if all(writer.is_done for writer in writers):
                    return
            yield [writer.rest() for writer in writers]

        return pieces()

    def begun_text(self, prompt: bytes) -> bytes:
        """The spaces at the end of a prompt, as many as tokens can begin with."""
        pieces = self.tokenizer.pieces() if self.tokenizer.kind != "bytes" else []
        spaces = (b" " * size for size in range(len(prompt) - len(prompt.rstrip(b" ")), 0, -1))
        return next((begun for begun in spaces if any(which_fit(pieces, begun))), b"")

    def unknown_words(self, text: bytes) -> dict[str, str]:
        """{word: what the tokens keep of it} of the words of a text that they do not keep."""
        words = (
            split_words(normalise(text, "words", self.tokenizer.lowercase)) if self.tokenizer.kind != "bytes" else ()
        )
        read = {word: self.tokenizer.decode(self.tokenizer.encode(word)).decode().strip() for word in words}
        return {word: own for word, own in read.items() if own != word}

    def check_utf8(self, data: bytes) -> None:
        """Raises InputError unless it is UTF-8, or the tokens are bytes. UTF-16 without a mark may be UTF-8, too."""
        if self.tokenizer.kind != "bytes":
            try:
                data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"the text is not UTF-8 (byte {error.start}); {conversion_advice(data)}") from None
            if has_zeros(data):
                raise InputError(f"the text has many zero bytes, like UTF-16; {conversion_advice(data)}")

    def read_network(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """What read_text() returns for a stream; empty for a single token. None without a network."""
        if not self.module:
            return None
        if len(tokens) < 2:
            return np.empty(0), np.empty((0, self.module.d_model))
        return read_text(self.config, self.module, tokens, self.runtime)

    def score(self, text: str | bytes, by_line: bool = False) -> Score:
        """The nll of a text by the evaluation protocol, at the lengths and the batch size of the configuration.

        by_line: each line is a stream of its own, after a line end. Raises InputError if no stream has two tokens, or
        if the text is not UTF-8 and the tokens are not bytes.
        """
        data = text.encode("utf-8") if isinstance(text, str) else text
        vocabulary, mixture = self.tokenizer, self.mixture
        self.check_utf8(data)
        lines = io.BytesIO(data).readlines()  # only a line feed ends a line
        encoded = [vocabulary.encode(line) for line in lines]
        ids = np.concatenate([*encoded, np.empty(0, np.uint32)])
        line_of = np.repeat(np.arange(len(lines)), [len(line) for line in encoded])
        begin = [vocabulary.line_end] if by_line and vocabulary.line_end is not None else []
        begin = np.array(begin, dtype=ids.dtype)
        streams = [np.append(begin, line) for line in encoded if len(line)] if by_line else [ids]
        if max(map(len, streams), default=0) < 2:
            raise InputError(f"the text has {len(ids)} tokens; scoring needs two in {'a line' if by_line else 'all'}")
        network, mixed, shares = [], [], []
        for stream in streams:
            read = self.read_network(stream) or (None, None)
            network.append(read[0])
            if mixture:
                nll, share = mixture.mix(mixture.look(stream, *read))
                mixed.append(nll)
                shares.append(np.pad(share, ((1, 0), (0, 0)))[len(begin) :])
        decoded = vocabulary.decode(ids)
        original = {
            "words": count_words(data),
            "bytes": len(data),
            "lossless": vocabulary.keeps_text and decoded == data,
            "words_kept": vocabulary.keeps_text and has_words(data) and split_words(decoded) == split_words(data),
        }

        def scored(nlls: list[np.ndarray], **more) -> Score:
            nll = np.concatenate([np.append(np.nan, one)[len(begin) :] for one in nlls])
            metrics = text_metrics(float(np.nansum(nll)), int(np.isfinite(nll).sum()), original)
            return Score(lines, ids, line_of, nll, metrics, **more)

        alone = scored(network) if self.module else None
        if not mixture:
            return alone
        return scored(mixed, network=alone, parts=mixture.parts, shares=np.concatenate(shares))


def load_model(path: str | Path, device: str = "auto") -> LanguageModel:
    """The model with the best weights of a training. Raises InputError if a file is missing, damaged or foreign.

    path: the run folder of a training, or an exported folder. device: auto (a GPU if there is one), cpu or cuda.
    """
    trained = read_trained(Path(path))
    if (Path(path) / CODE).exists():
        raise InputError(f"{path} is for Transformers; give the run folder of the training")
    config = replace(trained.config, train=replace(trained.config.train, device=device, compile="never"))
    vocabulary, runtime = Vocabulary.load(Path(path) / VOCABULARY), choose_runtime(config.train)
    module = None
    if trained.pattern:
        module = build_fixed(trained.pattern, config, vocabulary.size).to(runtime.device).eval()
        set_weights(module, trained)
    return LanguageModel(module, vocabulary, trained.pattern, config, runtime, load_mixture(Path(path)))
