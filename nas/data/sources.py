"""nas.data.sources."""

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import write_atomically
from nas.data.downloads import ARCHIVES, fetch_archive
from nas.data.text_files import cut_near, find_in_folder, is_text, sha256_of, write_parts

WHOLE_BYTES = 100_000_000  # of enwik8 and of text8


SPLIT_SHARES = (0.90, 0.95)  # of a single file: where valid and test begin


NAMES = ("pydoc", *ARCHIVES)


def find_text(source: str, cache: Path) -> dict[str, Path]:
    """The files {split: path} of a source; those that have to be made are made in the cache, once.

    Raises InputError where the source is no name, folder or file, or a folder lacks a split.
    """
    with alone_in(cache):
        return locate(source, cache)


@contextlib.contextmanager
def alone_in(cache: Path) -> Iterator[None]:
    """One process at a time makes files in the cache; the others wait, and then find them."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def locate(source: str, cache: Path) -> dict[str, Path]:
    if source == "pydoc":
        return split_file(write_pydoc(cache), cache)
    if source in ARCHIVES:
        return fetch_archive(source, ARCHIVES[source], cache)
    path = Path(source).expanduser()
    if path.is_dir():
        return find_in_folder(path)
    if path.is_file():
        return split_file(path, cache)
    raise InputError(
        f"data.source={source}: no such file or folder, and no known name ({', '.join(NAMES)}); "
        "a folder must hold train.txt, valid.txt and test.txt, or .bin for data.tokenizer=bytes"
    )


def pydoc_text() -> str:
    """The English language reference that CPython carries (pydoc_data.topics), each paragraph once.

    Topics repeat each other's paragraphs; kept, they would put training text into the test split.
    """
    from pydoc_data.topics import topics

    seen, kept = set(), []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            content = " ".join(paragraph.split())
            if content and content not in seen:
                seen.add(content)
                kept.append(paragraph.strip("\n"))
    return "\n\n".join(kept) + "\n"


def write_pydoc(cache: Path) -> Path:
    data = pydoc_text().encode("utf-8")
    folder = cache / "sources" / f"pydoc-{hashlib.sha256(data).hexdigest()[:16]}"
    path = folder / "pydoc.txt"
    if not path.exists():
        write_atomically(path, [data])
    return path


def split_file(path: Path, cache: Path) -> dict[str, Path]:
    """Split a file in order, 90/5/5, text at line ends; the parts lie in the cache by content. A file that is an
    archive's whole content, by name and size, gets that one's standard split."""
    size = path.stat().st_size
    if size == 0:
        raise InputError(f"data.source={path} is empty")
    folder = cache / "sources" / f"split-{sha256_of(path)[:16]}"
    valid, test = (int(size * share) for share in SPLIT_SHARES)
    standard = ARCHIVES[path.name].split_bytes if path.name in ARCHIVES and size == WHOLE_BYTES else None
    if standard or not is_text(path):
        valid, test = standard or (valid, test)
        folder = folder.with_name(f"{folder.name}-exact")  # not at line ends
    else:
        valid, test = cut_near(path, valid), cut_near(path, test)
    if not 0 < valid < test < size:
        raise InputError(f"data.source={path} has {size} bytes: too short to split 90/5/5, text at line ends")
    return write_parts(path, folder, valid, test)
