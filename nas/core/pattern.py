"""Layer patterns: names of the operations, abbreviations, and the pattern file."""

from pathlib import Path

from nas.core.errors import InputError, nearest
from nas.core.files import read_user_yaml
from nas.core.metrics import PI

FORMAT = "par-pattern/1"

# The names of models.operations.OPERATIONS, which imports torch, and a letter for each.
LETTERS = {
    "attention": "a",
    "sparse_strided": "s",
    "sparse_fixed": "f",
    "window": "w",
    "linear": "l",
    "dense": "d",
    "identity": "i",
}
OPERATIONS = tuple(LETTERS)
SPARSE = ("sparse_strided", "sparse_fixed")
SAME_PARAMETERS = ("attention", *SPARSE, "window")  # their parameters have the same names and shapes
ATTENDING = (*SAME_PARAMETERS, "linear")
# Options of the model that only these operations use
OWN_OPTIONS = {"sparse_strided": ("stride",), "sparse_fixed": ("stride",), "window": ("window",)}


def interleaved(blocks: int) -> list[str]:
    """The pattern of a Transformer: attention and dense in turn."""
    return [("attention", "dense")[index % 2] for index in range(blocks)]


def abbreviate(blocks: list[str]) -> str:
    """One letter per block: a attention, s sparse_strided, f sparse_fixed, w window, l linear, d dense, i identity."""
    return "".join(LETTERS[name] for name in blocks)


def expand(letters: str) -> list[str]:
    """The inverse of abbreviate()."""
    names = {letter: name for name, letter in LETTERS.items()}
    return [names[letter] for letter in letters]


def network(blocks: list[str]) -> str:
    """The letters without identity blocks. Patterns with equal letters are the same network."""
    return abbreviate([name for name in blocks if name != "identity"]) or "nothing"


def read_pattern(path: str | Path) -> dict:
    """Read and check a pattern file. In the returned mapping, `blocks` is a list of known operations.

    Raises InputError that names the file and the mistake.
    """
    path = Path(path)
    if not path.exists() and (path.parent / PI).exists():
        raise InputError(f"{path} does not exist yet; derive the pattern first: python derive.py {path.parent}")
    content = read_user_yaml(path, "the pattern file")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(
            f"{path} is not a pattern file: it needs `format: {FORMAT}` and `blocks: [attention, dense, ...]`"
        )
    check_blocks(content.get("blocks"), path, "blocks")
    return content


def check_blocks(blocks, path: Path, key: str = "pattern") -> list[str]:
    """The blocks, if they are a list of known operations. Else raises InputError that names the file and the key."""
    known = ", ".join(OPERATIONS)
    if not isinstance(blocks, list) or not blocks:
        raise InputError(f"{path}: `{key}` must be a list of at least one operation of {known}")
    for index, name in enumerate(blocks, start=1):
        if name not in OPERATIONS:
            raise InputError(
                f"{path}: block {index} is {name!r}; known operations are {known}; the nearest is "
                f"{nearest(name, OPERATIONS)}"
            )
    return blocks
