"""Networks: vocabulary, width and blocks, and their costs for 1,000 bytes of text, which all vocabularies share."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.pattern import file_name, interleaved, shape_options
from nas.costs.cost_table import FLOPS, MILLISECONDS, CostTable, changed_conditions

BYTES_PER_PIECE = 300  # of the training text, in the largest vocabulary that `auto` tries
VOCABULARIES = 1000, 2000, 4000, 8000, 16_000, 32_000
WIDTHS = 1, 1.5, 2, 3, 4  # multiples of model.d_model


class Network(NamedTuple):
    """vocab_size: pieces of the tokenizer. blocks: without identity, so that a network has one spelling; a network of
    embedding and output layer alone has none.
    """

    vocab_size: int
    d_model: int
    blocks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.vocab_size}-{self.d_model}-{file_name(self.pattern)}"

    @property
    def pattern(self) -> list[str]:
        """The blocks in a pattern file, where no blocks mean no network."""
        return list(self.blocks) or ["identity"]

    @property
    def is_interleaved(self) -> bool:
        return list(self.blocks) == interleaved(len(self.blocks)) != []

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


def simple_patterns(config: Config) -> list[list[list[str]]]:
    """Interleaved patterns, those of one operation, and the one without blocks. With identity among the operations,
    they have at most model.blocks blocks, else exactly as many.
    """
    operations, most = config.search.operations, config.model.blocks
    depths = range(1, most + 1) if "identity" in operations else [most]
    plain = [interleaved(depth) for depth in depths] if {*interleaved(2)} <= {*operations} else []
    uniform = [[name] * depth for name in operations if name != "identity" for depth in depths]
    return [plain, uniform, [[]] if "identity" in operations else []]


def first_candidates(config: Config, tables: dict[tuple[int, int], CostTable], limit: float) -> list[Network]:
    """The candidates of at most a cost from which a search climbs: of each pair of sizes its interleaved networks, or
    the next of simple_patterns(). tables: costs of each vocabulary and width.
    """
    found = []
    for shape, table in tables.items():
        fitting = ([*filter(within_budget(table, limit), group)] for group in simple_patterns(config))
        found += [make_network(*shape, blocks) for blocks in next(filter(None, fitting), [])]
    return found


def cheapest(config: Config, table: CostTable) -> float:
    """The cost of the cheapest network of a vocabulary and width."""
    names, least = config.search.operations, 0 if "identity" in config.search.operations else config.model.blocks
    return table.overhead + table.mixture + least * min(table.blocks[name] for name in names if name != "identity")


def within_budget(table: CostTable, limit: float) -> Callable[[Iterable[str]], bool]:
    """Whether a pattern, and cache and counts beside it, cost at most the limit, and fit the room. Sums are rounded."""
    return lambda blocks: table.cost(blocks) + table.mixture <= limit * (1 + 1e-9) and table.spare(blocks) >= 0


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
    if free:
        found += [(*blocks[:i], *blocks[i + 1 :]) for i in places]
    return [network._replace(blocks=other) for other in dict.fromkeys(found) if other != blocks]


@dataclass(frozen=True)
class NetworkCosts:
    """Costs for 1,000 bytes of text. tables: of each vocabulary and width, that of the reference among them."""

    tables: dict[tuple[int, int], CostTable]
    reference: Network

    @classmethod
    def read(cls, path: Path) -> "NetworkCosts":
        """Read a cost file. Raises InputError if it is damaged."""
        content, tables = read_yaml(path), {}
        try:
            for record in content["tables"]:
                sizes, conditions = record.pop("sizes"), record.pop("conditions", {})
                tables[tuple(sizes)] = CostTable(**record, holds_for=content["conditions"] | conditions)
            costs = cls(tables, read_network(content["reference"]))
            values = [value for table in tables.values() for value in (table.overhead, *table.blocks.values())]
            valid = costs.reference_cost > 0 and all(0 <= value < math.inf for value in values)
        except (AttributeError, KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise InputError(
                f"{path} is damaged: it needs a reference and, in each of its tables, sizes and costs of 0 or more; "
                "python -m nas.latency --out writes such a file"
            )
        return costs

    def to_dict(self) -> dict:
        """The content of a cost file. Conditions that all tables share stand before them."""
        records, (first, *others) = [], [table.holds_for for table in self.tables.values()]
        shared = {key: value for key, value in first.items() if all(own.get(key) == value for own in others)}
        for shape, table in self.tables.items():
            own = {key: value for key, value in table.holds_for.items() if key not in shared}
            costs = {"unit": table.unit, "overhead": table.overhead, "mixture": table.mixture, "blocks": table.blocks}
            costs |= {} if table.room is None else {"bytes": table.bytes, "room": table.room}
            records.append({"sizes": [*shape], **costs, "quartiles": table.quartiles, "conditions": own})
        about = {"per": "1,000 bytes of text", "conditions": shared, "reference": self.reference.to_dict()}
        return about | {"tables": records}

    def only(self, shape: tuple[int, int]) -> "NetworkCosts":
        """The costs of one vocabulary and width, and of the reference."""
        return replace(self, tables={own: self.tables[own] for own in dict.fromkeys((shape, self.reference[:2]))})

    @property
    def unit(self) -> str:
        return self.tables[self.reference[:2]].unit

    @property
    def reference_cost(self) -> float:
        """Of the reference alone."""
        return self.tables[self.reference[:2]].cost(self.reference.blocks)

    def cost(self, network: Network) -> float:
        """Of a network, and of cache and counts beside it."""
        table = self.tables[network[:2]]
        return table.cost(network.blocks) + table.mixture

    def ratio(self, network: Network) -> float:
        return self.cost(network) / self.reference_cost

    def table(self, vocab_size: int | None, d_model: int) -> CostTable:
        """The table of a width and a vocabulary (None: the only one), with the reference's cost. Raises InputError."""
        fitting = [shape for shape in self.tables if shape[1] == d_model and vocab_size in (None, shape[0])]
        if not fitting:
            raise InputError(
                f"the costs lack a width of {d_model} with this vocabulary; measure again with nas.latency"
            )
        return replace(self.tables[fitting[0]], reference_cost=self.reference_cost)

    def differ(self, config: Config, wanted: dict[tuple[int, int], dict], reference: Network) -> str:
        """Why they do not fit a search; "" if they do. wanted: the conditions of each vocabulary and width."""
        if self.unit != (unit := MILLISECONDS if config.search.latency.in_milliseconds else FLOPS):
            return f"it has costs in {self.unit}, not in {unit}"
        if lacking := {*config.search.operations, *interleaved(2)} - self.tables[self.reference[:2]].blocks.keys():
            return f"it lacks {min(lacking)}"
        if reference != self.reference:
            return f"its reference is {self.reference}"
        for shape, conditions in wanted.items():
            if shape not in self.tables:
                return f"it lacks a vocabulary of {shape[0]} with a width of {shape[1]}"
            if changed := changed_conditions(self.tables[shape].holds_for, conditions):
                return f"it was measured with {changed}"
        return ""


def read_table(path: Path, options: dict, operations: list[str]) -> CostTable:
    """The table for the sizes of a run. options: {dotted key: value}. Raises InputError if sizes or operations lack."""
    table = NetworkCosts.read(path).table(options["data.vocab_size"], options["model.d_model"])
    if lacking := {*operations} - table.blocks.keys():
        raise InputError(f"{path} lacks {min(lacking)}; remove it, or measure again with nas.latency")
    return table
