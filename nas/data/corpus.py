"""A prepared corpus: encode the three splits of a text, write them into the cache, and read them as memory maps.

Text is read in chunks, so memory does not grow with the corpus. Ids are ranked by frequency in the train split, because
adaptive softmax needs the most frequent ids first.
"""

import codecs
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nas.core.config import PIECES, DataOptions
from nas.core.errors import InputError, rank
from nas.core.files import read_yaml, reason_of, user_path, write_text, write_yaml
from nas.core.run_folder import count_cores
from nas.data.sources import (
    SPLITS,
    conversion_advice,
    count_words,
    find_text,
    has_words,
    has_zeros,
    sha256_of,
    split_words,
)
from nas.data.vocabulary import VOCABULARY, VOCABULARY_FILE, Vocabulary, make_tokenizer, normalise

FORMAT = "par-tokens/6"
CHUNK = 1 << 20  # bytes, or ids, processed at once
SHARED = 8 * CHUNK  # bytes of a file that two processes encode, at least
SHOWN_S = 2  # seconds until a bar shows the progress
REFUSED = errno.EACCES, errno.EPERM, errno.EROFS


def prepare(options: DataOptions, tell: Callable[[str], None] = lambda text: None) -> Path:
    """Folder of the prepared corpus, created if the cache does not hold it. tell: is called before the work begins.

    Its name is a digest of the text and the options. It holds {split}.bin (ranked ids), counts.npy (train frequency by
    rank), vocabulary/ and meta.yaml. A call that is killed leaves finished splits to the next one. Raises InputError if
    the text, the options or the cache are unusable.
    """
    cache = user_path(options.cache)
    with usable_cache(cache, tell) as own:
        texts = find_text(options.source, cache)
        for split, path in texts.items():
            if path.stat().st_size == 0:
                raise InputError(f"{path} is empty: the {split} split needs text")
        digests = {split: sha256_of(path) for split, path in texts.items()}
        folder = cache / "tokens" / corpus_digest(digests, options)
        if not is_whole(folder):
            if folder.exists():
                tell(f"WARNING: {folder} is damaged, so it is made again")
                shutil.rmtree(folder)
            size = f" with {options.vocab_size:,} pieces" if options.vocab_size and options.tokenizer in PIECES else ""
            tell(f"preparing the tokens of {options.source}{size}, once")
            if len({*digests.values()}) < len(digests):
                tell("WARNING: two of train, valid and test are the same text, so results are not those of unseen text")
            for path in texts.values():
                with open(path, "rb") as file:
                    if file.read(3) == codecs.BOM_UTF8:
                        tell(f"NOTICE: {path} begins with a byte order mark, which is read as text; better remove it")
            part = folder.with_name(f"{folder.name}.part{own}")
            part.mkdir(parents=True, exist_ok=True)
            try:
                write_corpus(texts, part, options)
            except InputError:
                shutil.rmtree(part)
                raise
            try:
                part.rename(folder)
            except OSError:  # without locks, another process may have been faster
                shutil.rmtree(part)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether the files of a prepared corpus are those that were written."""
    with suppress(InputError, OSError):
        files = read_yaml(folder / "meta.yaml")["files"]
        return all(sha256_of(folder / name) == digest for name, digest in files.items())
    return False


@contextmanager
def usable_cache(cache: Path, tell: Callable[[str], None]) -> Iterator[str]:
    """Let one process at a time write to the cache; the others wait. Yields the end of the names of unfinished folders.

    A cache that cannot be written is only read. Raises InputError if it must be written nevertheless.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError), open(cache / ".lock", "a"):
            pass
        lock = os.open(cache / ".lock", os.O_RDONLY)  # that of another account, too
    except OSError as error:
        if not cache.is_dir():
            raise InputError(
                f"data.cache={cache} cannot be made: {reason_of(error, cache)}; give another folder"
            ) from None
        lock = None
    try:
        yield "" if lock is not None and wait_for(lock, cache, tell) else f"-{os.getpid()}"
    except OSError as error:
        if error.errno in REFUSED and str(error.filename).startswith(f"{cache}/"):
            raise InputError(f"data.cache={cache} cannot be written: {error.strerror}; give another folder") from None
        error.filename = error.filename or cache  # such as that of a full disk
        raise
    finally:
        if lock is not None:
            os.close(lock)


