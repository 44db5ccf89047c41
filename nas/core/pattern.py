"""Layer patterns: short forms, and the pattern file. nas/core/blocks.py tells how a block is written."""

from pathlib import Path

from nas.core.blocks import UNIT, parse_block, spell_block, unit_of
from nas.core.errors import InputError, nearest
from nas.core.files import read_user_yaml
from nas.core.run_folder import PATTERN, PI

FORMAT = "par-pattern/2"
# The shape in a pattern file, and the options that it replaces
SHAPE_OPTIONS = {"vocab_size": "data.vocab_size", "d_model": "model.d_model", "heads": "model.heads"}
# Keys of a pattern file; derive.py writes all of them.
KEYS = {"format", *SHAPE_OPTIONS, "blocks", "sizes", "confidence", "flops_per_token", "flops_ratio_to_interleaved"}
KEYS |= {"latency", "model", "data", "derived_from"}


def interleaved(blocks: int) -> list[str]:
    """The pattern of a Transformer: attention and dense in turn."""
    return [("attention", "dense")[index % 2] for index in range(blocks)]


def abbreviate(blocks: list[str]) -> str:
    """The short form of a pattern: `adad`, or with spaces between the blocks if one has sizes, `a d8x c d`."""
    units = [unit_of(block) for block in blocks]
    return ("" if all(len(unit) == 1 for unit in units) else " ").join(units)


def expand(short: str) -> list[str]:
    """The inverse of abbreviate(). Spaces do not matter. Raises InputError if the form is not one of a pattern."""
    units = [unit[0] for unit in UNIT.finditer(short)]
    if not units or "".join(units) != "".join(short.split()):
        raise InputError(f"{short!r} is no pattern; give units such as `a d8x c d`, one for each block")
    return [spell_block(*parse_block(unit)) for unit in units]


def file_name(blocks: list[str]) -> str:
    """The short form without spaces."""
    return abbreviate(blocks).replace(" ", "")


def abbreviate_network(blocks: list[str]) -> str:
    """The short form without identity blocks. Patterns with equal short forms are the same network."""
    return abbreviate([name for name in blocks if name != "identity"]) or "nothing"


def read_pattern(path: str | Path) -> dict:
    """Read and check a pattern file. In the returned mapping, `blocks` is a list of blocks in their usual spelling.

    Raises InputError that names the file and the mistake.
    """
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
    if not isinstance(blocks, list) or not blocks:
        raise InputError(f"{path}: `{key}` must be a list of at least one block, such as [attention, dense 8x]")
    return [spell_block(*parse_block(entry, f"{path}: block {index}: ")) for index, entry in enumerate(blocks, start=1)]
