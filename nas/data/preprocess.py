"""nas.data.preprocess."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml

from nas.core.config import DataOptions
from nas.core.errors import InputError
from nas.data.sources import find_text
from nas.data.text_files import SPLITS, is_text, sha256_of
from nas.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, WordTokenizer, training_lines

FORMAT = "par-tokens/1"


CHUNK = 1 << 20


def read_chunks(path: Path, options: DataOptions) -> Iterator[bytes]:
    """The file in pieces of about CHUNK bytes, each ending at a line end, else before a space, else at a character;
    lowercased where that is asked for. Raises InputError on text that is not UTF-8 (unless the tokenizer is bytes)."""
    rest, offset = b"", 0
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            data = rest + block
            cut = data.rfind(b"\n") + 1 or data.rfind(b" ")
            if cut <= 0:
                cut = len(data)
                while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
                    cut -= 1  # stay before the character that the block may have cut
                cut -= data[cut - 1] >= 0xC0
            yield normalise(data[:cut], options, path, offset)
            rest, offset = data[cut:], offset + cut
    if rest:
        yield normalise(rest, options, path, offset)


def normalise(data: bytes, options: DataOptions, path: Path, offset: int) -> bytes:
    if options.tokenizer == "bytes":
        return data.lower() if options.lowercase else data
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise InputError(
            f"data.source={options.source} is not UTF-8 text (byte {at} of {path.name}); "
            "data.tokenizer=bytes reads any file"
        ) from None
    return text.lower().encode("utf-8") if options.lowercase else data


def make_tokenizer(train: Path, options: DataOptions):
    keep = options.newline == "keep"
    if options.tokenizer == "bytes":
        return ByteTokenizer(keep)
    if options.tokenizer not in ("sentencepiece", "words"):
        path = Path(options.tokenizer).expanduser()
        if not path.is_file():
            raise InputError(
                f"data.tokenizer={options.tokenizer} must be sentencepiece, bytes, words or a .model file that exists"
            )
        return SentencePieceTokenizer.read(path, keep)
    chunks = read_chunks(train, options)
    if options.tokenizer == "words":
        return WordTokenizer.train((chunk.decode("utf-8") for chunk in chunks), options.vocab_size, keep)
    lines = training_lines(chunks, train.stat().st_size)
    return SentencePieceTokenizer.train(lines, options.vocab_size, keep)


def words_of(text: bytes) -> list[str]:
    """Split at white space, Unicode's included, whatever the tokenizer."""
    return text.decode("utf-8", errors="replace").split()


def describe_split(path: Path, options: DataOptions) -> dict:
    """Size of the original text: bytes, and words as WikiText counts them, with one end-of-line per line."""
    words = lines = 0
    last = b"\n"
    for chunk in read_chunks(path, options):
        words += len(words_of(chunk))
        lines += chunk.count(b"\n")
        last = chunk[-1:]
    return {"bytes": path.stat().st_size, "words": words + lines + (last != b"\n"), "sha256": sha256_of(path)}


def encode_split(path: Path, target: Path, tokenizer, options: DataOptions) -> dict:
    """Write the tokenizer's own ids as uint32; returns counts [size] and how much of the text they keep."""
    counts = np.zeros(tokenizer.size, dtype=np.int64)
    exact = words_exact = options.newline == "keep" and not options.lowercase
    with open(target, "wb") as file:
        for chunk in read_chunks(path, options):
            ids = tokenizer.encode(chunk)
            counts += np.bincount(ids, minlength=tokenizer.size)
            ids.tofile(file)
            if words_exact:
                restored = tokenizer.decode(ids)
                exact = exact and restored == chunk
                words_exact = exact or (words_exact and words_of(restored) == words_of(chunk))
    return {"counts": counts, "lossless": exact, "words_kept": words_exact and is_text(path)}


def rank_split(source: Path, target: Path, rank_of: np.ndarray, dtype: np.dtype) -> None:
    """Rewrite own ids as ranks, in chunks."""
    with open(source, "rb") as read, open(target, "wb") as write:
        while (ids := np.fromfile(read, dtype=np.uint32, count=CHUNK)).size:
            rank_of[ids].astype(dtype).tofile(write)
    source.unlink()


def prepare(options: DataOptions) -> Path:
    """The folder of the prepared corpus, made where the cache does not hold it yet.

    It holds train.bin, valid.bin, test.bin (ranked ids), ids.npy (rank -> the tokenizer's id), counts.npy (train
    frequency by rank), meta.yaml and the tokenizer. Raises InputError where the text or the options cannot work.
    """
    cache = Path(options.cache).expanduser()
    texts = find_text(options.source, cache)
    for split, path in texts.items():
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty: the {split} split needs text")
    digests = {split: sha256_of(path) for split, path in texts.items()}
    tokenizer_path = Path(options.tokenizer).expanduser()
    key = {
        "format": FORMAT,
        "text": digests,
        "tokenizer": sha256_of(tokenizer_path) if tokenizer_path.is_file() else options.tokenizer,
        "vocab_size": options.vocab_size if options.tokenizer in ("sentencepiece", "words") else None,
        "lowercase": options.lowercase,
        "newline": options.newline,
    }
    folder = cache / "tokens" / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    if not (folder / "meta.yaml").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            write_corpus(texts, work, options)
            try:
                work.rename(folder)
            except OSError:
                if not (folder / "meta.yaml").exists():  # else another process was quicker, with the same result
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def write_corpus(texts: dict[str, Path], work: Path, options: DataOptions) -> None:
    sizes = {split: describe_split(path, options) for split, path in texts.items()}
    tokenizer = make_tokenizer(texts["train"], options)
    encoded = {split: encode_split(texts[split], work / f"{split}.own", tokenizer, options) for split in SPLITS}
    counts = encoded["train"]["counts"]
    ids = np.argsort(-counts, kind="stable")
    rank_of = np.empty(tokenizer.size, dtype=np.uint32)
    rank_of[ids] = np.arange(tokenizer.size, dtype=np.uint32)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    splits = {}
    for split in SPLITS:
        rank_split(work / f"{split}.own", work / f"{split}.bin", rank_of, dtype)
        tokens = int(encoded[split]["counts"].sum())
        kept = {name: bool(encoded[split][name]) for name in ("lossless", "words_kept")}
        splits[split] = {"tokens": tokens, **sizes[split], **kept}
    np.save(work / "ids.npy", ids.astype(np.uint32))
    np.save(work / "counts.npy", counts[ids])
    tokenizer.save(work)
    saved = sorted(work.glob("tokenizer.model")) + sorted(work.glob("words.txt"))
    meta = {
        "format": FORMAT,
        "vocab_size": tokenizer.size,
        "dtype": dtype.name,
        "tokenizer": tokenizer.kind,
        "tokenizer_sha256": sha256_of(saved[0]) if saved else None,
        "newline": options.newline,
        "splits": splits,
    }
    (work / "meta.yaml").write_text(yaml.safe_dump(meta, sort_keys=False))
