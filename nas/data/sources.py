"""Sources of text: turn a name, a folder or a file into three files, train, valid and test."""

import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np

from nas.core.errors import InputError
from nas.core.files import write_text
from nas.data.downloads import ARCHIVES, fetch_archive
from nas.data.text_files import find_splits, is_text_file, next_line_start, sha256_of, write_splits

STANDARD_BYTES = 100_000_000  # size of enwik8 and of text8
SPLIT_SHARES = (0.90, 0.95)  # start of valid and of test in a single file
# CONTRIBUTING.md lists what else a new source needs.
NAMES = ("pydoc", "stdlib", *ARCHIVES)
NO_SOURCES = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}  # tests and data
TABLES = "_sysconfigdata*", "entities.py", "stringprep.py", "_casefix.py", "_compat_pickle.py"  # mostly literals
HELD_OUT = {0: "valid", 10: "test"}  # source files, by their index modulo 20


def find_text(source: str, cache: Path) -> dict[str, Path]:
    """{split: file} of a source. The cache keeps downloads and the parts of split files.

    Raises InputError if the source is not a known name, folder or file, or if a folder lacks a split.
    """
    if source == "pydoc":
        return split_file(write_pydoc(cache), cache)
    if source == "stdlib":
        return find_splits(write_stdlib(cache))
    if source in ARCHIVES:
        return fetch_archive(source, ARCHIVES[source], cache)
    path = Path(source).expanduser()
    if path.is_dir():
        return find_splits(path)
    if path.is_file():
        return split_file(path, cache)
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise InputError(
        f"data.source={source}: no such file or folder{where}, and no known name ({', '.join(NAMES)}); "
        "a folder must hold train.txt, valid.txt and test.txt, or .bin for data.tokenizer=bytes"
    )


def write_pydoc(cache: Path) -> Path:
    """The English language reference in CPython (pydoc_data.topics), in a folder of the cache named by its digest.

    Topics share paragraphs. The file holds each one once, because otherwise training text would appear in the test
    split.
    """
    from pydoc_data.topics import topics

    paragraphs = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            content = " ".join(paragraph.split())
            if content:
                paragraphs.setdefault(content, paragraph.strip("\n"))
    text = "\n\n".join(paragraphs.values()) + "\n"
    path = cache / "sources" / f"pydoc-{hashlib.sha256(text.encode()).hexdigest()[:16]}" / "pydoc.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def write_stdlib(cache: Path) -> Path:
    """A folder of the cache with the source files of Python's standard library, without tests and tables.

    A table of a few thousand entities would be a sixth of the test text, and decide its loss. The order of the files is
    random, because a short training reads only the beginning. The text depends on Python's version and its modules.
    """
    library, files = Path(sysconfig.get_path("stdlib")), []
    for parent, inner, names in os.walk(library):  # does not enter site-packages, which may be large
        inner[:] = {*inner} - NO_SOURCES
        files += [Path(parent, name) for name in names if name.endswith(".py")]
    files = [file for file in sorted(files) if not any(map(file.match, TABLES))]
    names = hashlib.sha256("".join(f"{file.relative_to(library)}\n" for file in files).encode()).hexdigest()
    folder = cache / "sources" / f"stdlib-{platform.python_version()}-{names[:8]}"
    if (folder / "test.txt").exists():  # the last one
        return folder
    np.random.default_rng(1).shuffle(files)
    texts = {"train": [], "valid": [], "test": []}
    for index, file in enumerate(files):
        texts[HELD_OUT.get(index % 20, "train")].append(file.read_text("utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in texts.items():
        write_text(folder / f"{split}.txt", "".join(parts))
    return folder


def split_file(path: Path, cache: Path) -> dict[str, Path]:
    """Split a file in order, 90/5/5. The parts lie in the cache, in a folder named by the file's digest.

    Text is split at line ends, other files at bytes. Files with the name and the size of enwik8 or text8 get the
    standard split. Raises InputError if a part would be empty.
    """
    size = path.stat().st_size
    folder = cache / "sources" / f"split-{sha256_of(path)[:16]}"
    valid, test = (int(size * share) for share in SPLIT_SHARES)
    standard = ARCHIVES[path.name].split_bytes if path.name in ARCHIVES and size == STANDARD_BYTES else None
    if standard or not is_text_file(path):
        valid, test = standard or (valid, test)
        folder = folder.with_name(f"{folder.name}-exact")
    else:
        valid, test = next_line_start(path, valid), next_line_start(path, test)
    if not 0 < valid < test < size:
        raise InputError(f"data.source={path} has {size} bytes: too short to split 90/5/5 (text is split at line ends)")
    return write_splits(path, folder, valid, test)
