"""Networks: vocabulary, width and blocks. Those of different vocabularies are compared by bytes of text."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.pattern import file_name, interleaved, shape_options
from nas.costs.baselines import random_patterns, rules_within
from nas.costs.cost_table import CostTable

BYTES_PER_PIECE = 300  # of the training text, in the largest vocabulary that `auto` tries
VOCABULARIES = 1000, 2000, 4000, 8000, 16_000, 32_000
WIDTHS = 1, 1.5, 2, 3, 4  # multiples of model.d_model
BAND = 0.75  # least cost of random networks, as a share of the budget
DRAWN = 60  # random networks, times the number of pairs of vocabulary and width


class Network(NamedTuple):
    """vocab_size: pieces of the tokenizer. blocks: without identity, so that a network has one spelling."""

    vocab_size: int
    d_model: int
    blocks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.vocab_size}-{self.d_model}-{file_name(self.blocks)}"

    @property
    def is_interleaved(self) -> bool:
        return list(self.blocks) == interleaved(len(self.blocks))

    def to_dict(self) -> dict:
        """A mapping for YAML files. read_network() is the inverse."""
        return self._asdict() | {"blocks": list(self.blocks)}


def read_network(content: dict) -> Network:
    return make_network(*(content[key] for key in Network._fields))


def make_network(vocab_size: int, d_model: int, blocks: Iterable[str]) -> Network:
    return Network(vocab_size, d_model, tuple(block for block in blocks if block != "identity"))


def with_sizes(config: Config, vocab_size: int, d_model: int) -> Config:
    """The configuration with other sizes. Heads keep their number of channels. Bytes or words keep their vocabulary."""
    model, data = config.model, config.data
    model = replace(model, d_model=d_model, heads=d_model * model.heads // model.d_model)
    data = replace(data, vocab_size=vocab_size if data.vocab_size else None)
    return replace(config, data=data, model=model)


def options_of(network: Network, config: Config) -> list[str]:
    """The options section.key=value that give a configuration a network's sizes, as with_sizes()."""
    sizes = {"d_model": network.d_model, "heads": with_sizes(config, *network[:2]).model.heads}
    return shape_options(sizes | ({"vocab_size": network.vocab_size} if config.data.vocab_size else {}))


def candidate_sizes(config: Config, vocab_size: int, text_bytes: int) -> list[tuple[int, int]]:
    """All pairs of search.vocab_size and search.d_model. vocab_size, text_bytes: of the training text."""
    model, search, head = config.model, config.search, config.model.d_model // config.model.heads
    sizes = [size for size in VOCABULARIES if size * BYTES_PER_PIECE <= text_bytes]
    widths = [round(model.d_model * factor / head) * head for factor in WIDTHS]
    given = (search.vocab_size, sizes, vocab_size), (search.d_model, widths, model.d_model)
    return list(product(*(sorted({*auto, own} if it == "auto" else {*it}) or [own] for it, auto, own in given)))


def interleaved_within(config: Config, tables: dict[tuple[int, int], CostTable], limit: float) -> list[Network]:
    """Interleaved networks of at most a cost; none if attention or dense is not among the operations."""
    operations, most = config.search.operations, config.model.blocks
    depths = range(1, most + 1) if "identity" in operations else [most]
    if not {*interleaved(2)} <= {*operations}:
        return []
    patterns = {shape: filter(within(table, limit), map(interleaved, depths)) for shape, table in tables.items()}
    return [make_network(*shape, blocks) for shape, fitting in patterns.items() for blocks in fitting]


def first_networks(
    config: Config, tables: dict[tuple[int, int], CostTable], limit: float, band: float = BAND
) -> list[Network]:
    """The candidates from which a search climbs: interleaved networks or, without both operations, networks_within().

    Random networks among them do not help (experiments/versus/simulate.py).
    """
    return interleaved_within(config, tables, limit) or networks_within(config, tables, limit, band)


def networks_within(
    config: Config, tables: dict[tuple[int, int], CostTable], limit: float, band: float = BAND
) -> list[Network]:
    """Candidates of at most a cost: interleaved networks, rules, and random networks of at least `band` of the cost.

    With identity among the operations, a network has at most model.blocks blocks, else exactly as many.
    tables: costs of each vocabulary and width.
    """
    operations, most = config.search.operations, config.model.blocks
    found = interleaved_within(config, tables, limit)
    for shape, table in tables.items():
        rules = rules_within(most, operations, within(table, limit)).values()
        found += [make_network(*shape, blocks) for blocks in rules]
    found += islice(random_networks(config, tables, limit, band), DRAWN * len(tables))
    return list(dict.fromkeys(network for network in found if network.blocks))


def random_networks(
    config: Config, tables: dict[tuple[int, int], CostTable], limit: float, band: float
) -> Iterator[Network]:
    """Different networks of `band` to 1 of a cost. Vocabulary and width are uniform, and then as in random_patterns().

    tables: costs of each vocabulary and width. Those that have no network, or none left, are left out.
    """
    middle, tolerance = limit * (1 + band) / 2, (1 - band) / (1 + band)
    about, generator = (config.model.blocks, config.search.operations), np.random.default_rng(config.seed)
    draws = {
        shape: random_patterns(*about, table, middle, tolerance, config.seed * len(tables) + number)
        for number, (shape, table) in enumerate(tables.items())
    }
    while draws:
        shape = list(draws)[generator.integers(len(draws))]
        try:
            yield make_network(*shape, next(draws[shape]))
        except (InputError, StopIteration):
            del draws[shape]


def cheapest(config: Config, table: CostTable) -> float:
    """The cost of the cheapest network of a vocabulary and width."""
    names, least = config.search.operations, 1 if "identity" in config.search.operations else config.model.blocks
    return table.overhead + least * min(table.blocks[name] for name in names if name != "identity")


def within(table: CostTable, limit: float) -> Callable[[Iterable[str]], bool]:
    """Whether a pattern costs at most the limit. Sums may be rounded."""
    return lambda blocks: table.cost(blocks) <= limit * (1 + 1e-9)


def neighbours(network: Network, operations: list[str], most: int) -> list[Network]:
    """Networks that differ by one block, which is another, is added or is left out, or by an exchange of two."""
    blocks, names = network.blocks, [name for name in operations if name != "identity"]
    places, free = range(len(blocks)), "identity" in operations
    found = [(*blocks[:i], name, *blocks[i + 1 :]) for i in places for name in names]
    found += [
        (*blocks[:i], blocks[j], *blocks[i + 1 : j], blocks[i], *blocks[j + 1 :]) for j in places for i in range(j)
    ]
    if free and len(blocks) < most:
        found += [(*blocks[:i], name, *blocks[i:]) for i in range(len(blocks) + 1) for name in names]
    if free and len(blocks) > 1:
        found += [(*blocks[:i], *blocks[i + 1 :]) for i in places]
    return [network._replace(blocks=other) for other in dict.fromkeys(found) if other != blocks]
