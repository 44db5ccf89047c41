"""The patterns within a cost, as a lattice.

N blocks, O candidate operations, K samples. The nodes of level n are the sums of cost that n blocks can have; an edge
adds the operation of the next block.
"""

import math

import numpy as np


class PatternLattice:
    """The patterns whose summed cost is at most a limit.

    Each operation of each block has a score; the score of a pattern is the sum over its blocks. With logits as scores,
    the patterns have the probability that pi = softmax(logits) gives them under the condition that they are within the
    limit.

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
        """For each level, what `combine` makes of the scores of all ways from a node to the last level.

        scores [N, O]; combine: np.max or np.logaddexp.reduce. Each array [nodes + 1] ends with -inf, for no edge.
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
