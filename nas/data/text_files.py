"""Text files: find the three splits in a folder, compute digests, and split one file."""

import codecs
import hashlib
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import atomic_write

SPLITS = ("train", "valid", "test")
BLOCK = 1 << 20  # bytes read at once


def find_splits(folder: Path) -> dict[str, Path]:
    """{split: file} of a folder. Raises InputError that names the first split without a file."""
    files = {}
    for split in SPLITS:
        candidates = (folder / name for name in (f"{split}.txt", f"wiki.{split}.tokens", f"{split}.bin"))
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            raise InputError(
                f"data.source={folder} lacks {split}.txt; it must hold train.txt, valid.txt and test.txt "
                "(or .bin for data.tokenizer=bytes)"
            )
        files[split] = path
    return files


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def is_text_file(path: Path) -> bool:
    """is_text() of a file."""
    with open(path, "rb") as file:
        return is_text(file.read(BLOCK))


def is_text(data: bytes) -> bool:
    """Whether the first block is UTF-8 without zero bytes."""
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(data[:BLOCK])
    except UnicodeDecodeError:
        return False


def next_line_start(path: Path, offset: int) -> int:
    """Offset of the next line after `offset`, or of the next character if no line ends within a block."""
    with open(path, "rb") as file:
        file.seek(offset)
        block = file.read(BLOCK)
    newline = block.find(b"\n")
    if newline >= 0:
        return offset + newline + 1
    return offset + next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)


def write_splits(whole: Path, folder: Path, valid: int, test: int) -> dict[str, Path]:
    """Copy the bytes of a file into train, valid (from byte `valid`) and test (from byte `test`), unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {split: folder / f"{split}.txt" for split in SPLITS}
    for part, start, end in zip(parts.values(), (0, valid, test), (valid, test, whole.stat().st_size), strict=True):
        if part.exists():
            continue
        with open(whole, "rb") as source, atomic_write(part) as target:
            source.seek(start)
            while start < end and (block := source.read(min(BLOCK, end - start))):
                target.write(block)
                start += len(block)
    return parts
