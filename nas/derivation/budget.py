"""The pattern with the highest probability within a cost budget, by dynamic programming.

N blocks, O candidate operations.
"""

import math

import numpy as np

from nas.core.errors import InputError
from nas.core.pattern import interleaved
from nas.costs.cost_table import CostTable


class ParetoFront:
    """The Pareto-optimal patterns, with the highest sum of scores for every cost, by dynamic programming over blocks.

    scores [N, O]; costs [O] of an operation in any block. The result is exact: a partial pattern is dropped only if
    another has at most its cost and at least its score. Costs are rounded to multiples of 2^-40 of the largest. Their
    sums are then exact, and there are never more partial patterns than multisets of operations.
    """

    def __init__(self, scores: np.ndarray, costs: list[float]):
        self.unit = max(costs) / 2**40
        units = np.rint(np.array(costs) / (self.unit or 1.0)).astype(np.int64)
        cost, score, self.choices = np.zeros(1, dtype=np.int64), np.zeros(1), []
        for row in scores:
            new_cost, new_score = (cost[:, None] + units).ravel(), (score[:, None] + row).ravel()
            order = np.lexsort((-new_score, new_cost))
            best_before = np.concatenate([[-np.inf], np.maximum.accumulate(new_score[order])[:-1]])
            kept = order[new_score[order] > best_before]
            self.choices.append(np.divmod(kept, len(costs)))  # (index of the previous partial pattern, operation)
            cost, score = new_cost[kept], new_score[kept]
        self.cost = cost * self.unit

    def best(self, budget: float) -> list[int] | None:
        """The operation of each block in the pattern with the highest score that costs at most `budget`.

        Costs may exceed the budget by 1e-9 of the most expensive operation. None if no pattern is cheap enough.
        """
        index = int(np.searchsorted(self.cost, budget + 2**10 * self.unit, side="right")) - 1
        if index < 0:
            return None
        path = []
        for previous, operations in reversed(self.choices):
            path.append(int(operations[index]))
            index = previous[index]
        return path[::-1]


def read_budgets(text: str) -> list[float]:
    """Parse `0.5,0.65,1` into increasing ratios to the interleaved pattern's cost. Raises
    InputError if one is invalid.
    """
    try:
        budgets = sorted({round(float(part), 4) for part in text.split(",")})  # rounded for file names
    except ValueError:
        budgets = []
    if not budgets or not all(0 < budget < math.inf for budget in budgets):
        raise InputError(f"{text!r} is not a budget: give ratios to the interleaved pattern's cost, such as 0.5,0.65,1")
    return budgets


def best_within(budgets: list[float], pi: np.ndarray, operations: list[str], costs: CostTable) -> list[list[int]]:
    """The path with the highest sum of log pi [N, O] within each budget, a ratio to the interleaved pattern's cost.

    Raises InputError, which names the lowest possible budget, if no pattern is cheap enough.
    """
    baseline = costs.cost(interleaved(len(pi)))
    scores = np.log(np.maximum(pi, np.finfo(float).tiny))
    front = ParetoFront(scores, [costs.blocks[name] for name in operations])
    paths = [front.best(budget * baseline - costs.overhead) for budget in budgets]
    if None in paths:
        least = math.ceil(1000 * (costs.overhead + front.cost[0]) / baseline) / 1000
        raise InputError(
            f"no pattern fits a budget of {budgets[0]:g}: the cheapest costs {least:.3f} of the interleaved pattern; "
            "give at least that"
        )
    return paths
