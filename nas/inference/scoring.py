"""The nll of a text, token by token and line by line, by the evaluation protocol."""

import io
from dataclasses import dataclass

import numpy as np

from models.transformer_xl import TransformerXL
from nas.core.config import Config
from nas.core.errors import InputError
from nas.data.sources import is_text
from nas.data.vocabulary import Vocabulary, count_words, split_words
from nas.training.device import DeviceContext
from nas.training.evaluation import figures, reading_lengths, token_nll

SHOWN = 60  # characters of a line in the printed form of a Score


@dataclass(frozen=True, repr=False)
class Score:
    """The nll of a text. Its printed form has a row per line of the text, and the figures."""

    lines: list[bytes]  # of the text, with their ends
    ids: np.ndarray  # [N], the tokens
    line_of: np.ndarray  # [N], the index of each token's line
    nll: np.ndarray  # [N], in nats; NaN for the first token, which nothing predicts
    figures: dict  # those of results.yaml, of the whole text

    def line_nll(self) -> np.ndarray:
        """The summed nll of each line's tokens [lines], in nats."""
        return np.bincount(self.line_of, np.nan_to_num(self.nll), minlength=len(self.lines))

    def __repr__(self) -> str:
        rows = [f"{'line':>6}{'tokens':>8}{'nll':>12}  text"]
        counts = np.bincount(self.line_of, minlength=len(self.lines))
        for number, (line, count, nll) in enumerate(zip(self.lines, counts, self.line_nll(), strict=True), start=1):
            text = line.decode("utf-8", errors="replace").rstrip("\r\n")
            shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
            rows.append(f"{number:>6}{count:>8}{nll:>12.4f}  {shown}")
        about = self.figures
        words = "no comparable word perplexity: the tokens do not keep the words"
        if about["word_perplexity_comparable"]:
            words = f"word perplexity {about['word_perplexity']:.4f}, {about['words']} words and line ends"
        compared = "" if about["bits_per_byte_comparable"] else " (not comparable: the tokens do not keep the text)"
        rows += [
            f"nll {about['nll']:.4f} in {about['tokens']} predicted tokens, {about['nll_per_token']:.4f} per token",
            f"perplexity {about['perplexity']:.4f} per token",
            words,
            f"bits per byte {about['bits_per_byte']:.4f}, {about['bytes']} bytes{compared}",
        ]
        return "\n".join(rows)


def score_text(
    data: bytes, module: TransformerXL, vocabulary: Vocabulary, config: Config, context: DeviceContext
) -> Score:
    """Score a text, with the segment, the memory and the batch size of the configuration.

    Raises InputError if the text has fewer than two tokens, or if it is not UTF-8 and the tokens are not bytes.
    """
    lines = io.BytesIO(data).readlines()  # only a line feed ends a line
    encoded = [vocabulary.encode(line) for line in lines]
    ids = np.concatenate([*encoded, np.empty(0, np.uint32)])
    if len(ids) < 2:
        raise InputError(f"the text has {len(ids)} tokens; scoring needs at least two")
    line_of = np.repeat(np.arange(len(lines)), [len(line) for line in encoded])
    with context.autocast(), context.disable_compile():
        nll = token_nll(module, ids, *reading_lengths(config, module.blocks), device=context.device)
    decoded = vocabulary.decode(ids)
    original = {
        "words": count_words(data),
        "bytes": len(data),
        "lossless": vocabulary.keeps_text and decoded == data,
        "words_kept": vocabulary.keeps_text and is_text(data) and split_words(decoded) == split_words(data),
    }
    return Score(lines, ids, line_of, np.concatenate([[np.nan], nll]), figures(float(nll.sum()), len(nll), original))
