"""Networks: vocabulary, width and blocks. Those of different vocabularies are compared by bytes of text."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from nas.core.config import Config
from nas.core.pattern import file_name, interleaved, shape_options
from nas.costs.cost_table import CostTable

BYTES_PER_PIECE = 300  # of the training text, in the largest vocabulary that `auto` tries
VOCABULARIES = 1000, 2000, 4000, 8000, 16_000, 32_000
WIDTHS = 1, 1.5, 2, 3, 4  # multiples of model.d_model


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
    widths = [width for factor in WIDTHS if (width := round(model.d_model * factor / head) * head) % 2 == 0]
    given = (search.vocab_size, sizes, vocab_size), (search.d_model, widths, model.d_model)
    return list(product(*(sorted({*auto, own} if it == "auto" else {*it}) or [own] for it, auto, own in given)))


def first_candidates(config: Config, tables: dict[tuple[int, int], CostTable], limit: float) -> list[Network]:
    """The candidates of at most a cost from which a search climbs: of each pair of sizes its interleaved networks, or
    if there are none, networks of one operation.

    With identity among the operations, a network has at most model.blocks blocks, else exactly as many.
    tables: costs of each vocabulary and width.
    """
    operations, most = config.search.operations, config.model.blocks
    depths = range(1, most + 1) if "identity" in operations else [most]
    plain = [interleaved(depth) for depth in depths] if {*interleaved(2)} <= {*operations} else []
    uniform, found = [[name] * depth for name in operations if name != "identity" for depth in depths], []
    for shape, table in tables.items():
        affordable = within_budget(table, limit)
        patterns = [*filter(affordable, plain)] or filter(affordable, uniform)
        found += [make_network(*shape, blocks) for blocks in patterns]
    return found


def cheapest(config: Config, table: CostTable) -> float:
    """The cost of the cheapest network of a vocabulary and width."""
    names, least = config.search.operations, 1 if "identity" in config.search.operations else config.model.blocks
    return table.overhead + least * min(table.blocks[name] for name in names if name != "identity")


def within_budget(table: CostTable, limit: float) -> Callable[[Iterable[str]], bool]:
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
