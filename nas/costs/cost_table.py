"""The cost table: costs of operations in FLOPs or milliseconds, whose sum is the cost of a pattern, and their text."""

import math
from dataclasses import dataclass, field, replace

from nas.core.pattern import interleaved

FLOPS, MILLISECONDS = "FLOPs", "ms"
TOLERANCE = 0.10  # a measured ratio that differs more than this from the prediction causes a warning
UNSTEADY = 0.5  # so does an interquartile range above this share of the time


@dataclass(frozen=True)
class CostTable:
    """Cost of each operation in a block, and the overhead of every pattern: embedding and output layer.

    holds_for: the conditions of measured costs. quartiles: of measured costs; the overhead has its own.
    reference_cost: of the reference for as much text; None: the reference is interleaved with as many blocks.
    mixture: the cost of cache and counts beside a network, which cost() leaves out. bytes: of each operation. room: the
    bytes that search.size.target leaves for blocks, beside counts of mixture.size; None: any number.
    """

    unit: str  # FLOPS or MILLISECONDS
    overhead: float
    blocks: dict[str, float]
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    holds_for: dict = field(default_factory=dict)
    reference_cost: float | None = None
    mixture: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)
    room: int | None = None

    def cost(self, blocks: list[str]) -> float:
        """Cost of a whole model with these blocks."""
        return self.overhead + sum(self.blocks[name] for name in blocks)

    def spare(self, blocks: list[str]) -> int:
        """The bytes of the room that blocks do not take; 0 for any room."""
        return 0 if self.room is None else self.room - sum(self.bytes[name] for name in blocks)

    def counts_bytes(self, least: int | None, blocks: list[str]) -> int | None:
        """What blocks leave for counts, besides their least bytes; None without a limit, or without counts."""
        return None if self.room is None or not least else least + max(0, self.spare(blocks))

    def reference(self, blocks: int) -> float:
        """Cost of the reference: reference_cost, or that of interleaved with `blocks` blocks."""
        return self.reference_cost or self.cost(interleaved(blocks))

    def ratio(self, blocks: list[str]) -> float:
        return self.cost(blocks) / self.reference(len(blocks))

    def ratio_to_interleaved(self, blocks: list[str]) -> float:
        """Cost relative to the interleaved pattern with the same number of blocks."""
        return self.cost(blocks) / self.cost(interleaved(len(blocks)))

    def cheapest(self, operations: list[str], blocks: int) -> list[str]:
        return [min(operations, key=self.blocks.__getitem__)] * blocks

    def expected_ratio(self, pi, operations: list[str]):
        """Expected cost relative to the reference, exact, of patterns from pi [N, O] (PLANER, arXiv 2208.14580)."""
        costs = (pi[:, index].sum() * self.blocks[name] for index, name in enumerate(operations))
        return (self.overhead + sum(costs)) / self.reference(len(pi))

    def scaled(self, factor: float) -> "CostTable":
        """The costs of `factor` times as much text."""
        blocks = {name: factor * cost for name, cost in self.blocks.items()}
        quartiles = {name: [factor * cost for cost in both] for name, both in self.quartiles.items()}
        return replace(self, overhead=factor * self.overhead, blocks=blocks, quartiles=quartiles)


def changed_conditions(recorded: dict, current: dict) -> str:
    """The current conditions that were recorded otherwise, with the recorded values, as text; "" if there are none."""
    words = []
    for key, value in current.items():
        if key not in recorded:
            words.append(f"no {key}")
        elif recorded[key] != value:
            both = isinstance(recorded[key], dict) and isinstance(value, dict)
            # 40 characters, because a condition may be a digest or a long list.
            words.append(f"{key} {changed_conditions(recorded[key], value) if both else str(recorded[key])[:40]}")
    return ", ".join(words)


def least_ratio(ratio: float) -> str:
    """A ratio as a budget, rounded up to three decimals."""
    return f"{math.ceil(1000 * ratio) / 1000:.3f}"


def for_text(cost: float, unit: str) -> str:
    return f"{cost:.4g} {unit} for 1,000 bytes of text"


def cost_rows(table: CostTable, blocks: int) -> list[tuple[str, str, str, str]]:
    """(name, cost, quartiles, share of the interleaved pattern's cost) of each entry, as text."""
    baseline, rows = table.cost(interleaved(blocks)), []
    for name, cost in {"embedding and output layer": table.overhead, **table.blocks}.items():
        quartiles = table.quartiles.get(name if name in table.blocks else "overhead", [])
        spread = " ... ".join(f"{quartile:#.4g}" for quartile in quartiles)
        rows.append((name, f"{cost:#.4g}", spread, f"{cost / baseline:.1%}"))
    return [*rows, (f"interleaved, {blocks} blocks", f"{baseline:#.4g}", "", "")]


def cost_text(table: CostTable, blocks: int) -> str:
    """The rows as a table for the terminal."""
    rows = [(f"{table.unit} for 1,000 bytes", "cost", "quartiles", "of interleaved"), *cost_rows(table, blocks)]
    return "\n".join(f"{name:<28}{cost:>10}{spread:>24}{share:>16}".rstrip() for name, cost, spread, share in rows)


def latency_report(latency: dict) -> list[str]:
    """Lines about a pattern's latency in its file, with a warning if it differs much from the prediction."""
    if not latency:
        return []
    predicted = latency.get("predicted_ms_per_1000_bytes")
    if "ms_per_1000_bytes" not in latency:
        return [f"latency: predicted {for_text(predicted, 'ms')}, not measured"]
    measured, ratio = latency["ms_per_1000_bytes"], latency["ratio_to_interleaved"]
    shape = f"{latency['batch_size']} x {latency['segment']} tokens, memory {latency['memory']}"
    line = f"latency ({latency['timing']}, {shape}): measured {for_text(measured, 'ms')}, {ratio:.2f} of interleaved"
    low, high = latency.get("quartiles_ms", (measured, measured))
    expected = latency.get("predicted_ratio_to_interleaved", ratio)  # milliseconds depend on what else runs
    if predicted is not None:
        line += f"; predicted {predicted:.4g} ms, {expected:.2f}"
    warning = ""
    if high - low > UNSTEADY * measured:
        warning = f"the latency varies too much, quartiles {low:.4g} and {high:.4g} ms: stop other programs."
    elif abs(ratio / expected - 1) > TOLERANCE:
        advice = "Measure again on an idle machine, or trust the measured one."
        warning = f"the measured ratio differs from the prediction by {ratio / expected - 1:+.0%}. {advice}"
    return [line, f"WARNING: {warning}"] if warning else [line]
