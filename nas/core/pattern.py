"""How blocks and layer patterns are written. The operations and their sizes stand in models/operations/registry.py.

A block is an operation with sizes: `attention`, `dense 8x`, `window 32 heads=2`; in YAML also `{dense: {d_ffn: 8x}}`.
Its short form is one unit: `a`, `d8x`, `w32h2`. Sizes that are not given have defaults.
"""

import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from models.operations.registry import OPERATIONS, Kind, Shape
from nas.core.config import MULTIPLE
from nas.core.errors import InputError, nearest
from nas.core.files import read_user_yaml
from nas.core.run_folder import PATTERN, PI

FORMAT = "par-pattern/2"
# The shape in a pattern file, and the options that it replaces
SHAPE_OPTIONS = {"vocab_size": "data.vocab_size", "d_model": "model.d_model", "heads": "model.heads"}
SHAPE_OPTIONS |= {"counts_bytes": "mixture.size"}
# Keys of a pattern file; derive.py writes all of them.
KEYS = {"format", *SHAPE_OPTIONS, "blocks", "sizes", "confidence", "flops_ratio_to_interleaved", "latency"}
KEYS |= {"model", "data", "derived_from"}


def interleaved(blocks: int) -> list[str]:
    """The pattern of a Transformer: attention and dense in turn."""
    return [("attention", "dense")[index % 2] for index in range(blocks)]


def abbreviate(blocks: list[str]) -> str:
    """The short form of a pattern: `adad`, with spaces between the blocks if one has sizes, `a d8x c d`, or `none`."""
    units = [unit_of(block) for block in blocks]
    return ("" if all(len(unit) == 1 for unit in units) else " ").join(units) or "none"


def expand(short: str) -> list[str]:
    """The inverse of abbreviate(). Spaces do not matter. Raises InputError if the form is not one of a pattern."""
    units = [unit[0] for unit in UNIT.finditer(short)]
    if not units or "".join(units) != "".join(short.split()):
        raise InputError(f"{short!r} is no pattern; give units such as `a d8x c d`, one for each block")
    return [spell_block(*parse_block(unit)) for unit in units]


def file_name(blocks: list[str]) -> str:
    return abbreviate(blocks).replace(" ", "")


def abbreviate_network(blocks: list[str]) -> str:
    """The short form without identity blocks. Patterns with equal short forms are the same network."""
    return abbreviate([name for name in blocks if name != "identity"])


def read_pattern(path: str | Path) -> dict:
    """A pattern file, with `blocks` in their usual spelling. Raises InputError that names the file and the mistake."""
    path = Path(path)
    if not path.exists() and (path.parent / PI).exists():
        raise InputError(f"{path} does not exist yet; derive the pattern first: python derive.py {path.parent}")
    needs = f"needs `format: {FORMAT}` and `blocks: [attention, dense 8x, ...]`"
    if path.is_dir():
        inner = path / PATTERN
        raise InputError(f"{path} is a folder: give {inner if inner.exists() else f'a pattern file, which {needs}'}")
    if not path.exists():
        raise InputError(f"cannot read the pattern file {path}: it does not exist; a pattern file {needs}")
    content = read_user_yaml(path, "the pattern file")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path} {needs}")
    for key in content.keys() - KEYS:
        raise InputError(f"{path}: unknown key {key!r}; the nearest is {nearest(str(key), KEYS)!r}")
    for key in SHAPE_OPTIONS.keys() & content.keys():
        if type(content[key]) is not int or content[key] < 1:
            raise InputError(f"{path}: {key}={content[key]} must be a whole number from 1")
    return content | {"blocks": read_blocks(content.get("blocks"), path, "blocks")}


def shape_of(values: dict) -> dict:
    """The shape that a pattern file records. values: {dotted key: value} of every option."""
    return {key: values[option] for key, option in SHAPE_OPTIONS.items() if values[option] is not None}


def shape_options(content: dict) -> list[str]:
    """The options section.key=value that a pattern file replaces in a configuration."""
    return [f"{option}={content[key]}" for key, option in SHAPE_OPTIONS.items() if key in content]


def read_blocks(blocks, path: Path, key: str = "pattern") -> list[str]:
    """The blocks in their usual spelling. Raises InputError that names the file, the key or the block."""
    if not isinstance(blocks, list):
        raise InputError(f"{path}: `{key}` must be a list of blocks, such as [attention, dense 8x]; []: no network")
    return [spell_block(*parse_block(entry, f"{path}: block {index}: ")) for index, entry in enumerate(blocks, start=1)]


NAMES = {kind.letter: name for name, kind in OPERATIONS.items()}
LETTERS = "".join({size.letter for kind in OPERATIONS.values() for size in kind.sizes.values()})
UNIT = re.compile(rf"([{''.join(NAMES)}])([\d.]+x?)?((?:[{LETTERS}]\d+)*)")  # of a short form