def wait_for(lock: int, cache: Path, tell: Callable[[str], None]) -> bool:
    """Lock a file, as soon as other processes leave it. False, with a notice, if the filesystem has no locks."""
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"waiting for another process that prepares a text in {cache}")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        tell(f"NOTICE: data.cache={cache} has no locks ({error.strerror}), so each process prepares a text by itself")
        return False
    return True


def corpus_digest(digests: dict[str, str], options: DataOptions) -> str:
    """16 hexadecimal digits that change with the SHA-256 of a split and with each option that changes the tokens."""
    tokenizer = user_path(options.tokenizer)
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
    """Write all files of a prepared corpus into a folder, which may have some of an earlier call."""
    given, origin = None, user_path(options.tokenizer)
    if (origin / VOCABULARY_FILE).exists():  # the ids of a given vocabulary keep their ranks on any text
        given = Vocabulary.load(origin)
        options = replace(options, tokenizer=given.kind, lowercase=given.lowercase, newline=given.newline)
    learned = folder / "learned"
    if not (learned / VOCABULARY_FILE).exists():
        chunks, size = read_chunks(texts["train"], options), texts["train"].stat().st_size
        (given or Vocabulary.unranked(make_tokenizer(chunks, size, options), options.lowercase)).save(learned)
    vocabulary, facts = Vocabulary.load(learned), {}
    tokenizer = vocabulary.tokenizer
    for split, text in texts.items():
        ids, about = folder / f"{split}.ids", folder / f"{split}.yaml"
        if not about.exists():
            write_yaml(about, encode_split(text, ids, tokenizer, options))
        facts[split] = read_yaml(about)
    prose = has_words(next(read_chunks(texts["train"], options)))  # of the whole text: other splits may be short
    facts = {split: own | {"words_kept": own["words_kept"] and prose} for split, own in facts.items()}
    counts = sum(np.bincount(ids, minlength=tokenizer.size) for ids in read_ids(folder / "train.ids"))
    if not given:
        vocabulary = Vocabulary(tokenizer, np.argsort(-counts, kind="stable"), options.lowercase)
    vocabulary.save(folder / VOCABULARY)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    for split in SPLITS:
        with open(folder / f"{split}.bin", "wb") as file:
            for ids in read_ids(folder / f"{split}.ids"):
                vocabulary.ranks[ids].astype(dtype).tofile(file)
    np.save(folder / "counts.npy", counts[vocabulary.tokenizer_ids])
    for split in SPLITS:
        (folder / f"{split}.yaml").unlink()
        (folder / f"{split}.ids").unlink()
    shutil.rmtree(learned)
    meta = {
        "format": FORMAT,
        "vocab_size": tokenizer.size,
        "dtype": dtype.name,
        "tokenizer_sha256": next((sha256_of(folder / VOCABULARY / name) for name in tokenizer.files), None),
        "splits": facts,
        "files": {str(file.relative_to(folder)): sha256_of(file) for file in folder.rglob("*") if file.is_file()},
    }
    write_yaml(folder / "meta.yaml", meta)


def read_ids(path: Path) -> Iterator[np.ndarray]:
    """The ids of a file in chunks; at least one, which may be empty."""
    with open(path, "rb") as file:
        yield np.fromfile(file, dtype=np.uint32, count=CHUNK)
        while (ids := np.fromfile(file, dtype=np.uint32, count=CHUNK)).size:
            yield ids


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
                if user_path(options.source).is_file():
                    before = (path.with_stem(name).stat().st_size for name in SPLITS[: SPLITS.index(path.stem)])
                    place = f"byte {sum(before) + offset + error.start}"
                raise InputError(f"data.source={options.source} is not UTF-8 text ({place}); {advice(data)}") from None
            if options.tokenizer != "bytes" and has_zeros(chunk):
                raise InputError(f"data.source={options.source} has many zero bytes, like UTF-16; {advice(data)}")
            yield chunk
            rest, offset = data[cut:], offset + cut


