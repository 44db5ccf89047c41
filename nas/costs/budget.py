"""The pattern with the highest probability within a cost budget."""

import math

import numpy as np

from nas.core.errors import InputError
from nas.core.pattern import ATTENDING, interleaved
from nas.costs.cost_table import CostTable
from nas.costs.lattice import PatternLattice

LARGEST = 10  # a larger ratio is a mistake, such as milliseconds


def read_budgets(text: str) -> list[float]:
    """Parse `0.5,0.65,1` into increasing ratios to the interleaved pattern's cost. Raises
    InputError if one is invalid.
    """
    try:
        budgets = sorted({round(float(part), 4) for part in text.split(",")})  # rounded for file names
    except ValueError:
        budgets = []
    if not budgets or not all(0 < budget <= LARGEST for budget in budgets):
        raise InputError(
            f"{text!r} is not a budget: give ratios to the interleaved pattern's cost, such as 0.65 or 0.5,0.65,1, "
            f"of at most {LARGEST}"
        )
    return budgets


def likeliest_path(
    pi: np.ndarray, operations: list[str], costs: CostTable, budget: float | None, attentions: int | None = None
) -> list[int]:
    """The likeliest operation of each block under pi [N, O]; with a budget, the likeliest path within it.

    Args:
        budget: a ratio to the interleaved pattern's cost.
        attentions: with a budget, the highest number of blocks that attend; None: any.

    Raises InputError, which names the lowest possible budget, if no pattern is cheap enough.
    """
    if budget is None:
        return pi.argmax(axis=1).tolist()
    scores = np.log(np.maximum(pi, np.finfo(float).tiny))
    return patterns_within(budget, len(pi), operations, costs, attentions).best(scores)


def patterns_within(
    budget: float, blocks: int, operations: list[str], costs: CostTable, attentions: int | None = None
) -> PatternLattice:
    """The patterns whose cost is at most `budget`, a ratio to the interleaved pattern's cost.

    Raises InputError, which names the lowest possible budget, if there are none.

    Args:
        attentions: the highest number of blocks that attend; None: any.
    """
    block_costs = [costs.blocks[name] for name in operations]
    limit = budget * costs.cost(interleaved(blocks)) - costs.overhead
    attending = [index for index, name in enumerate(operations) if name in ATTENDING and attentions is not None]
    try:
        return PatternLattice(block_costs, blocks, limit, attending, attentions or 0)
    except ValueError:
        least = math.ceil(1000 * costs.least_ratio(operations, blocks)) / 1000
        raise InputError(
            f"no pattern fits a budget of {budget:g}: the cheapest costs {least:.3f} of the interleaved pattern; "
            "give at least that"
        ) from None
