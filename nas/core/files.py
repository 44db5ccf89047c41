"""Atomic writing of files, and readers of YAML and JSON lines."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from nas.core.errors import InputError

# What was expected where a parser of YAML reports a problem, by a part of its message. {opened}: a line.
EXPECTED = {
    "mapping values": "expected one `key: value` in a line, and a `:` after a section; texts with `: ` need quotes",
    "escape sequence": "in double quotes \\ begins a code; use single quotes",
    "',' or": "the bracket of line {opened} must be closed before",
    "node content": "a value or a closing bracket is missing",
    "end of stream": "the quote or bracket of line {opened} must be closed",
    **dict.fromkeys(("block end", "expected key"), "lines of one section must begin in the same column"),
    "indicator": "a list and keys cannot be in one section",
    "duplicate key": "a key may occur only once in a section",
    "cannot start any token": "put this value in quotes",
    "alias": "put a value that begins with * in quotes",
    "alphabetic or numeric": "put a value that begins with * or & in quotes",
}
END = b"\n..."  # of a YAML document; it shows that a copy has not been cut short


class Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a section. YAML would take the last.

    Numbers are decimal: to YAML, 010 is eight and 1:30 is ninety.
    """

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key, _ in node.value:
            if str(key.value) in keys:
                raise yaml.constructor.ConstructorError(problem="duplicate key", problem_mark=key.start_mark)
            keys.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_number(self, node):
        for base in (10, 0):  # 0: that of its prefix, such as 0x
            with suppress(ValueError):
                return int(node.value, base)
        return node.value if ":" in node.value else self.construct_yaml_float(node)

    numbers = dict.fromkeys((f"tag:yaml.org,2002:{kind}" for kind in ("int", "float")), construct_number)
    yaml_constructors = yaml.SafeLoader.yaml_constructors | numbers


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` when the block ends. A kill or a power cut leaves the old file whole."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name
    finally:
        os.close(folder)


def read_input(name: str | Path) -> bytes:
    """The content of a file that the user names; - is the standard input. Raises InputError if it cannot be read."""
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None


def user_path(name: str) -> Path:
    """A path that the user gives, which may begin with ~. Raises InputError if the account has no home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise InputError(f"{name}: this account has no home folder; give a path without ~, as data.cache=DIR") from None


def reason_of(error: OSError, path: Path) -> str:
    """Why a folder cannot be made. What the system says of a link that leads nowhere is the opposite of the truth."""
    broken = next((one for one in (path, *path.parents) if one.is_symlink() and not one.exists()), None)
    return f"{broken} is a link to {broken.readlink()}, which does not exist" if broken else str(error.strerror)


def check_parent(out: Path) -> None:
    """Raises InputError if the folder of an output file does not exist."""
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8. The bytes of a name that is not UTF-8 are escaped."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").encode("utf-8"))


def write_yaml(path: Path, content: dict) -> None:
    """Write YAML with the keys in their order, short lists on one line, and END."""
    form = {"sort_keys": False, "default_flow_style": None, "width": 120, "allow_unicode": True, "explicit_end": True}
    write_text(path, yaml.safe_dump(content, **form))


def read_yaml(path: Path) -> dict:
    """Read a mapping that a command wrote. Raises InputError if the file is missing, cut short, or holds no mapping."""
    if path.suffix == ".yaml" and path.is_file() and not path.read_bytes().rstrip().endswith(END):
        advice = "remove it, and repeat the command that wrote it"
        raise InputError(f"{path} is cut short: its last line must be `...`; {advice}")
    content = read_user_yaml(path, "the file")
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged: it must hold a mapping")
    return content


def read_user_yaml(path: Path, what: str) -> Any:
    """Read YAML that a user may have written; `what` names the kind of file. Raises InputError with the place."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise InputError(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = f"byte {error.start}"
        raise InputError(f"{path} is not UTF-8 ({place}); convert it, as with iconv -f ENCODING -t UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:
        problem = yaml_mistake(error, path.read_text(errors="replace"))
        raise InputError(f"{path} is not YAML: {problem}") from None


def yaml_mistake(error: Exception, text: str) -> str:
    """Where a parser of YAML found a problem in a text, and what it expected there."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if not mark or not problem:
        return " ".join(str(error).split())
    line = next(iter(text.splitlines()[mark.line :]), "")
    if "\t" in line[: mark.column + 1]:
        expected = "indent with spaces, not with a tab"
    else:
        expected = next((advice for part, advice in EXPECTED.items() if part in problem), problem)
    place = f"line {mark.line + 1}, {line.strip()!r}: " if line.strip() else "the last line: "
    return place * ("\n" in text) + expected.format(opened=(error.context_mark or mark).line + 1)


def read_jsonl(path: Path) -> list[dict]:
    """JSON lines, [] without a file, without a last line that a kill cut short. Raises InputError if one is damaged."""
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number < len(texts):
                raise InputError(f"{path} is damaged: line {number} is not JSON") from None
    return lines


def write_jsonl(path: Path, lines: list[dict]) -> None:
    write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
