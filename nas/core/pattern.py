"""The pattern file: a fixed list of operations as YAML that a person can read, edit and share. Imports no torch."""

import difflib
from pathlib import Path

import yaml

from nas.core.errors import InputError
from nas.core.files import read_user_yaml

FORMAT = "par-pattern/1"


# The keys of models.operations.OPERATIONS, known here without torch, and the letter that stands for each.
LETTERS = {"attention": "a", "sparse_strided": "s", "sparse_fixed": "f", "dense": "d", "identity": "i"}


OPERATIONS = tuple(LETTERS)


SPARSE = ("sparse_strided", "sparse_fixed")


ATTENDING = ("attention", *SPARSE)


def interleaved(blocks: int) -> list[str]:
    """The usual Transformer: attention and dense in turn."""
    return [("attention", "dense")[index % 2] for index in range(blocks)]


def abbreviate(blocks: list[str]) -> str:
    """One letter per block: a attention, s sparse_strided, f sparse_fixed, d dense, i identity."""
    return "".join(LETTERS[name] for name in blocks)


def expand(letters: str) -> list[str]:
    """The pattern that abbreviate() made short."""
    names = {letter: name for name, letter in LETTERS.items()}
    return [names[letter] for letter in letters]


def network(blocks: list[str]) -> str:
    """What a pattern is when it is trained alone, abbreviated: identity blocks add nothing, wherever they stand."""
    return abbreviate([name for name in blocks if name != "identity"]) or "nothing"


def read_pattern(path: str | Path) -> dict:
    """Read and check a pattern file; returns its mapping, in which `blocks` is a list of known operations.

    Raises InputError that names the file and what is wrong in it.
    """
    path = Path(path)
    content = read_user_yaml(path, "the pattern file")
    if not isinstance(content, dict) or "format" not in content:
        raise InputError(
            f"{path} is no pattern file: it needs `format: {FORMAT}` and `blocks: [attention, dense, ...]`"
        )
    if content["format"] != FORMAT:
        raise InputError(f"{path} has format {content['format']!r}; this version reads {FORMAT!r}")
    blocks = content.get("blocks")
    if not isinstance(blocks, list) or not blocks:
        raise InputError(f"{path}: `blocks` must be a list of at least one operation of {', '.join(OPERATIONS)}")
    for index, name in enumerate(blocks, start=1):
        if name not in OPERATIONS:
            nearest = difflib.get_close_matches(str(name), OPERATIONS, n=1, cutoff=0)[0]
            known = ", ".join(OPERATIONS)
            raise InputError(
                f"{path}: block {index} is {name!r}; known operations are {known}; the nearest is {nearest}"
            )
    return content


def dump_pattern(content: dict) -> str:
    """YAML text with the keys in their order and short lists on one line."""
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