def advice(data: bytes) -> str:
    return f"{conversion_advice(data)}; data.tokenizer=bytes reads any file"


def chunk_end(data: bytes) -> int:
    """The place after the last line end, else before the last spaces, else after the last whole character."""
    cut = data.rfind(b"\n") + 1 or len(data[: data.rfind(b" ") + 1].rstrip(b" "))
    if not cut:
        cut = len(data)
        while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
            cut -= 1  # move before the continuation bytes of the last character
        cut -= data[cut - 1] >= 0xC0
    return cut


def encode_split(path: Path, target: Path, tokenizer, options: DataOptions) -> dict:
    """Write the tokenizer's ids as uint32. Returns the facts of the split for meta.yaml."""
    words, size, lossless, words_kept = 0, path.stat().st_size, True, True
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=path.stem, disable=True if rank() else None, delay=SHOWN_S)
    with open(target, "wb") as file, bar, second_process(path, tokenizer, options) as second:
        for index, chunk in enumerate(read_chunks(path, options)):
            try:
                found = second.recv() if second and index % 2 else encode_chunk(chunk, tokenizer, options)
            except (EOFError, OSError):  # it was ended, as by lack of memory
                second, found = None, encode_chunk(chunk, tokenizer, options)
            file.write(found[0])
            words, lossless, words_kept = words + found[1], lossless and found[2], words_kept and found[3]
            bar.update(len(chunk))
    return {
        "tokens": target.stat().st_size // 4,
        "bytes": size,
        "words": words,
        "sha256": sha256_of(path),
        "lossless": lossless,
        "words_kept": words_kept,
    }


def encode_chunk(chunk: bytes, tokenizer, options: DataOptions) -> tuple[bytes, int, bool, bool]:
    """The ids as uint32, the number of words, and whether the ids keep the chunk and its words."""
    ids = tokenizer.encode(chunk)
    if options.newline != "keep" or options.lowercase:
        return ids.tobytes(), count_words(chunk), False, False
    decoded = chunk if tokenizer.is_exact else tokenizer.decode(ids)
    words_kept = decoded == chunk or split_words(decoded) == split_words(chunk)
    return ids.tobytes(), count_words(chunk), decoded == chunk, words_kept


@contextmanager
def second_process(path: Path, tokenizer, options: DataOptions) -> Iterator[Connection | None]:
    """Give encode_chunk() of every second chunk from a fork.

    None for a short file, on one core, and where forks are not safe.
    """
    if path.stat().st_size < SHARED or sys.platform != "linux" or count_cores() < 2:
        yield None
        return
    receiver, sender = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the fork does not use
        child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the pipe ends it
            receiver.close()
            for chunk in itertools.islice(read_chunks(path, options), 1, None, 2):
                sender.send(encode_chunk(chunk, tokenizer, options))
        finally:
            os._exit(0)
    sender.close()
    try:
        yield receiver
    finally:
        receiver.close()
        os.waitpid(child, 0)


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
        """A file beside the tokens. `write` makes it unless it is there; several processes may do so at once."""
        file, digest = self.folder / name, self.folder / f"{name}.sha256"
        if not (file.exists() and digest.exists() and digest.read_text() == sha256_of(file)):
            with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as temporary:
                write(whole := Path(temporary) / name)
                whole.replace(file)
            write_text(digest, sha256_of(file))
        return file


def bytes_per_token(corpus: Corpus) -> float:
    """Bytes of the original training text that a token stands for, on average."""
    text = corpus.meta["splits"]["train"]
    return text["bytes"] / text["tokens"]