def parse_block(entry, where: str = "") -> tuple[str, dict[str, str]]:
    """The operation of a block, and its given sizes as text. Raises InputError, which begins with `where`.

    entry: a name with or without sizes, a mapping of a name to its sizes, or a unit of a short form.
    """
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, sizes),) = entry.items()
        pairs = list(sizes.items()) if isinstance(sizes, dict) else [("", sizes)]
    elif not isinstance(entry, str):
        allowed = "a block is one operation, as `dense 8x` or `{dense: {d_ffn: 8x}}`"
        raise InputError(f"{where}{entry} is no block; {allowed}")
    else:
        name, *words = expand_unit(entry).split() or [""]
        pairs = [word.split("=", 1) if "=" in word else ("", word) for word in words]
    if name not in OPERATIONS:
        known = f"known operations are {', '.join(OPERATIONS)}; the nearest is {nearest(name, OPERATIONS)}"
        raise InputError(f"{where}{name!r} is no operation; {known}")
    sizes = OPERATIONS[name].sizes
    main = [key for key, size in sizes.items() if not size.letter]
    pairs = [(main[0] if main and not key else key, value) for key, value in pairs]
    given = {key: str(value) for key, value in pairs if value is not None}
    if len(given) < len(pairs):
        raise InputError(f"{where}{entry} needs one value for each size, as in `dense 8x` or `window 32 heads=2`")
    for key, value in given.items():
        if key not in sizes:
            allowed = f"has {'=, '.join(sizes)}=" if sizes else "has no sizes"
            raise InputError(f"{where}{entry}: {key or value!r} is no size; {name} {allowed}")
        if not re.fullmatch(r"[1-9]\d*", value) and not (sizes[key].multiple and MULTIPLE.fullmatch(value)):
            multiple = ", or a multiple of d_model such as 4x" if sizes[key].multiple else ""
            raise InputError(f"{where}{entry}: {key}={value} must be a whole number from 1{multiple}")
    return name, {key: given[key] for key in sizes if key in given}


def expand_unit(text: str) -> str:
    """`window 32 heads=2` for the unit `w32h2`; any other text stays."""
    unit = UNIT.fullmatch(text)
    if not unit:
        return text
    letters = {size.letter: key for key, size in OPERATIONS[NAMES[unit[1]]].sizes.items()}
    named = [f"{letters.get(word[0], word[0])}={word[1:]}" for word in re.findall(r"[a-z]\d+", unit[3])]
    return " ".join([NAMES[unit[1]], unit[2] or "", *named])


def spell_block(name: str, given: dict[str, str]) -> str:
    """The usual spelling of a block, such as `window 32 heads=2`."""
    sizes = OPERATIONS[name].sizes
    return " ".join([name, *(f"{key}={value}" if sizes[key].letter else value for key, value in given.items())])


@lru_cache
def unit_of(block: str) -> str:
    """The short form of a block, such as `w32h2`."""
    name, given = parse_block(block)
    kind = OPERATIONS[name]
    return kind.letter + "".join(kind.sizes[key].letter + value for key, value in given.items())


def kind_of(block: str) -> Kind:
    return OPERATIONS[block.split()[0]]


def resolve_block(block: str, shape: Shape, where: str = "") -> tuple[str, dict[str, int]]:
    """The operation of a block and all its sizes. Raises InputError, beginning with `where`, if a size does not fit."""
    name, given = parse_block(block, where)
    sizes = {}
    for key, size in OPERATIONS[name].sizes.items():
        value = given.get(key, size.default(shape, sizes))
        value = round(float(value[:-1]) * shape.d_model) if str(value).endswith("x") else int(value)
        if value < 1 or not size.fits(value, shape, sizes):
            rule = size.rule.format(**shape._asdict() | sizes) if value else "must be at least 1"
            raise InputError(f"{where}{block}: {key}={value} {rule}")
        sizes[key] = value
    return name, sizes


def describe_sizes(block: str, shape: Shape) -> str:
    """All sizes of a block, such as `window=32 heads=2 key_heads=2`."""
    return " ".join(f"{key}={value}" for key, value in resolve_block(block, shape)[1].items())


def simplify_block(entry, shape: Shape, where: str = "") -> str:
    """The usual spelling of a block without sizes that are the defaults. Raises InputError as resolve_block()."""
    name, given = parse_block(entry, where)
    _, sizes = resolve_block(spell_block(name, given), shape, where)
    for key in list(given)[::-1]:  # the last first, because the default of a size may depend on those before it
        others = {other: value for other, value in given.items() if other != key}
        with suppress(InputError):  # the others may not fit the default
            given = others if resolve_block(spell_block(name, others), shape)[1] == sizes else given
    return spell_block(name, given)
