"""The pattern with the highest probability within a cost budget."""

import numpy as np

from nas.core.errors import InputError
from nas.core.pattern import interleaved, limited_operations
from nas.costs.cost_table import CostTable
from nas.costs.lattice import PatternLattice

LARGEST = 10  # a larger ratio is a mistake, such as milliseconds
SPENT = 0.95  # share of the highest possible cost that patterns with a limit of attention blocks must use


class NoPatternFits(InputError):
    """No pattern is within a budget."""


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
        attentions: with a budget, the limit of patterns_within().

    Raises NoPatternFits, which says what would fit, if no pattern does.
    """
    if budget is None:
        return pi.argmax(axis=1).tolist()
    return patterns_within(budget, len(pi), operations, costs, attentions).best(log_pi(pi))


def log_pi(pi: np.ndarray) -> np.ndarray:
    """The logarithm of pi, finite where pi is 0."""
    return np.log(np.maximum(pi, np.finfo(float).tiny))


def patterns_within(
    budget: float, blocks: int, operations: list[str], costs: CostTable, attentions: int | None = None
) -> PatternLattice:
    """The patterns whose cost is at most `budget`, a ratio to the interleaved pattern's cost.

    Raises NoPatternFits, which names the lowest possible budget, or the limit of attentions, if there are none.

    Args:
        attentions: the highest number of limited_operations(); None: any. With it, patterns below SPENT of the highest
            possible cost are excluded, because a SuperNet prefers identity to many dense blocks.
    """
    block_costs = [costs.blocks[name] for name in operations]
    limit = budget * costs.cost(interleaved(blocks)) - costs.overhead
    try:
        if attentions is None:
            return PatternLattice(block_costs, blocks, limit)
        limits = {"limited": [operations.index(name) for name in limited_operations(operations)], "most": attentions}
        dearest = PatternLattice(block_costs, blocks, limit, **limits).best(np.tile(block_costs, (blocks, 1)))
        least = SPENT * sum(block_costs[index] for index in dearest)
        return PatternLattice(block_costs, blocks, limit, least, **limits)
    except ValueError:
        cheapest = costs.cheapest(operations, blocks)
        if costs.ratio(cheapest) <= budget:
            raise NoPatternFits(f"no pattern with {attentions} attention blocks or fewer fits {budget:g}") from None
        raise NoPatternFits(
            f"no pattern fits a budget of {budget:g}: the cheapest costs {costs.least_budget(cheapest)} of the "
            "interleaved pattern; give at least that"
        ) from None
