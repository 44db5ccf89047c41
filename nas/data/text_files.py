"""TODO nas.data.text_files."""

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import write_atomically

SPLITS = ("train", "valid", "test")


BLOCK = 1 << 20


def find_in_folder(folder: Path) -> dict[str, Path]:
    found = {}
    for split in SPLITS:
        candidates = [folder / f"{split}.txt", folder / f"wiki.{split}.tokens", folder / f"{split}.bin"]
        found[split] = next((path for path in candidates if path.is_file()), None)
        if found[split] is None:
            raise InputError(
                f"data.source={folder} lacks {split}.txt; it must hold train.txt, valid.txt and test.txt "
                "(or .bin, for data.tokenizer=bytes)"
            )
    return found


def byte_range(path: Path, start: int, end: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (block := file.read(min(BLOCK, end - start))):
            start += len(block)
            yield block


def cut_near(path: Path, offset: int) -> int:
    """The first line end at or after offset, plus one; where a line is too long for that, the next character."""
    with open(path, "rb") as file:
        file.seek(offset)
        block = file.read(BLOCK)
    newline = block.find(b"\n")
    if newline >= 0:
        return offset + newline + 1
    return offset + next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)


def is_text(path: Path) -> bool:
    """Whether a file's first block is UTF-8 without zeros."""
    with open(path, "rb") as file:
        block = file.read(BLOCK)
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(block)
    except UnicodeDecodeError:
        return False


def write_parts(whole: Path, folder: Path, valid: int, test: int) -> dict[str, Path]:
    """Copy a file's bytes into train, valid (from byte `valid`) and test (from byte `test`), where not there yet."""
    parts = {split: folder / f"{split}.txt" for split in SPLITS}
    ranges = [(0, valid), (valid, test), (test, whole.stat().st_size)]
    for part, (start, end) in zip(parts.values(), ranges, strict=True):
        if not part.exists():
            write_atomically(part, byte_range(whole, start, end))
    return parts


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
