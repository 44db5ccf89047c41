"""The registry of operations: all that must be known about them without torch, so that --help is quick.

A line of OPERATIONS registers an operation. CONTRIBUTING.md tells how to add one.
"""

import math
from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple


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
    default: of a shape and the sizes before this one. fits: whether a value fits the shape and the sizes before it; if
    not, `rule` tells what would. multiple: whether a value may be a multiple of d_model, such as 4x.
    """

    letter: str
    help: str
    default: Callable[[Shape, dict[str, int]], int | str]
    fits: Callable[[int, Shape, dict[str, int]], bool] = lambda value, shape, sizes: True
    rule: str = ""
    multiple: bool = False


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


HEADS = {
    "heads": Size(
        "h",
        "heads (model.heads)",
        lambda shape, _: shape.heads,
        lambda heads, shape, _: shape.d_model % heads == 0,
        "must divide d_model={d_model}",
    )
}
KEY_HEADS = {
    "key_heads": Size(
        "k",
        "heads of keys and values (heads)",
        lambda _, sizes: sizes["heads"],
        lambda key_heads, _, sizes: sizes["heads"] % key_heads == 0,
        "must divide heads={heads}",
    )
}
WINDOW = {
    "window": Size(
        "",
        "earlier positions seen (a quarter of segment + memory)",
        lambda shape, _: max(1, shape.keys // 4),
        lambda window, shape, _: window <= shape.keys,
        "must be at most train.segment + train.memory, which is {keys}",
    )
}
STRIDE = {
    "stride": Size("", "positions of a row (2^k nearest sqrt(segment + memory))", lambda s, _: default_stride(s.keys))
}
SUMMARY = {
    "summary": Size(
        "m",
        "last columns of all rows that are seen (4)",
        lambda _, sizes: min(4, sizes["stride"]),
        lambda summary, _, sizes: summary <= sizes["stride"],
        "must be at most stride={stride}",
    )
}
CHUNK = {"chunk": Size("n", "positions computed at once, which changes the speed only (64)", lambda *_: 64)}
KERNEL = {
    "kernel": Size(
        "",
        "positions seen, with the current one (4)",
        lambda *_: 4,
        lambda kernel, shape, _: kernel <= shape.segment,
        "must be at most train.segment={segment}",
    )
}
D_FFN = {"d_ffn": Size("", "inner width (model.d_ffn)", lambda shape, _: shape.d_ffn, multiple=True)}
ATTENTION = HEADS | KEY_HEADS

# fmt: off
OPERATIONS = {
    "attention": Kind("a", "#c8553d", "attention:Attention", "attention to all positions", ATTENTION, True),
    "sparse_strided": Kind(
        "s", "#e09f3e", "sparse:SparseStrided", "attention to a window and a strided column", STRIDE | ATTENTION, True),
    "sparse_fixed": Kind(
        "f", "#7b6d8d", "sparse:SparseFixed", "attention to a row and summaries", STRIDE | SUMMARY | ATTENTION, True),
    "window": Kind("w", "#2a9d8f", "sparse:Window", "attention to a sliding window", WINDOW | ATTENTION, True),
    "linear": Kind(
        "l", "#8ab17d", "delta_net:GatedDeltaNet", "linear attention (gated delta rule)", HEADS | CHUNK, True, True),
    "conv": Kind("c", "#d4a5a5", "convolution:ShortConvolution", "gated short convolution", KERNEL),
    "dense": Kind("d", "#2f6690", "dense:Dense", "feed-forward network", D_FFN),
    "identity": Kind("i", "#b9bfc7", "dense:Identity", "nothing"),
}
# fmt: on


def build_operation(name: str, config, **sizes: int):
    """The module of an operation. config: a BlockConfig. Raises ValueError if its class lacks a piece."""
    kind = OPERATIONS[name]
    file, _, class_name = kind.place.partition(":")
    operation = getattr(import_module(f"models.operations.{file}"), class_name)(config, **sizes)
    if missing := operation.missing_piece():
        raise ValueError(f"the operation {name} of models/operations/{file}.py {missing}")
    if operation.carries_state != kind.carries_state:
        raise ValueError(f"the operation {name} needs carries_state={operation.carries_state} in its registry line")
    return operation
