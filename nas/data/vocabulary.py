"""The vocabulary of a model: a tokenizer (pieces of BPE or unigram, bytes, or words), and ranks that replace its ids.

encode() of a tokenizer takes a chunk of text. A chunk ends inside a word only if the word is longer than corpus.CHUNK
bytes. A line end is a token, unless data.newline=drop.
"""

import io
import itertools
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from nas.core.config import PIECES, DataOptions
from nas.core.errors import InputError
from nas.core.files import read_yaml, user_path, write_yaml
from nas.data.sources import sha256_of

FORMAT = "par-vocabulary/1"
VOCABULARY = "vocabulary"  # its folder, in a prepared corpus and in a run
VOCABULARY_FILE, TOKENIZER_IDS = "vocabulary.yaml", "ids.npy"
LOSSLESS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
LOSSLESS |= {"required_chars": "\u2581"}  # a space has a piece, however rare it is
NO_MARKS = {"add_dummy_prefix": False, "bos_id": -1, "eos_id": -1}  # at the start or the end of a text
OPTIONS = {"bpe": {"allow_whitespace_only_pieces": True, "unk_piece": "\u2047"}}  # indentation; <unk> is text
TRAINING_BYTES = 20_000_000  # pieces are learned from about this much text, spread evenly over the train split
DEFAULT_PIECES = 8000
LONGEST_LINE = 4_000  # characters of a training sentence; longer lines are cut
UNKNOWN = "<unk>"
SKIPPED = "\u2585"  # SentencePiece learns nothing from a line that holds it
SPACE = "\u2581"  # SentencePiece's sign for a space; where a text holds it, it is encoded as bytes
MODEL, WORDS = "tokenizer.model", "words.txt"
WORD, LINE = re.compile("\n| *[^ \n]+| +"), re.compile("\n|[^\n]+")  # a word has the spaces before it
WORD_PIECE, LINE_SPACE = re.compile(f"{SPACE}*[^{SPACE}]*"), re.compile(b"^ ", re.MULTILINE)
CHARACTERS = "".join(map(chr, (*range(1, 0x2581), *range(0x2582, 0xD800), *range(0xE000, 0x10000)))).replace(" ", "")
MOST_KNOWN = 5_000_000  # characters of units whose ids are kept


class ByteTokenizer:
    """A token per byte. Encodes any file."""

    kind, files, size = "bytes", {}, 256

    def __init__(self, keep_newline: bool):
        self.keep_newline, self.line_end = keep_newline, ord("\n") if keep_newline else None
        self.is_exact, self.begins_with_space, self.pieces = keep_newline, False, [bytes([byte]) for byte in range(256)]

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data if self.keep_newline else data.replace(b"\n", b""), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: np.ndarray) -> bytes:
        return ids.astype(np.uint8).tobytes()


class LineTokenizer:
    """Base of tokenizers of UTF-8 text. The line end has the last id.

    unit: what is encoded by itself, a line end, a word or the rest of a line. is_exact: whether decode() has given back
    all text so far.
    """

    unit: re.Pattern

    def __init__(self, pieces: list[bytes], begins_with_space: bool, keep_newline: bool):
        """pieces: the text of each id. begins_with_space: whether the first piece of a line has a space to remove."""
        self.keep_newline, self.line_end = keep_newline, len(pieces) if keep_newline else None
        self.pieces, self.begins_with_space = [*pieces, *[b"\n"] * keep_newline], begins_with_space
        self.size, self.is_exact = len(self.pieces), not begins_with_space
        self.known, self.characters = {}, 0  # the ids of units, as bytes; characters of the units
        self.know(["\n"], [[self.line_end] if keep_newline else []])

    def know(self, units: list[str], ids: list[list[int]]) -> None:
        """Keep the ids of units."""
        text, pieces = "".join(units), map(self.pieces.__getitem__, itertools.chain.from_iterable(ids))
        self.is_exact = self.is_exact and b"".join(pieces) == text.encode("utf-8")
        self.characters += len(text)
        self.known |= zip(units, [array("I", own).tobytes() for own in ids], strict=True)

    def learn(self, units: list[str]) -> None:
        """Make the ids of units known, each given once. Those of others may be forgotten."""
        raise NotImplementedError

    def encode(self, data: bytes) -> np.ndarray:
        """UTF-8 -> ids [tokens]. Raises UnicodeDecodeError."""
        units = self.unit.findall(data.decode("utf-8"))
        ids = [*map(self.known.get, units)]
        new = [place for place, own in enumerate(ids) if own is None]
        self.learn([*dict.fromkeys(map(units.__getitem__, new))])
        for place in new:
            ids[place] = self.known[units[place]]
        return np.frombuffer(b"".join(ids), dtype=np.uint32)

    def decode(self, ids: np.ndarray) -> bytes:
        """ids [tokens] -> UTF-8, or parts of its characters."""
        text = b"".join(map(self.pieces.__getitem__, ids.tolist()))
        return LINE_SPACE.sub(b"", text) if self.begins_with_space else text


