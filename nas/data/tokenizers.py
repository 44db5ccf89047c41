"""Tokenizers: pieces (BPE or unigram), bytes and words.

encode() takes a chunk of text. A chunk ends inside a word only if the word is longer than preprocess.CHUNK bytes. A
line end is a token, unless data.newline=drop. The ids are the tokenizer's own; nas.data.preprocess later ranks them by
frequency.
"""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nas.core.errors import InputError

OPTIONS = {"bpe": {"allow_whitespace_only_pieces": True, "unk_piece": "\u2047"}}  # indentation; <unk> is text
TRAINING_BYTES = 20_000_000  # pieces are learned from about this much text, spread evenly over the train split
DEFAULT_PIECES = 8000
LONGEST_LINE = 4_000  # characters of a training sentence; longer lines are cut
UNKNOWN = "<unk>"
MODEL, WORDS = "tokenizer.model", "words.txt"


class ByteTokenizer:
    """A token per byte. Encodes any file."""

    kind, files, size = "bytes", {}, 256

    def __init__(self, keep_newline: bool = True):
        self.keep_newline, self.newline = keep_newline, ord("\n") if keep_newline else None

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data if self.keep_newline else data.replace(b"\n", b""), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: np.ndarray) -> bytes:
        return ids.astype(np.uint8).tobytes()


class LineTokenizer:
    """Base of tokenizers of UTF-8 text. Subclasses encode and decode a line without its end, which has the last id."""

    def __init__(self, size: int, keep_newline: bool):
        self.keep_newline, self.newline = keep_newline, size if keep_newline else None
        self.size = size + keep_newline

    def encode(self, data: bytes) -> np.ndarray:
        """UTF-8 -> ids [tokens]. Raises UnicodeDecodeError."""
        first, *others = self.encode_lines(data.decode("utf-8").split("\n"))
        end = [] if self.newline is None else [self.newline]
        ids = itertools.chain(first, *(end + line for line in others))
        return np.fromiter(ids, dtype=np.uint32)

    def decode(self, ids: np.ndarray) -> bytes:
        """ids [tokens] -> UTF-8."""
        if self.newline is None:
            return self.decode_line(ids).encode("utf-8")
        lines = np.split(ids, np.flatnonzero(ids == self.newline))
        texts = [self.decode_line(line[line != self.newline]) for line in lines]
        return "\n".join(texts).encode("utf-8")


class SentencePieceTokenizer(LineTokenizer):
    """Pieces of a SentencePiece model (Kudo and Richardson 2018, arXiv 1808.06226).

    Its unigram training gives no piece to a string that the same character always follows. Where spaces surround every
    word and mark, as in WikiText, it lacks many words, and needs a quarter more tokens than BPE.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, keep_newline: bool = True):
        import sentencepiece

        self.files = {MODEL: model}
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        super().__init__(self.processor.get_piece_size(), keep_newline)

    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        return self.processor.encode(lines)

    def decode_line(self, ids: np.ndarray) -> str:
        return self.processor.decode(ids.tolist())

    @classmethod
    def train(
        cls, text: Iterable[str], method: str, vocab_size: int | None, keep_newline: bool
    ) -> "SentencePieceTokenizer":
        """Learn a lossless vocabulary: no normalisation, and bytes for characters without a piece.

        vocab_size includes the line end if it is kept; None: DEFAULT_PIECES, or the most that the text allows. Raises
        InputError if the text is too short for vocab_size, or if vocab_size is too small for bytes and characters.
        """
        import sentencepiece

        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(text),
                model_writer=model,
                vocab_size=(vocab_size or DEFAULT_PIECES) - keep_newline,
                hard_vocab_limit=vocab_size is not None,
                model_type=method,
                **OPTIONS.get(method, {}),
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                byte_fallback=True,
                max_sentence_length=8 * LONGEST_LINE,
                bos_id=-1,
                eos_id=-1,
                num_threads=8,  # fixed because the pieces depend on it
                minloglevel=2,
            )
        except RuntimeError as error:
            raise InputError(training_message(str(error), vocab_size, keep_newline)) from None
        return cls(model.getvalue(), keep_newline)


def training_message(reason: str, vocab_size: int | None, extra: int) -> str:
    """Turn a SentencePiece training error into one about options. extra: number of tokens that are not pieces."""
    largest = re.search(r"value <= (\d+)", reason)
    if largest:
        return f"data.vocab_size={vocab_size} is too large for this corpus: give at most {int(largest[1]) + extra}"
    smallest = re.search(r"smaller than required_chars\. (\d+) vs (\d+)", reason)
    if smallest:
        needed = int(smallest[2]) + extra
        return f"data.vocab_size={vocab_size} is too small: the 256 bytes and the text's characters need {needed}"
    return f"the pieces could not be learned from this text: {reason}"


class WordTokenizer(LineTokenizer):
    """Words separated by white space; a word outside the vocabulary is <unk>.

    Decoding separates the words of a line by single spaces.
    """

    kind = "words"

    def __init__(self, words: list[str], keep_newline: bool = True):
        self.words, self.files = words, {WORDS: "\n".join(words).encode("utf-8")}
        self.ids = {word: index for index, word in enumerate(words)}
        super().__init__(len(words), keep_newline)

    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        unknown = self.ids[UNKNOWN]
        return [[self.ids.get(word, unknown) for word in line.split()] for line in lines]

    def decode_line(self, ids: np.ndarray) -> str:
        return " ".join(self.words[index] for index in ids)

    @classmethod
    def train(cls, text: Iterable[str], vocab_size: int | None, keep_newline: bool) -> "WordTokenizer":
        """The most frequent words and <unk>. vocab_size includes the line end if it is kept; None: all words."""
        counts = Counter(word for line in text for word in line.split())
        room = None if vocab_size is None else max(0, vocab_size - keep_newline - 1)
        words = [word for word, _ in counts.most_common() if word != UNKNOWN][:room]
        return cls([UNKNOWN, *words], keep_newline)


def training_lines(text: Iterator[bytes], total_bytes: int) -> Iterator[str]:
    """Lines of every k-th chunk, about TRAINING_BYTES in all."""
    every = max(1, -(-total_bytes // TRAINING_BYTES))
    for index, chunk in enumerate(text):
        if index % every == 0:
            for line in chunk.decode("utf-8").split("\n"):
                yield from (line[start : start + LONGEST_LINE] for start in range(0, len(line), LONGEST_LINE))


def load_tokenizer(folder: Path, kind: str, keep_newline: bool):
    """The tokenizer whose `files` lie in a folder."""
    if kind == "bytes":
        return ByteTokenizer(keep_newline)
    if kind == "words":
        return WordTokenizer((folder / WORDS).read_text(encoding="utf-8").split("\n"), keep_newline)
    return SentencePieceTokenizer((folder / MODEL).read_bytes(), keep_newline)
