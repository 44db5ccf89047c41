"""A prepared corpus: encode the three splits of a text, write them into the cache, and read them as memory maps.

Text is read in chunks, so memory does not grow with the corpus. Ids are ranked by frequency in the train split, because
adaptive softmax needs the most frequent ids first.
"""

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from nas.core.config import PIECES, DataOptions
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_yaml
from nas.data.sources import SPLITS, count_words, find_text, is_text_file, sha256_of, split_words
from nas.data.vocabulary import VOCABULARY, VOCABULARY_FILE, Vocabulary, make_tokenizer, normalise

FORMAT = "par-tokens/4"
CHUNK = 1 << 20  # bytes, or ids, processed at once


def prepare(options: DataOptions, tell: Callable[[str], None] = lambda text: None) -> Path:
    """Folder of the prepared corpus, created if the cache does not hold it. tell: is called before the work begins.

    Its name is a digest of the text and the options. It holds {split}.bin (ranked ids), counts.npy (train frequency by
    rank), vocabulary/ and meta.yaml. Raises InputError if the text or the options are unusable.
    """
    cache = Path(options.cache).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time writes to the cache; the others wait
        texts = find_text(options.source, cache)
        for split, path in texts.items():
            if path.stat().st_size == 0:
                raise InputError(f"{path} is empty: the {split} split needs text")
        digests = {split: sha256_of(path) for split, path in texts.items()}
        folder = cache / "tokens" / corpus_digest(digests, options)
        if not (folder / "meta.yaml").exists():
            size = f" with {options.vocab_size:,} pieces" if options.vocab_size and options.tokenizer in PIECES else ""
            tell(f"preparing the tokens of {options.source}{size}, once")
            if len({*digests.values()}) < len(digests):
                tell("WARNING: two of train, valid and test are the same text, so results are not those of unseen text")
            folder.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
                write_corpus(texts, Path(temporary), options)
                Path(temporary).rename(folder)
    return folder


