"""The vocabulary of a model: a tokenizer (pieces of BPE or unigram, bytes, or words), and ranks that replace its ids.

encode() of a tokenizer takes a chunk of text. A chunk ends inside a word only if the word is longer than corpus.CHUNK
bytes. A line end is a token, unless data.newline=drop.
"""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from nas.core.config import PIECES, DataOptions
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_yaml
from nas.data.sources import sha256_of

FORMAT = "par-vocabulary/1"
VOCABULARY = "vocabulary"  # its folder, in a prepared corpus and in a run
VOCABULARY_FILE, TOKENIZER_IDS = "vocabulary.yaml", "ids.npy"
LOSSLESS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
NO_MARKS = {"add_dummy_prefix": False, "bos_id": -1, "eos_id": -1}  # at the start or the end of a text
OPTIONS = {"bpe": {"allow_whitespace_only_pieces": True, "unk_piece": "\u2047"}}  # indentation; <unk> is text
TRAINING_BYTES = 20_000_000  # pieces are learned from about this much text, spread evenly over the train split
DEFAULT_PIECES = 8000
LONGEST_LINE = 4_000  # characters of a training sentence; longer lines are cut
UNKNOWN = "<unk>"
MODEL, WORDS = "tokenizer.model", "words.txt"


class ByteTokenizer:
    """A token per byte. Encodes any file."""

    kind, files, size = "bytes", {}, 256

    def __init__(self, keep_newline: bool):
        self.keep_newline, self.line_end = keep_newline, ord("\n") if keep_newline else None

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data if self.keep_newline else data.replace(b"\n", b""), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: np.ndarray) -> bytes:
        return ids.astype(np.uint8).tobytes()


class LineTokenizer:
    """Base of tokenizers of UTF-8 text. Subclasses encode and decode a line without its end, which has the last id."""

    def __init__(self, size: int, keep_newline: bool):
        self.keep_newline, self.line_end = keep_newline, size if keep_newline else None
        self.size = size + keep_newline

    def encode(self, data: bytes) -> np.ndarray:
        """UTF-8 -> ids [tokens]. Raises UnicodeDecodeError."""
        first, *others = self.encode_lines(data.decode("utf-8").split("\n"))
        end = [] if self.line_end is None else [self.line_end]
        ids = itertools.chain(first, *(end + line for line in others))
        return np.fromiter(ids, dtype=np.uint32)

    def decode(self, ids: np.ndarray) -> bytes:
        """ids [tokens] -> UTF-8."""
        if self.line_end is None:
            return self.decode_line(ids).encode("utf-8")
        lines = np.split(ids, np.flatnonzero(ids == self.line_end))
        texts = [self.decode_line(line[line != self.line_end]) for line in lines]
        return "\n".join(texts).encode("utf-8")


