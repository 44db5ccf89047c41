"""nas.derivation.budget."""

import math

import numpy as np

from nas.core.errors import InputError
from nas.core.pattern import interleaved
from nas.costs.table import CostTable


class Frontier:
    """The patterns that nothing beats: for every cost the greatest sum of scores, by dynamic programming over blocks.

    scores [N, O]; costs [O] of an operation in any block. Exact: a partial pattern is dropped only where another of at
    most its cost has at least its score, whatever follows. Costs are counted in whole units of 2^-40 of the largest, so
    that their sums have no rounding and there are never more partial patterns than multisets of operations.
    """

    def __init__(self, scores: np.ndarray, costs: list[float]):
        self.unit = max(costs) / 2**40
        units = np.rint(np.array(costs) / (self.unit or 1.0)).astype(np.int64)
        cost, score, self.choices = np.zeros(1, dtype=np.int64), np.zeros(1), []
        for row in scores:
            total, value = (cost[:, None] + units).ravel(), (score[:, None] + row).ravel()
            order = np.lexsort((-value, total))
            best_before = np.concatenate([[-np.inf], np.maximum.accumulate(value[order])[:-1]])
            kept = order[value[order] > best_before]
            self.choices.append(np.divmod(kept, len(costs)))  # (where it came from, operation)
            cost, score = total[kept], value[kept]
        self.cost = cost * self.unit

    def best(self, budget: float) -> list[int] | None:
        """The operation of each block in the pattern of greatest score that costs at most `budget`, within 1e-9 of the
        dearest operation; None where no pattern does."""
        place = int(np.searchsorted(self.cost, budget + 2**10 * self.unit, side="right")) - 1
        if place < 0:
            return None
        path = []
        for origins, operations in reversed(self.choices):
            path.append(int(operations[place]))
            place = origins[place]
        return path[::-1]


def read_budgets(text: str) -> list[float]:
    """0.5,0.65,1 -> increasing ratios to the interleaved pattern's cost. Raises InputError where they are none."""
    try:
        budgets = sorted({round(float(part), 4) for part in text.split(",")})  # files are named by them
    except ValueError:
        budgets = []
    if not budgets or not all(0 < budget < math.inf for budget in budgets):
        raise InputError(f"{text!r} is no budget: give ratios to the interleaved pattern's cost, such as 0.5,0.65,1")
    return budgets


def choose_within(budgets: list[float], pi: np.ndarray, operations: list[str], costs: CostTable) -> list[list[int]]:
    """For each budget, a ratio to the interleaved pattern's cost, the pattern of greatest sum of log pi within it.

    Raises InputError where no pattern is so cheap, with the least that one is.
    """
    usual = costs.pattern(interleaved(len(pi)))
    scores = np.log(np.maximum(pi, np.finfo(float).tiny))
    frontier = Frontier(scores, [costs.blocks[name] for name in operations])
    paths = [frontier.best(budget * usual - costs.overhead) for budget in budgets]
    if None in paths:
        least = math.ceil(1000 * (costs.overhead + frontier.cost[0]) / usual) / 1000
        raise InputError(
            f"no pattern is within a budget of {budgets[0]:g}: the cheapest costs {least:.3f} of the interleaved "
            "pattern's; give at least that"
        )
    return paths