class SentencePieceTokenizer(LineTokenizer):
    """Pieces of a SentencePiece model (Kudo and Richardson 2018, arXiv 1808.06226).

    Unigram gives no piece to a string that the same character always follows, such as a word before spaces in WikiText.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, keep_newline: bool):
        self.files = {MODEL: model}
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        signs = [self.processor.id_to_piece(index) for index in range(self.processor.get_piece_size())]
        self.space = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode("utf-8")]
        self.has_bytes = all(map(self.processor.is_byte, self.space))
        # No piece goes on after a word, so a line has the pieces of its words with the spaces before them. Unigram adds
        # the scores of a line in float32, so its rounding depends on the line. Those of BPE are ranks.
        by_word = all(map(WORD_PIECE.fullmatch, signs)) and self.processor.normalize("  a ") == f"{SPACE * 2}a{SPACE}"
        by_word = by_word and self.processor.normalize(CHARACTERS) == CHARACTERS  # some rules make spaces of others
        by_word = by_word and all(self.processor.get_score(index).is_integer() for index in range(len(signs)))
        self.unit = WORD if by_word else LINE
        begins_with_space = self.processor.normalize("a").startswith(SPACE)
        super().__init__([*map(self.text_of, range(len(signs)), signs)], begins_with_space, keep_newline)

    def text_of(self, index: int, sign: str) -> bytes:
        """The text of a piece in the middle of a line. sign: as SentencePiece writes the piece."""
        if self.processor.is_byte(index):
            return bytes([int(sign[3:5], 16)])
        if self.processor.is_control(index) or self.processor.is_unknown(index):
            return self.processor.decode([index]).encode("utf-8")
        return sign.replace(SPACE, " ").encode("utf-8")

    def learn(self, units: list[str]) -> None:
        if self.characters + sum(map(len, units)) > MOST_KNOWN:
            self.known, self.characters = {"\n": self.known["\n"]}, 0
        ids = self.processor.encode(units)
        for index in [index for index, unit in enumerate(units) if SPACE in unit] if self.has_bytes else ():
            first, *others = self.processor.encode(units[index].split(SPACE))
            ids[index] = [*first, *(token for part in others for token in (*self.space, *part))]
        self.know(units, ids)

    @classmethod
    def train(cls, text: Iterable[str], method: str, vocab_size: int | None, keep_newline: bool) -> LineTokenizer:
        """Learn a lossless vocabulary: no normalisation, and bytes for characters without a piece.

        vocab_size includes the line end if it is kept; None: DEFAULT_PIECES, or the most that the text allows. Raises
        InputError if vocab_size is too large for the text, or too small for its bytes and characters.
        """
        model, failed = io.BytesIO(), []

        def lines() -> Iterator[str]:
            try:
                yield from text
            except InputError as error:  # SentencePiece puts its own words around it
                failed.append(error)
                raise

        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines(),
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
            if failed:
                raise failed[0] from None
            message, given = (
                f"the pieces could not be learned from this text: {error}",
                f"vocab_size={vocab_size or DEFAULT_PIECES}",
            )
            if "sentences_.empty" in str(error):
                message = "the training text has nothing but line ends; give another one"
            elif largest := re.search(r"value <= (\d+)", str(error)):
                message = f"{given} is too large for this corpus: give at most {int(largest[1]) + keep_newline}"
            elif smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
                needed = int(smallest[1]) + keep_newline
                message = f"{given} is too small: the 256 bytes and the text's characters need {needed}"
            raise InputError(message) from None
        return cls(model.getvalue(), keep_newline)


class WordTokenizer(LineTokenizer):
    """Words separated by white space, and in decoded text by single spaces. One outside the vocabulary is <unk>."""

    kind, unit = "words", re.compile(r"\n|\S+")

    def __init__(self, words: list[str], keep_newline: bool):
        self.files = {WORDS: "\n".join(words).encode("utf-8")}
        self.ids = {word: index for index, word in enumerate(words)}
        super().__init__([b" " + word.encode("utf-8") for word in words], True, keep_newline)

    def learn(self, units: list[str]) -> None:
        self.know(units, [[self.ids.get(word, self.ids[UNKNOWN])] for word in units])

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
            for line in chunk.decode("utf-8").replace(SKIPPED, " ").split("\n"):
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
    path, named = user_path(options.tokenizer), f"data.tokenizer={options.tokenizer}"
    if not path.is_file():
        allowed = "bpe, unigram, bytes, words, a .model file or a vocabulary folder that exists"
        raise InputError(f"{named} must be {allowed}")
    try:
        if not (model := path.read_bytes()):
            raise RuntimeError
        return SentencePieceTokenizer(model, keep_newline)
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

    @classmethod
    def unranked(cls, tokenizer, lowercase: bool) -> "Vocabulary":
        """With the ids of the tokenizer."""
        return cls(tokenizer, np.arange(tokenizer.size), lowercase)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Text -> ids [tokens]. Raises UnicodeDecodeError if bytes are not UTF-8, unless the tokens are bytes."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return self.ranks[self.tokenizer.encode(normalise(data, self.kind, self.lowercase))]

    def decode(self, ids: np.ndarray) -> bytes:
        """ids [tokens] -> text, as bytes."""
        return self.tokenizer.decode(self.tokenizer_ids[ids])

    def pieces(self) -> list[bytes]:
        """The text of each id [V] in the middle of a line."""
        return [self.tokenizer.pieces[index] for index in self.tokenizer_ids]

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
