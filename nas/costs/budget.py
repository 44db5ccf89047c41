"""Budgets: their description, the patterns within one, and the likeliest of these."""

import numpy as np

from nas.core.config import milliseconds
from nas.core.errors import InputError
from nas.core.pattern import abbreviate, interleaved, kind_of
from nas.costs.cost_table import MILLISECONDS, CostTable
from nas.costs.lattice import PatternLattice
from nas.costs.printing import for_text, least_ratio

LARGEST = 10  # a larger ratio is a mistake, such as milliseconds


def read_budgets(text: str) -> list[float | str]:
    """Parse `0.5,0.65,2.5ms` into increasing ratios to the reference's cost, and times. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    times = {time for part in parts if (time := milliseconds(part))}
    try:  # rounded for file names
        ratios = {round(float(part), 4) for part in parts if not milliseconds(part)}
    except ValueError:
        ratios = {0.0}
    if not all(0 < ratio <= LARGEST for ratio in ratios):
        raise InputError(
            f"{text!r} is not a budget: give ratios to the reference's cost, such as 0.65 or 0.5,0.65,1, of at most "
            f"{LARGEST}, or milliseconds for 1,000 bytes of text, such as 2.5ms"
        )
    return [*sorted(ratios), *(f"{time:g}ms" for time in sorted(times))]


def as_ratio(budget: float | str, costs: CostTable, blocks: int) -> float:
    """A budget, which may be such as 2.5ms, as a ratio to the reference's cost.

    costs: for 1,000 bytes of text. Raises InputError if they are not in milliseconds.
    """
    time = milliseconds(budget)
    if time is None:
        return budget
    if costs.unit != MILLISECONDS:
        raise InputError(f"a budget of {budget} needs measured costs: give a ratio, or search.latency.source=measured")
    return time / costs.reference(blocks)


def patterns_within(budget: float, blocks: int, operations: list[str], costs: CostTable) -> PatternLattice:
    """The patterns whose cost is at most `budget`, a ratio to the reference's cost.

    Raises InputError, which names the lowest possible budget, if there are none.
    """
    limit = budget * costs.reference(blocks) - costs.overhead
    try:
        return PatternLattice([costs.blocks[name] for name in operations], blocks, limit)
    except ValueError:
        cheapest = costs.cheapest(operations, blocks)
        raise InputError(
            f"no pattern fits a budget of {budget:.4g}: the cheapest costs {least_ratio(costs.ratio(cheapest))} of the "
            "reference; give at least that"
        ) from None


def likeliest_path(pi: np.ndarray, operations: list[str], costs: CostTable, budget: float | None) -> list[int]:
    """The likeliest operation of each block under pi [N, O]; with a budget, the likeliest path within it.

    budget: a ratio to the reference's cost. Raises InputError if no pattern is within it.
    """
    if budget is None:
        return pi.argmax(axis=1).tolist()
    return patterns_within(budget, len(pi), operations, costs).best(log_pi(pi))


def log_pi(pi: np.ndarray) -> np.ndarray:
    """The logarithm of pi, finite where pi is 0."""
    return np.log(np.maximum(pi, np.finfo(float).tiny))


def describe_budget(budget: float, blocks: int, operations: list[str], costs: CostTable) -> list[str]:
    """Sentences about what a budget leaves for the blocks.

    Raises InputError if fewer than two patterns are within it.
    """
    patterns_within(budget, blocks, operations, costs)
    cheapest = costs.cheapest(operations, blocks)
    others = [name for name in operations if name != cheapest[0]]
    if others and costs.ratio(second := [*costs.cheapest(others, 1), *cheapest[1:]]) > budget:
        raise InputError(
            f"only {abbreviate(cheapest)} is within search.latency.target={budget:.4g}, so there is nothing to search; "
            f"give {least_ratio(costs.ratio(second))} or more"
        )
    reference, baseline = costs.reference(blocks), costs.cost(interleaved(blocks))
    share = (budget * reference - costs.overhead) / (baseline - costs.overhead)
    lines = [
        f"search.latency.target={budget:.4g} of the reference is {for_text(budget * reference, costs.unit)}; embedding "
        f"and output layer take {costs.overhead / (budget * reference):.0%} of it, so the blocks may cost {share:.0%} "
        "of what the interleaved pattern's blocks cost"
    ]
    if attending := [name for name in operations if kind_of(name).reaches_far]:
        pattern = [*costs.cheapest(attending, 1), *costs.cheapest(operations, blocks - 1)]
        if costs.ratio(pattern) > budget:
            lines.append(
                f"WARNING: no pattern within search.latency.target={budget:.4g} has an attention block; give "
                f"search.latency.target={least_ratio(costs.ratio(pattern))} or more"
            )
    return lines
