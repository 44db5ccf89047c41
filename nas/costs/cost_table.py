"""The cost table: costs of operations in FLOPs or milliseconds. Their sum is the cost of a pattern."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nas.core.config_checks import milliseconds
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import interleaved

FLOPS, MILLISECONDS = "FLOPs per token, forward", "ms"
TOLERANCE = 0.10  # a measured ratio that differs more than this from the prediction causes a warning
UNSTEADY = 0.5  # so does an interquartile range above this share of the median


@dataclass(frozen=True)
class CostTable:
    """Cost of each operation in a block, and the overhead of every pattern: embedding and output layer.

    reference_cost: of the reference for as much text; None: the reference is interleaved with as many blocks.
    bytes_per_token: of the training text; None: unknown.
    """

    unit: str  # FLOPS or MILLISECONDS
    overhead: float
    blocks: dict[str, float]
    holds_for: dict = field(default_factory=dict)  # sizes and, of measured costs, the device
    quartiles: dict[str, list[float]] = field(default_factory=dict)  # of measured costs
    reference_cost: float | None = None
    bytes_per_token: float | None = None

    def cost(self, blocks: list[str]) -> float:
        """Cost of a whole model with these blocks."""
        return self.overhead + sum(self.blocks[name] for name in blocks)

    def reference(self, blocks: int) -> float:
        """Cost of the reference: reference_cost, or that of interleaved with `blocks` blocks."""
        return self.reference_cost or self.cost(interleaved(blocks))

    def per_kilobyte(self, cost: float) -> float:
        """A cost for 1,000 bytes of text, instead of a token or, in milliseconds, a batch of segments."""
        tokens = self.holds_for["batch_size"] * self.holds_for["segment"] if self.unit == MILLISECONDS else 1
        return cost * 1000 / (tokens * self.bytes_per_token)

    def as_ratio(self, budget: float | str, blocks: int) -> float:
        """A budget, which may be such as 2.5ms, as a ratio to the reference's cost.

        Raises InputError if the table is not in milliseconds, or does not know its text.
        """
        time = milliseconds(budget)
        if time is None:
            return budget
        if self.unit != MILLISECONDS or self.bytes_per_token is None:
            raise InputError(
                f"a budget of {budget} needs measured costs: give a ratio, or search.latency.source=measured"
            )
        return time / self.per_kilobyte(self.reference(blocks))

    def for_text(self, cost: float) -> str:
        """A cost as text: for 1,000 bytes, if the table knows its text."""
        if self.bytes_per_token is None:
            return f"{cost:.4g} {self.unit}"
        return f"{self.per_kilobyte(cost):.4g} {self.unit.split()[0]} for 1,000 bytes of text"

    def ratio(self, blocks: list[str]) -> float:
        """Cost relative to the reference."""
        return self.cost(blocks) / self.reference(len(blocks))

    def ratio_to_interleaved(self, blocks: list[str]) -> float:
        """Cost relative to the interleaved pattern with the same number of blocks."""
        return self.cost(blocks) / self.cost(interleaved(len(blocks)))

    def cheapest(self, operations: list[str], blocks: int) -> list[str]:
        """The pattern of the lowest cost."""
        return [min(operations, key=self.blocks.__getitem__)] * blocks

    def expected(self, pi, operations: list[str]):
        """Expected cost of a pattern that is sampled from pi [N, O], an array or tensor. It is exact: costs add up."""
        return self.overhead + sum(pi[:, index].sum() * self.blocks[name] for index, name in enumerate(operations))

    def expected_ratio(self, pi, operations: list[str]):
        """Expected cost relative to the reference. PLANER (arXiv 2208.14580) penalises it."""
        return self.expected(pi, operations) / self.reference(len(pi))

    def predict(self, blocks: list[str]) -> dict:
        """Predicted latency of a pattern in milliseconds, in the form of pattern files."""
        return {"predicted_ms": self.cost(blocks), "predicted_ratio_to_interleaved": self.ratio_to_interleaved(blocks)}

    def rows(self, blocks: int) -> list[tuple[str, str, str, str]]:
        """(name, cost, quartiles, share of the interleaved pattern's cost) of each entry, as text."""
        baseline, rows = self.cost(interleaved(blocks)), []
        for name, cost in {"embedding and output layer": self.overhead, **self.blocks}.items():
            quartiles = self.quartiles.get(name if name in self.blocks else "overhead", [])
            spread = " ... ".join(f"{quartile:.3f}" for quartile in quartiles)
            rows.append((name, f"{cost:.3f}", spread, f"{cost / baseline:.1%}"))
        return [*rows, (f"interleaved, {blocks} blocks", f"{baseline:.3f}", "", "")]

    def text(self, blocks: int) -> str:
        """The rows as a table for the terminal."""
        rows = [(self.unit, "median", "quartiles", "of interleaved"), *self.rows(blocks)]
        return "\n".join(f"{name:<28}{cost:>10}{spread:>20}{share:>16}".rstrip() for name, cost, spread, share in rows)

    def write(self, path: Path) -> None:
        write_yaml(path, asdict(self))


def least_ratio(ratio: float) -> str:
    """A ratio as a budget, rounded up to three decimals."""
    return f"{math.ceil(1000 * ratio) / 1000:.3f}"


def are_costs(values: list) -> bool:
    """Whether all are numbers of 0 or more."""
    return all(isinstance(value, (int, float)) and 0 <= value < math.inf for value in values)


def read_costs(path: Path, operations: list[str]) -> CostTable:
    """Read a table. Raises InputError if it lacks a cost, of attention or dense too, or if a cost is invalid."""
    content = read_yaml(path)
    if "tables" in content:
        raise InputError(f"{path} is a table of networks; search.method=gumbel needs one without --networks")
    blocks, overhead = content.get("blocks"), content.get("overhead")
    needed = {*operations, *interleaved(2)}
    valid = isinstance(blocks, dict) and are_costs([overhead, *blocks.values()])
    holds_for, quartiles = (content.get(key) or {} for key in ("holds_for", "quartiles"))
    mappings = isinstance(holds_for, dict) and isinstance(quartiles, dict)
    if not (valid and mappings and needed <= blocks.keys()):
        raise InputError(
            f"{path} is damaged: `overhead` and, under `blocks`, {', '.join(operations)} must be costs of 0 or more"
        )
    for name in interleaved(2):
        if blocks[name] == 0:
            raise InputError(f"{path} makes no sense: {name} costs 0; remove the file to measure costs again")
    text = {key: content[key] for key in ("reference_cost", "bytes_per_token") if key in content}
    return CostTable(content.get("unit", FLOPS), overhead, blocks, holds_for, quartiles, **text)


def latency_report(latency: dict) -> list[str]:
    """Lines about a pattern's latency in its file, with a warning if it differs much from the prediction."""
    if not latency:
        return []
    if "median_ms" not in latency:
        return [f"latency: predicted {latency['predicted_ms']:.2f} ms, not measured"]
    measured, ratio = latency["median_ms"], latency["ratio_to_interleaved"]
    shape = f"{latency['batch_size']} x {latency['segment']} tokens, memory {latency['memory']}"
    line = f"latency ({latency['timing']}, {shape}): measured {measured:.2f} ms, {ratio:.2f} of the interleaved pattern"
    if per_kilobyte := latency.get("ms_per_1000_bytes"):
        line += f"; {per_kilobyte:.4g} ms for 1,000 bytes of text"
    low, high = latency.get("quartiles_ms", (measured, measured))
    warning = f"WARNING: the latency varies too much, quartiles {low:.2f} and {high:.2f} ms: stop other programs."
    unsteady = [warning] if high - low > UNSTEADY * measured else []
    if "predicted_ms" not in latency:
        return [line, *unsteady]
    predicted, predicted_ratio = latency["predicted_ms"], latency["predicted_ratio_to_interleaved"]
    lines = [f"{line}; predicted {predicted:.2f} ms, {predicted_ratio:.2f}", *unsteady]
    difference = ratio / predicted_ratio - 1  # milliseconds depend on what else runs, ratios less
    if abs(difference) > TOLERANCE and not unsteady:
        lines.append(
            f"WARNING: the measured ratio differs from the prediction by {difference:+.0%}. Measure again on an idle "
            "machine, or trust the measured one."
        )
    return lines
