"""The registry of operations: all that must be known about them without torch, so that --help is quick.

A line of OPERATIONS registers an operation. CONTRIBUTING.md tells how to add one.
"""

import math
from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple


class IncompleteOperation(ValueError):
    """The class of an operation lacks a piece. The message says which."""


class Shape(NamedTuple):
    """What sizes depend on: options of the model, and numbers of positions. keys: segment and memory together."""

    d_model: int
    heads: int
    d_ffn: int | str
    segment: int
    keys: int


class Size(NamedTuple):
    """A size of an operation, which is an argument of its constructor.

    letter: stands before the value in a short form. The main size has none, and its value may stand without its name.
    default: of a shape and the sizes before this one. bound: the entry of the shape, or the size before this one, that
    the value must not exceed or, with `divides`, must divide; `rule` says so. multiple: whether a value may be a
    multiple of d_model, such as 4x.
    """

    letter: str
    help: str
    default: Callable[[Shape, dict[str, int]], int | str]
    bound: str = ""
    rule: str = ""
    divides: bool = False
    multiple: bool = False

    def fits(self, value: int, shape: Shape, sizes: dict[str, int]) -> bool:
        """Whether a value fits the shape and the sizes before it."""
        bound = (shape._asdict() | sizes).get(self.bound, value)
        return bound % value == 0 if self.divides else value <= bound


class Kind(NamedTuple):
    """An operation.

    letter: in short forms. colour: in figures. place: FILE:CLASS in models/operations/. reaches_far: whether it may
    read more than the last few positions. carries_state: as in Operation; such an operation cannot read images, because
    its state would go on from one image to the next.
    """

    letter: str
    colour: str
    place: str
    help: str
    sizes: dict[str, Size] = MappingProxyType({})
    reaches_far: bool = False
    carries_state: bool = False


def default_stride(keys: int) -> int:
    """The power of two nearest to sqrt(keys)."""
    root = math.sqrt(keys)
    lower = 2 ** math.floor(math.log2(root))
    return lower if root - lower <= 2 * lower - root else 2 * lower


# fmt: off
SIZES = {
    "stride": Size("", "positions of a row (2^k nearest sqrt(segment + memory))", lambda s, _: default_stride(s.keys)),
    "window": Size(
        "", "earlier positions seen (a quarter of segment + memory)", lambda s, _: max(1, s.keys // 4),
        "keys", "must be at most train.segment + train.memory, which is {keys}"),
    "kernel": Size(
        "", "positions seen, with the current one (4)", lambda *_: 4,
        "segment", "must be at most train.segment={segment}"),
    "d_ffn": Size("", "inner width (model.d_ffn)", lambda s, _: s.d_ffn, multiple=True),
    "summary": Size(
        "m", "last columns of all rows that are seen (4)", lambda _, sizes: min(4, sizes["stride"]),
        "stride", "must be at most stride={stride}"),
    "heads": Size("h", "heads (model.heads)", lambda s, _: s.heads, "d_model", "must divide d_model={d_model}", True),
    "key_heads": Size(
        "k", "heads of keys and values (heads)", lambda _, sizes: sizes["heads"],
        "heads", "must divide heads={heads}", True),
    "chunk": Size("n", "positions computed at once, which changes the speed only (64)", lambda *_: 64),
}


def sizes(names: str) -> dict[str, Size]:
    return {name: SIZES[name] for name in names.split()}


OPERATIONS = {
    "attention": Kind(
        "a", "#c8553d", "attention:Attention", "attention to all positions", sizes("heads key_heads"), True),
    "sparse_strided": Kind(
        "s", "#e09f3e", "sparse:SparseStrided", "attention to a window and a strided column",
        sizes("stride heads key_heads"), True),
    "sparse_fixed": Kind(
        "f", "#7b6d8d", "sparse:SparseFixed", "attention to a row and summaries",
        sizes("stride summary heads key_heads"), True),
    "window": Kind(
        "w", "#2a9d8f", "sparse:Window", "attention to a sliding window", sizes("window heads key_heads"), True),
    "linear": Kind(
        "l", "#8ab17d", "delta_net:GatedDeltaNet", "linear attention (gated delta rule)",
        sizes("heads chunk"), True, True),
    "conv": Kind("c", "#d4a5a5", "convolution:ShortConvolution", "gated short convolution", sizes("kernel")),
    "dense": Kind("d", "#2f6690", "dense:Dense", "feed-forward network", sizes("d_ffn")),
    "identity": Kind("i", "#b9bfc7", "dense:Identity", "nothing"),
}
# fmt: on


def build_operation(name: str, config, **sizes: int):
    """The module of an operation. config: a BlockConfig. Raises IncompleteOperation if its class lacks a piece."""
    kind = OPERATIONS[name]
    file, _, class_name = kind.place.partition(":")
    operation = getattr(import_module(f"models.operations.{file}"), class_name)(config, **sizes)
    if missing := operation.missing_piece():
        raise IncompleteOperation(f"the operation {name} of models/operations/{file}.py {missing}")
    if operation.carries_state != kind.carries_state:
        needed = f"carries_state={operation.carries_state}"
        raise IncompleteOperation(f"the operation {name} needs {needed} in its registry line")
    return operation
