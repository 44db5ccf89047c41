"""The cost file: costs of networks for 1,000 bytes of text, a table for each vocabulary and width."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.pattern import interleaved
from nas.costs.cost_table import FLOPS, MILLISECONDS, CostTable, changed_conditions
from nas.search.space import Network, read_network


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
            costs = {"unit": table.unit, "overhead": table.overhead, "blocks": table.blocks}
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
        return self.cost(self.reference)

    def cost(self, network: Network) -> float:
        return self.tables[network[:2]].cost(network.blocks)

    def ratio(self, network: Network) -> float:
        """Cost relative to that of the reference."""
        return self.cost(network) / self.reference_cost

    def table(self, vocab_size: int | None, d_model: int) -> CostTable:
        """The table of a vocabulary (None: the only one) and a width, with the cost of the reference.

        Raises InputError if there is none.
        """
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
    """The table of a run's cost file for the sizes of the run. options: {dotted key: value}.

    Raises InputError if it is damaged, or lacks the sizes or an operation.
    """
    table = NetworkCosts.read(path).table(options["data.vocab_size"], options["model.d_model"])
    if lacking := {*operations} - table.blocks.keys():
        raise InputError(f"{path} lacks {min(lacking)}; remove it, or measure again with nas.latency")
    return table
