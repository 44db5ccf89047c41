"""Shapes of networks: vocabulary, width and number of blocks.

A candidate has a value for each of them. Networks of different vocabularies are compared by bytes of text.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

from nas.core.config import Config, default_lr
from nas.core.pattern import shape_options

BYTES_PER_PIECE = 300  # of the training text, in the largest vocabulary that `auto` tries
VOCABULARIES = 1000, 2000, 4000, 8000, 16_000, 32_000
WIDTHS = 1, 1.5, 2, 3, 4  # multiples of model.d_model
DEPTHS = 2, 3, 4, 6, 8, 12, 16, 24, 32, 48


class NetworkShape(NamedTuple):
    """vocab_size: pieces of the tokenizer; blocks: of the network."""

    vocab_size: int
    d_model: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.vocab_size}-{self.blocks}x{self.d_model}"


def own_shape(config: Config) -> NetworkShape:
    """The shape of the configuration itself, which is the reference of budgets."""
    return NetworkShape(config.data.vocab_size, config.model.d_model, config.model.blocks)


def options_of(shape: NetworkShape, config: Config) -> list[str]:
    """The options section.key=value that give a configuration another shape, as with_shape()."""
    shaped = with_shape(config, shape)
    sizes = shape._asdict() | {"heads": shaped.model.heads}
    return [*shape_options(sizes), f"model.blocks={shape.blocks}", f"train.lr={shaped.train.lr}"]


def with_shape(config: Config, shape: NetworkShape) -> Config:
    """The configuration with another shape. Heads keep their number of channels, and a default rate suits the width."""
    model, train = config.model, config.train
    if train.lr == default_lr(train.optimizer, model.d_model):
        train = replace(train, lr=default_lr(train.optimizer, shape.d_model))
    heads = shape.d_model * model.heads // model.d_model
    model = replace(model, d_model=shape.d_model, heads=heads, blocks=shape.blocks)
    return replace(config, data=replace(config.data, vocab_size=shape.vocab_size), model=model, train=train)


def candidate_shapes(config: Config, text_bytes: int) -> list[NetworkShape]:
    """All shapes of search.vocab_size, search.d_model and search.blocks, and the reference.

    text_bytes: of the training text.
    """
    own, given, head = own_shape(config), config.search, config.model.d_model // config.model.heads
    sizes = [size for size in VOCABULARIES if size * BYTES_PER_PIECE <= text_bytes]
    widths = [round(own.d_model * factor / head) * head for factor in WIDTHS]
    largest = own.blocks if given.blocks in ("auto", None) else given.blocks
    choices = (
        choose(given.vocab_size, sizes, own.vocab_size),
        choose(given.d_model, widths, own.d_model),
        [own.blocks] if given.blocks is None else sorted({*(n for n in DEPTHS if n < largest), largest}),
    )
    return list(dict.fromkeys([*(NetworkShape(*values) for values in itertools.product(*choices)), own]))


def choose(given, automatic: list[int], own: int) -> list[int]:
    """The values of a size: those given, those for `auto`, with the configuration's own if none are given."""
    return sorted({*automatic, own} if given == "auto" else {*given}) or [own]