def corpus_digest(digests: dict[str, str], options: DataOptions) -> str:
    """16 hexadecimal digits that change with the SHA-256 of a split and with each option that changes the tokens."""
    tokenizer = Path(options.tokenizer).expanduser()
    file = tokenizer / VOCABULARY_FILE if tokenizer.is_dir() else tokenizer
    key = {
        "format": FORMAT,
        "text": digests,
        "tokenizer": sha256_of(file) if file.is_file() else options.tokenizer,
        "vocab_size": options.vocab_size if options.tokenizer in (*PIECES, "words") else None,
        "lowercase": options.lowercase,
        "newline": options.newline,
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def write_corpus(texts: dict[str, Path], folder: Path, options: DataOptions) -> None:
    """Write all files of a prepared corpus into an empty folder."""
    given, counts, facts, origin = None, {}, {}, Path(options.tokenizer).expanduser()
    if (origin / VOCABULARY_FILE).exists():  # the ids of a given vocabulary keep their ranks on any text
        given = Vocabulary.load(origin)
        options = replace(options, tokenizer=given.kind, lowercase=given.lowercase, newline=given.newline)
    chunks, size = read_chunks(texts["train"], options), texts["train"].stat().st_size
    tokenizer = given.tokenizer if given else make_tokenizer(chunks, size, options)
    for split in SPLITS:
        counts[split], facts[split] = encode_split(texts[split], folder / f"{split}.ids", tokenizer, options)
    vocabulary = given or Vocabulary(tokenizer, np.argsort(-counts["train"], kind="stable"), options.lowercase)
    vocabulary.save(folder / VOCABULARY)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    for split in SPLITS:
        ids_path = folder / f"{split}.ids"
        with open(ids_path, "rb") as ids_file, open(folder / f"{split}.bin", "wb") as ranks_file:
            while (ids := np.fromfile(ids_file, dtype=np.uint32, count=CHUNK)).size:
                vocabulary.ranks[ids].astype(dtype).tofile(ranks_file)
        ids_path.unlink()
    np.save(folder / "counts.npy", counts["train"][vocabulary.tokenizer_ids])
    meta = {
        "format": FORMAT,
        "vocab_size": tokenizer.size,
        "dtype": dtype.name,
        "tokenizer_sha256": next((sha256_of(folder / VOCABULARY / name) for name in tokenizer.files), None),
        "splits": facts,
    }
    write_yaml(folder / "meta.yaml", meta)


def read_chunks(path: Path, options: DataOptions) -> Iterator[bytes]:
    """The file in chunks of about CHUNK bytes, in lower case if so chosen. Raises InputError if it is not UTF-8."""
    rest, offset = b"", 0
    with open(path, "rb") as file:
        while data := rest + (block := file.read(CHUNK)):
            cut = chunk_end(data) if block else len(data)
            try:
                chunk = normalise(data[:cut], options.tokenizer, options.lowercase)
            except UnicodeDecodeError as error:
                place = f"byte {offset + error.start} of the {path.stem} split"
                advice = "convert it, as with iconv -f ENCODING -t UTF-8; data.tokenizer=bytes reads any file"
                raise InputError(f"data.source={options.source} is not UTF-8 text ({place}); {advice}") from None
            yield chunk
            rest, offset = data[cut:], offset + cut


def chunk_end(data: bytes) -> int:
    """The place after the last line end, else before the last space, else after the last whole character."""
    cut = data.rfind(b"\n") + 1 or data.rfind(b" ")
    if cut <= 0:
        cut = len(data)
        while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
            cut -= 1  # move before the continuation bytes of the last character
        cut -= data[cut - 1] >= 0xC0
    return cut


def encode_split(path: Path, target: Path, tokenizer, options: DataOptions) -> tuple[np.ndarray, dict]:
    """Write the tokenizer's ids as uint32. Returns counts [size], and the facts of the split for meta.yaml."""
    counts, words = np.zeros(tokenizer.size, dtype=np.int64), 0
    lossless = words_kept = options.newline == "keep" and not options.lowercase
    with open(target, "wb") as file:
        for chunk in read_chunks(path, options):
            words += count_words(chunk)
            ids = tokenizer.encode(chunk)
            counts += np.bincount(ids, minlength=tokenizer.size)
            ids.tofile(file)
            if words_kept:
                decoded = tokenizer.decode(ids)
                lossless = lossless and decoded == chunk
                words_kept = lossless or split_words(decoded) == split_words(chunk)
    return counts, {
        "tokens": int(counts.sum()),
        "bytes": path.stat().st_size,
        "words": words,
        "sha256": sha256_of(path),
        "lossless": lossless,
        "words_kept": words_kept and is_text_file(path),
    }


class Corpus:
    """A folder that nas.data.corpus wrote. Ids are ranks: 0 is the most frequent token of the train split."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.meta = read_yaml(folder / "meta.yaml")
        self.vocab_size = self.meta["vocab_size"]

    def tokens(self, split: str) -> np.ndarray:
        """Ids [tokens] of a split, as a memory map."""
        if self.meta["splits"][split]["tokens"] == 0:
            return np.empty(0, dtype=self.meta["dtype"])
        return np.memmap(self.folder / f"{split}.bin", dtype=self.meta["dtype"], mode="r")

    def counts(self) -> np.ndarray:
        """Frequency of each id in the train split [vocab_size], descending."""
        return np.load(self.folder / "counts.npy")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.load(self.folder / VOCABULARY)

    def keep(self, name: str, write: Callable[[Path], object]) -> Path:
        """A file beside the tokens. `write` makes it unless it exists; several processes may do so at once."""
        if not (file := self.folder / name).exists():
            with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as temporary:
                write(whole := Path(temporary) / name)
                whole.replace(file)
        return file


def bytes_per_token(corpus: Corpus) -> float:
    """Bytes of the original training text that a token stands for, on average."""
    text = corpus.meta["splits"]["train"]
    return text["bytes"] / text["tokens"]
