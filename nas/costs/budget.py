"""Budgets, and the patterns within one, as a lattice.

N blocks, O operations. The nodes of level n are the sums of cost that n blocks can have; an edge adds the next block.
"""

import math

import numpy as np

from nas.core.config import milliseconds
from nas.core.config_loading import MOST_BUDGET
from nas.core.errors import InputError
from nas.core.pattern import abbreviate, interleaved, kind_of
from nas.costs.cost_table import MILLISECONDS, CostTable, for_text, least_ratio


class PatternLattice:
    """The patterns whose summed cost is at most a limit.

    Each operation of each block has a score; the score of a pattern is the sum over its blocks. With logits as scores,
    patterns have the probability of pi = softmax(logits) under the condition that they are within the limit.

    Costs are rounded to multiples of 2^-40 of the largest. Their sums are then exact, so patterns that have each
    operation equally often meet in one node. Patterns may exceed the limit by 1e-9 of the largest cost.
    """

    def __init__(self, costs: list[float], blocks: int, limit: float):
        """costs: of each operation [O], in any block. Raises ValueError if no pattern is within the limit."""
        unit = max(costs) / 2**40 or 1.0  # 1 if all operations are free
        added = np.rint(np.array(costs) / unit).astype(np.int64)  # [O]
        slack = 2**10 if added.any() else 0  # 1e-9 of the largest cost, because the limit may be rounded
        highest = min(math.floor(limit / unit), blocks * int(added.max())) + slack
        if blocks * added.min() > highest:
            raise ValueError(f"no pattern of {blocks} blocks is within the limit")
        sums, self.edges, self.level_sizes = np.zeros(1, dtype=np.int64), [], []
        for following in reversed(range(blocks)):
            reached = sums[:, None] + added  # [nodes, O]
            kept = reached + following * added.min() <= highest  # the blocks that follow must fit too
            sums, nodes = np.unique(reached[kept], return_inverse=True)
            edges = np.full(reached.shape, len(sums))  # len(sums): no edge
            edges[kept] = nodes.ravel()
            self.edges.append(edges)
            self.level_sizes.append(len(sums))

    def completions(self, scores: np.ndarray, combine) -> list[np.ndarray]:
        """What `combine` (np.max or np.logaddexp.reduce) makes of the scores [N, O] of all ways from a node to the end.

        Returns an array [nodes + 1] for each level, which ends with -inf, for no edge.
        """
        values = [np.append(np.zeros(self.level_sizes[-1]), -np.inf)]
        for row, edges in zip(scores[::-1], reversed(self.edges), strict=True):
            values.append(np.append(combine(row + values[-1][edges], axis=1), -np.inf))
        return values[::-1]

    def best(self, scores: np.ndarray) -> list[int]:
        """The operation of each block in the pattern with the highest score."""
        values, node, path = self.completions(scores, np.max), 0, []
        for row, edges, following in zip(scores, self.edges, values[1:], strict=True):
            path.append(int(np.argmax(row + following[edges[node]])))
            node = edges[node, path[-1]]
        return path

    def conditional(self, logits: np.ndarray) -> list[np.ndarray]:
        """For each block, the log probability of each operation at each node [nodes, O]."""
        totals = self.completions(logits, np.logaddexp.reduce)
        return [
            row + following[edges] - own[:-1, None]
            for row, edges, own, following in zip(logits, self.edges, totals[:-1], totals[1:], strict=True)
        ]

    def marginals(self, logits: np.ndarray) -> np.ndarray:
        """Probability [N, O] of each operation in each block, of patterns drawn from pi within the limit."""
        reached, result = np.ones(1), []
        for row, edges, size in zip(self.conditional(logits), self.edges, self.level_sizes, strict=True):
            joint = reached[:, None] * np.exp(row)  # [nodes, O]
            result.append(joint.sum(axis=0))
            reached = np.bincount(edges.ravel(), joint.ravel(), minlength=size)[:size]
        return np.stack(result)


def read_budgets(text: str) -> list[float | str]:
    """Parse `0.5,0.65,2.5ms` into increasing ratios to the reference's cost, and times. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    times = {time for part in parts if (time := milliseconds(part))}
    try:  # rounded for file names
        ratios = {round(float(part), 4) for part in parts if not milliseconds(part)}
    except ValueError:
        ratios = {0.0}
    if not all(0 < ratio <= MOST_BUDGET for ratio in ratios):
        raise InputError(
            f"{text!r} is not a budget: give ratios to the reference's cost, such as 0.65 or 0.5,0.65,1, of at most "
            f"{MOST_BUDGET}, or milliseconds for 1,000 bytes of text, such as 2.5ms"
        )
    return [*sorted(ratios), *(f"{time:g}ms" for time in sorted(times))]


def as_ratio(budget: float | str, costs: CostTable, blocks: int) -> float:
    """A budget, also such as 2.5ms, as a ratio to the reference's cost. Raises InputError if costs are in FLOPs."""
    time = milliseconds(budget)
    if time is None:
        return budget
    if costs.unit != MILLISECONDS:
        raise InputError(f"a budget of {budget} needs measured costs: give a ratio, or search.latency.source=measured")
    return time / costs.reference(blocks)


def patterns_within(budget: float, blocks: int, operations: list[str], costs: CostTable) -> PatternLattice:
    """The patterns of at most a ratio to the reference's cost. Raises InputError, with the lowest ratio, if none."""
    limit = budget * costs.reference(blocks) - costs.overhead
    try:
        return PatternLattice([costs.blocks[name] for name in operations], blocks, limit)
    except ValueError:
        cheapest = costs.cheapest(operations, blocks)
        raise InputError(
            f"no pattern fits a budget of {budget:.4g}: the cheapest costs {least_ratio(costs.ratio(cheapest))} of the "
            "reference; give at least that"
        ) from None


def likeliest_pattern(pi: np.ndarray, operations: list[str], costs: CostTable, budget: float | None) -> list[str]:
    """The likeliest pattern under pi [N, O], of all or within a budget. Raises InputError if none is within it."""
    lattice = None if budget is None else patterns_within(budget, len(pi), operations, costs)
    path = lattice.best(log_pi(pi)) if lattice else pi.argmax(axis=1)
    return [operations[index] for index in path]


def log_pi(pi: np.ndarray) -> np.ndarray:
    """The logarithm of pi, finite where pi is 0."""
    return np.log(np.maximum(pi, np.finfo(float).tiny))


def describe_budget(budget: float, blocks: int, operations: list[str], costs: CostTable) -> list[str]:
    """Sentences on what a budget leaves for the blocks. Raises InputError if fewer than two patterns are within it."""
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
