"""Downloads of known corpora, which can be resumed, are checked by SHA-256, and become train, valid and test."""

import shutil
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from nas.core.errors import InputError, RunError
from nas.core.files import atomic_write
from nas.data.text_files import BLOCK, SPLITS, find_splits, sha256_of, write_splits


@dataclass(frozen=True)
class Archive:
    """A zip file to download."""

    urls: tuple[str, ...]  # tried in order
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


def fetch_archive(name: str, archive: Archive, cache: Path) -> dict[str, Path]:
    """{split: file} in cache/sources/name. Downloads and unpacks the archive if a file is missing."""
    folder = cache / "sources" / name
    try:
        return find_splits(folder)
    except InputError:
        package = cache / "downloads" / f"{name}.zip"
        if not package.exists() or sha256_of(package) != archive.sha256:
            download_any(archive.urls, package, archive.sha256, name)
        unpack(package, archive, folder)
    return find_splits(folder)


def unpack(package: Path, archive: Archive, folder: Path) -> None:
    """Write train.txt, valid.txt and test.txt into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{split}.txt" for split in SPLITS] if archive.split_bytes is None else ["whole"]
    with zipfile.ZipFile(package) as content:
        for name, member in zip(names, archive.members, strict=True):
            with content.open(member) as source, atomic_write(folder / name) as target:
                shutil.copyfileobj(source, target, BLOCK)
    if archive.split_bytes:
        write_splits(folder / "whole", folder, *archive.split_bytes)
        (folder / "whole").unlink()


def download_any(urls: tuple[str, ...], target: Path, sha256: str, name: str) -> None:
    """Try each address in order. Raises RunError with the reason for each address if all fail."""
    reasons = []
    for url in urls:
        try:
            return download(url, target, sha256)
        except (OSError, RunError) as error:
            reasons.append(f"{url}: {getattr(error, 'reason', None) or error}")
    raise RunError(
        f"could not download {name} ({'; '.join(reasons)}); "
        "give data.source=FOLDER with train.txt, valid.txt and test.txt instead"
    )


def download(url: str, target: Path, sha256: str, attempts: int = 5, timeout: float = 30) -> None:
    """Download to target.part, resuming after a broken transfer; check the SHA-256; rename.

    Raises RunError if the digest is wrong, and deletes the file; RunError if the transfer still breaks off after all
    attempts, and the next call resumes it; HTTPError at once.
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
                raise RunError(f"the transfer broke off after {have} bytes ({error}); run again to resume it") from None
    actual = sha256_of(part)
    if actual != sha256:
        part.unlink()
        raise RunError(f"wrong content: SHA-256 {actual}, expected {sha256}; the file was deleted")
    part.replace(target)


def transfer(url: str, part: Path, timeout: float) -> None:
    """Append the missing bytes of the file at url to `part`. Raises OSError if the transfer ends early."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # range not satisfiable: all bytes have arrived
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
