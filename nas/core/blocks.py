"""How blocks are written. The operations and their sizes stand in models/operations/registry.py.

A block is an operation with sizes: `attention`, `dense 8x`, `window 32 heads=2`; in YAML also `{dense: {d_ffn: 8x}}`.
Its short form is one unit: `a`, `d8x`, `w32h2`. Sizes that are not given have defaults.
"""

import re
from contextlib import suppress
from functools import lru_cache

from models.operations.registry import OPERATIONS, Kind, Shape
from nas.core.errors import InputError, nearest

NAMES = {kind.letter: name for name, kind in OPERATIONS.items()}
LETTERS = "".join({size.letter for kind in OPERATIONS.values() for size in kind.sizes.values()})
UNIT = re.compile(rf"([{''.join(NAMES)}])([\d.]+x?)?((?:[{LETTERS}]\d+)*)")  # of a short form
NUMBER, MULTIPLE = re.compile(r"[1-9]\d*"), re.compile(r"\d+(\.\d+)?x")


def parse_block(entry, where: str = "") -> tuple[str, dict[str, str]]:
    """The operation of a block, and its given sizes as text.

    entry: a name with or without sizes, a mapping of a name to its sizes, or a unit of a short form.

    Raises InputError, which begins with `where`, if it is none of them.
    """
    if isinstance(entry, dict) and len(entry) == 1:
        ((name, sizes),) = entry.items()
        pairs = list(sizes.items()) if isinstance(sizes, dict) else [("", sizes)]
    elif not isinstance(entry, str):
        raise InputError(
            f"{where}{entry} is no block; a block is one operation, as `dense 8x` or `{{dense: {{d_ffn: 8x}}}}`"
        )
    else:
        name, *words = expand_unit(entry).split() or [""]
        pairs = [word.split("=", 1) if "=" in word else ("", word) for word in words]
    if name not in OPERATIONS:
        raise InputError(
            f"{where}{name!r} is no operation; known operations are {', '.join(OPERATIONS)}; the nearest is "
            f"{nearest(name, OPERATIONS)}"
        )
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
        if not NUMBER.fullmatch(value) and not (sizes[key].multiple and MULTIPLE.fullmatch(value)):
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
    """The operation of a block and all its sizes.

    Raises InputError, which begins with `where`, if a size does not fit.
    """
    name, given = parse_block(block, where)
    sizes = {}
    for key, size in OPERATIONS[name].sizes.items():
        value = number(given.get(key, size.default(shape, sizes)), shape)
        if value < 1 or not size.fits(value, shape, sizes):
            rule = size.rule.format(**shape._asdict() | sizes) if value else "must be at least 1"
            raise InputError(f"{where}{block}: {key}={value} {rule}")
        sizes[key] = value
    return name, sizes


def describe_sizes(block: str, shape: Shape) -> str:
    """All sizes of a block, such as `window=32 heads=2 key_heads=2`."""
    return " ".join(f"{key}={value}" for key, value in resolve_block(block, shape)[1].items())


def number(value: int | str, shape: Shape) -> int:
    """A size: a multiple of d_model such as 4x, or a number."""
    return round(float(value[:-1]) * shape.d_model) if str(value).endswith("x") else int(value)


def simplify_block(entry, shape: Shape, where: str = "") -> str:
    """The usual spelling of a block without sizes that are the defaults.

    Raises InputError as parse_block() and resolve_block().
    """
    name, given = parse_block(entry, where)
    _, sizes = resolve_block(spell_block(name, given), shape, where)
    for key in list(given)[::-1]:  # the last first, because the default of a size may depend on those before it
        others = {other: value for other, value in given.items() if other != key}
        with suppress(InputError):  # the others may not fit the default
            given = others if resolve_block(spell_block(name, others), shape)[1] == sizes else given
    return spell_block(name, given)
