"""The vocabulary of a model: a tokenizer, and the ranks that replace its ids."""

from pathlib import Path

import numpy as np

from nas.core.errors import InputError
from nas.core.files import read_yaml, write_yaml
from nas.data.text_files import sha256_of
from nas.data.tokenizers import load_tokenizer

FORMAT = "par-vocabulary/1"
VOCABULARY = "vocabulary"  # its folder, in a prepared corpus and in a run
VOCABULARY_FILE, TOKENIZER_IDS = "vocabulary.yaml", "ids.npy"


def normalise(data: bytes, kind: str, lowercase: bool) -> bytes:
    """What a tokenizer encodes. kind: of the tokenizer. Raises UnicodeDecodeError unless kind is bytes."""
    if kind == "bytes":
        return data.lower() if lowercase else data
    text = data.decode("utf-8")
    return text.lower().encode("utf-8") if lowercase else data


def split_words(text: bytes) -> list[str]:
    """Split at white space, including that of Unicode."""
    return text.decode("utf-8", errors="replace").split()


def count_words(text: bytes) -> int:
    """The number of words as in WikiText: white space separates them, and each line adds one for its end.

    The end of a last line without a line feed does not count.
    """
    return len(split_words(text)) + text.count(b"\n")


class Vocabulary:
    """Translates between text and token ids. The ids of models are ranks: 0 is the most frequent token of train.

    Args:
        tokenizer: from nas.data.tokenizers.
        ids: [V], the tokenizer's id of each id of the model.
        lowercase: whether encode() lowercases the text first.

    kind: sentencepiece, words or bytes. newline: as data.newline. line_end: the id of the line end; None if the tokens
    leave out line ends. keeps_text: whether encode() drops neither line ends nor the case of letters.
    """

    def __init__(self, tokenizer, ids: np.ndarray, lowercase: bool):
        self.tokenizer, self.tokenizer_ids, self.lowercase = tokenizer, ids.astype(np.uint32), lowercase
        self.size = len(ids)
        self.ranks = np.empty(self.size, dtype=np.uint32)
        self.ranks[ids] = np.arange(self.size, dtype=np.uint32)
        self.kind, self.newline = tokenizer.kind, "keep" if tokenizer.keep_newline else "drop"
        self.line_end = int(self.ranks[tokenizer.newline]) if tokenizer.keep_newline else None
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
        """Write the files that load() reads."""
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
        tokenizer = load_tokenizer(folder, content["tokenizer"], content["newline"] == "keep")
        return cls(tokenizer, np.load(folder / TOKENIZER_IDS, allow_pickle=False), content["lowercase"])
