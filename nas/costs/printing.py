"""Costs and latencies as text."""

import math

from nas.core.pattern import interleaved
from nas.costs.cost_table import CostTable

TOLERANCE = 0.10  # a measured ratio that differs more than this from the prediction causes a warning
UNSTEADY = 0.5  # so does an interquartile range above this share of the time


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
    warning = f"WARNING: the latency varies too much, quartiles {low:.4g} and {high:.4g} ms: stop other programs."
    unsteady = [warning] if high - low > UNSTEADY * measured else []
    if predicted is None:
        return [line, *unsteady]
    predicted_ratio = latency["predicted_ratio_to_interleaved"]
    lines = [f"{line}; predicted {predicted:.4g} ms, {predicted_ratio:.2f}", *unsteady]
    difference = ratio / predicted_ratio - 1  # milliseconds depend on what else runs, ratios less
    if abs(difference) > TOLERANCE and not unsteady:
        lines.append(
            f"WARNING: the measured ratio differs from the prediction by {difference:+.0%}. Measure again on an idle "
            "machine, or trust the measured one."
        )
    return lines