class SentencePieceTokenizer(LineTokenizer):
    """Pieces of a SentencePiece model (Kudo and Richardson 2018, arXiv 1808.06226).

    Unigram gives no piece to a string that the same character always follows, such as a word before spaces in WikiText.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, keep_newline: bool):
        self.files = {MODEL: model}
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        super().__init__(self.processor.get_piece_size(), keep_newline)

    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        return self.processor.encode(lines)

    def decode_line(self, ids: np.ndarray) -> str:
        return self.processor.decode(ids.tolist())

    @classmethod
    def train(cls, text: Iterable[str], method: str, vocab_size: int | None, keep_newline: bool) -> LineTokenizer:
        """Learn a lossless vocabulary: no normalisation, and bytes for characters without a piece.

        vocab_size includes the line end if it is kept; None: DEFAULT_PIECES, or the most that the text allows. Raises
        InputError if vocab_size is too large for the text, or too small for its bytes and characters.
        """
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(text),
                model_writer=model,
                vocab_size=(vocab_size or DEFAULT_PIECES) - keep_newline,
                hard_vocab_limit=vocab_size is not None,
                model_type=method,
                **OPTIONS.get(method, {}) | LOSSLESS | NO_MARKS,
                max_sentence_length=8 * LONGEST_LINE,
                num_threads=8,  # fixed because the pieces depend on it
                minloglevel=2,
            )
        except RuntimeError as error:
            message, given = f"the pieces could not be learned from this text: {error}", f"data.vocab_size={vocab_size}"
            if largest := re.search(r"value <= (\d+)", str(error)):
                message = f"{given} is too large for this corpus: give at most {int(largest[1]) + keep_newline}"
            elif smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
                needed = int(smallest[1]) + keep_newline
                message = f"{given} is too small: the 256 bytes and the text's characters need {needed}"
            raise InputError(message) from None
        return cls(model.getvalue(), keep_newline)


class WordTokenizer(LineTokenizer):
    """Words separated by white space, and in decoded text by single spaces. One outside the vocabulary is <unk>."""

    kind = "words"

    def __init__(self, words: list[str], keep_newline: bool):
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


def make_tokenizer(text: Iterator[bytes], total_bytes: int, options: DataOptions):
    """The tokenizer of data.tokenizer, trained on the text if necessary. Raises InputError if there is none."""
    keep_newline = options.newline == "keep"
    if options.tokenizer == "bytes":
        return ByteTokenizer(keep_newline)
    if options.tokenizer == "words":
        return WordTokenizer.train((chunk.decode("utf-8") for chunk in text), options.vocab_size, keep_newline)
    if options.tokenizer in PIECES:
        lines = training_lines(text, total_bytes)
        return SentencePieceTokenizer.train(lines, options.tokenizer, options.vocab_size, keep_newline)
    path, named = Path(options.tokenizer).expanduser(), f"data.tokenizer={options.tokenizer}"
    if not path.is_file():
        allowed = "bpe, unigram, bytes, words, a .model file or a vocabulary folder that exists"
        raise InputError(f"{named} must be {allowed}")
    try:
        return SentencePieceTokenizer(path.read_bytes(), keep_newline)
    except RuntimeError:
        raise InputError(f"{named} is not a SentencePiece model") from None


def normalise(data: bytes, kind: str, lowercase: bool) -> bytes:
    """What a tokenizer encodes. kind: of the tokenizer. Raises UnicodeDecodeError unless kind is bytes."""
    if kind == "bytes":
        return data.lower() if lowercase else data
    text = data.decode("utf-8")
    return text.lower().encode("utf-8") if lowercase else data


class Vocabulary:
    """Translates between text and token ids. The ids of models are ranks: 0 is the most frequent token of train.

    ids [V]: the tokenizer's id of each id of the model. kind: sentencepiece, words or bytes. newline: as data.newline.
    line_end: its id; None if tokens leave it out. keeps_text: whether encode() keeps line ends and the case of letters.
    """

    def __init__(self, tokenizer, ids: np.ndarray, lowercase: bool):
        self.tokenizer, self.tokenizer_ids, self.lowercase = tokenizer, ids.astype(np.uint32), lowercase
        self.size = len(ids)
        self.ranks = np.argsort(ids).astype(np.uint32)
        self.kind, self.newline = tokenizer.kind, "keep" if tokenizer.keep_newline else "drop"
        self.line_end = int(self.ranks[tokenizer.line_end]) if tokenizer.keep_newline else None
        self.keeps_text = tokenizer.keep_newline and not lowercase

    def encode(self, text: str | bytes) -> np.ndarray:
        """Text -> ids [tokens]. Raises InputError if bytes are not UTF-8, unless the tokens are bytes."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        try:
            data = normalise(data, self.kind, self.lowercase)
        except UnicodeDecodeError as error:
            raise InputError(f"the text is not UTF-8 (byte {error.start}); this model reads UTF-8 text") from None
        return self.ranks[self.tokenizer.encode(data)]

    def decode(self, ids: np.ndarray) -> bytes:
        """ids [tokens] -> text, as bytes."""
        return self.tokenizer.decode(self.tokenizer_ids[ids])

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name, content in self.tokenizer.files.items():
            (folder / name).write_bytes(content)
        np.save(folder / TOKENIZER_IDS, self.tokenizer_ids)
        content = {
            "format": FORMAT,
            "tokenizer": self.kind,
            "size": self.size,
            "newline": self.newline,
            "lowercase": self.lowercase,
            "sha256": {name: sha256_of(folder / name) for name in (TOKENIZER_IDS, *self.tokenizer.files)},
        }
        write_yaml(folder / VOCABULARY_FILE, content)

    @classmethod
    def load(cls, folder: Path) -> "Vocabulary":
        """Raises InputError if a file is missing or damaged."""
        path = folder / VOCABULARY_FILE
        content = read_yaml(path)
        if content.get("format") != FORMAT or not {"tokenizer", "newline", "lowercase", "sha256"} <= content.keys():
            raise InputError(f"{path} is damaged: it lacks `format: {FORMAT}`, tokenizer, newline, lowercase or sha256")
        for name, digest in content["sha256"].items():
            if not (folder / name).exists() or sha256_of(folder / name) != digest:
                raise InputError(f"{folder / name} is missing or damaged: it is not the file of {VOCABULARY_FILE}")
        kind, keep_newline = content["tokenizer"], content["newline"] == "keep"
        if kind == "bytes":
            tokenizer = ByteTokenizer(keep_newline)
        elif kind == "words":
            tokenizer = WordTokenizer((folder / WORDS).read_text(encoding="utf-8").split("\n"), keep_newline)
        else:
            tokenizer = SentencePieceTokenizer((folder / MODEL).read_bytes(), keep_newline)
        return cls(tokenizer, np.load(folder / TOKENIZER_IDS, allow_pickle=False), content["lowercase"])
