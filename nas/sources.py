"""Where text comes from: a name, a folder or a file becomes three files, train, valid and test. Imports no torch."""

import codecs
import contextlib
import fcntl
import hashlib
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nas.errors import InputError, RunError

SPLITS = ("train", "valid", "test")
BLOCK = 1 << 20
WHOLE_BYTES = 100_000_000  # of enwik8 and of text8
SPLIT_SHARES = (0.90, 0.95)  # of a single file: where valid and test begin


@dataclass(frozen=True)
class Archive:
    """A zip to download: where from (tried in turn), its SHA-256, its members, and how one member is split."""

    urls: tuple[str, ...]
    sha256: str
    members: tuple[str, ...]  # train, valid, test; or the one file that is split
    split_bytes: tuple[int, int] | None = None  # where valid and test begin in a single member


def wikitext(name: str, sha256: str) -> Archive:
    hosts = ("https://s3.amazonaws.com/research.metamind.io/wikitext", "https://wikitext.smerity.com")
    members = tuple(f"{name}/wiki.{split}.tokens" for split in SPLITS)
    return Archive(tuple(f"{host}/{name}-v1.zip" for host in hosts), sha256, members)


def mahoney(name: str, sha256: str) -> Archive:
    urls = (f"https://mattmahoney.net/dc/{name}.zip", f"https://data.deepai.org/{name}.zip")
    return Archive(urls, sha256, (name,), (90_000_000, 95_000_000))  # of WHOLE_BYTES


ARCHIVES = {
    "wikitext-2": wikitext("wikitext-2", "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    "wikitext-103": wikitext("wikitext-103", "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "enwik8": mahoney("enwik8", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
    "text8": mahoney("text8", "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
}
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


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


# --- the embedded corpus


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


# --- one file


def write_atomically(path: Path, blocks) -> None:
    """Write bytes to a temporary file beside `path`, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        for block in blocks:
            file.write(block)
    part.replace(path)


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


def write_parts(whole: Path, folder: Path, valid: int, test: int) -> dict[str, Path]:
    """Copy a file's bytes into train, valid (from byte `valid`) and test (from byte `test`), where not there yet."""
    parts = {split: folder / f"{split}.txt" for split in SPLITS}
    ranges = [(0, valid), (valid, test), (test, whole.stat().st_size)]
    for part, (start, end) in zip(parts.values(), ranges, strict=True):
        if not part.exists():
            write_atomically(part, byte_range(whole, start, end))
    return parts


# --- downloads


def fetch_archive(name: str, archive: Archive, cache: Path) -> dict[str, Path]:
    """Download once, check, unpack into cache/sources/name; files that a user put there are taken as they are."""
    folder = cache / "sources" / name
    try:
        return find_in_folder(folder)
    except InputError:
        package = cache / "downloads" / f"{name}.zip"
        if not package.exists() or sha256_of(package) != archive.sha256:
            download_any(archive.urls, package, archive.sha256, name)
        unpack(package, archive, folder)
    return find_in_folder(folder)


def unpack(package: Path, archive: Archive, folder: Path) -> None:
    with zipfile.ZipFile(package) as content:
        if archive.split_bytes is None:
            for split, member in zip(SPLITS, archive.members, strict=True):
                with content.open(member) as stream:
                    write_atomically(folder / f"{split}.txt", iter(lambda s=stream: s.read(BLOCK), b""))
            return
        whole = folder / "whole"
        with content.open(archive.members[0]) as stream:
            write_atomically(whole, iter(lambda: stream.read(BLOCK), b""))
    write_parts(whole, folder, *archive.split_bytes)
    whole.unlink()


def download_any(urls: tuple[str, ...], target: Path, sha256: str, name: str) -> None:
    """Try each address in turn; raises RunError with every reason where none gives the right bytes."""
    reasons = []
    for url in urls:
        try:
            return download(url, target, sha256)
        except (OSError, RunError) as error:
            reasons.append(f"{url}: {getattr(error, 'reason', None) or error}")
    raise RunError(
        f"could not download {name} ({'; '.join(reasons)}); "
        "give data.source=FOLDER with its train.txt, valid.txt and test.txt instead"
    )


def download(url: str, target: Path, sha256: str, attempts: int = 5, timeout: float = 30) -> None:
    """Download to target.part, go on where a broken transfer stopped, check the SHA-256, rename.

    Raises RunError where the bytes are wrong (they are deleted) or the transfer keeps breaking off (what arrived is
    kept, and the next call goes on from there).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    for attempt in range(attempts):
        try:
            transfer(url, part, timeout)
            break
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            if attempt == attempts - 1:
                have = part.stat().st_size if part.exists() else 0
                raise RunError(
                    f"the transfer broke off after {have} bytes ({error}); run again to go on from there"
                ) from None
    found = sha256_of(part)
    if found != sha256:
        part.unlink()
        raise RunError(f"wrong content: SHA-256 {found}, expected {sha256}; nothing was kept")
    part.replace(target)


def transfer(url: str, part: Path, timeout: float) -> None:
    """Append to `part` what is missing of the file at url; raises OSError where it ends early."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # nothing is missing: all of it had arrived
            return
        raise
    with response:
        resumed = response.status == 206
        expected = response.headers.get("Content-Length")
        with open(part, "ab" if resumed else "wb") as file:
            start = file.tell()
            shutil.copyfileobj(response, file, BLOCK)
            received = file.tell() - start
    if expected is not None and received < int(expected):
        raise OSError(f"{received} of {expected} bytes arrived")
