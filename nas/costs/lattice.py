"""The patterns within a cost, as a lattice.

N blocks, O candidate operations, K samples. The nodes of level n are the sums of cost that n blocks can have; an edge
adds the operation of the next block. One pass over the lattice gives the best pattern, or sums over all patterns.
"""

import math
from collections.abc import Sequence

import numpy as np

COUNT = 2**52  # added to the cost of each limited operation, so that sum // COUNT is the number of their blocks


class PatternLattice:
    """The patterns whose summed cost is within limits. The number of blocks of some operations may be limited, too.

    Each operation of each block has a score; the score of a pattern is the sum over its blocks. With logits as scores,
    the patterns have the probability that pi = softmax(logits) gives them under the condition that they are within the
    limits.

    Costs are rounded to multiples of 2^-40 of the largest. Their sums are then exact, so patterns that have each
    operation equally often meet in one node. Patterns may exceed a limit of cost by 1e-9 of the largest cost.
    """

    def __init__(
        self,
        costs: list[float],
        blocks: int,
        limit: float,
        least: float = 0.0,
        limited: Sequence[int] = (),
        most: int = 0,
    ):
        """Raises ValueError if no pattern is within the limits.

        Args:
            costs: of each operation [O], in any block.
            limit: the highest sum of costs; least: the lowest.
            limited: indices of operations that together fill at most `most` blocks.
        """
        unit = max(costs) / 2**40 or 1.0  # 1 if all operations are free
        added = np.rint(np.array(costs) / unit).astype(np.int64)  # [O]
        slack = 2**10 if added.any() else 0  # 1e-9 of the largest cost, because the limits may be rounded
        highest = min(math.floor(limit / unit), blocks * int(added.max())) + slack
        added += COUNT * np.isin(np.arange(len(added)), limited)
        sums, self.edges = np.zeros(1, dtype=np.int64), []
        for _ in range(blocks):
            reached = sums[:, None] + added  # [nodes, O]
            kept = (reached % COUNT <= highest) & (reached // COUNT <= most)
            sums, nodes = np.unique(reached[kept], return_inverse=True)
            edges = np.full(reached.shape, len(sums))  # len(sums): no edge
            edges[kept] = nodes.ravel()
            self.edges.append(edges)
        self.keep_ways_to(sums % COUNT >= math.ceil(least / unit) - slack)
        if not self.level_sizes[-1]:
            raise ValueError(f"no pattern of {blocks} blocks is within the limits")

    def keep_ways_to(self, kept: np.ndarray) -> None:
        """Remove all nodes but those from which a way leads to the given nodes of the last level, a mask [nodes]."""
        self.level_sizes = []
        for level in reversed(range(len(self.edges))):
            self.level_sizes.insert(0, int(kept.sum()))
            numbers = np.full(len(kept) + 1, self.level_sizes[0])  # the last one: no edge
            numbers[:-1][kept] = np.arange(self.level_sizes[0])
            edges = numbers[self.edges[level]]
            kept = (edges < self.level_sizes[0]).any(axis=1)
            self.edges[level] = edges[kept]

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

    def sample(self, logits: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Patterns [K, N] drawn from pi within the limit. noise [K, N, O]: standard Gumbel noise."""
        nodes, paths = np.zeros(len(noise), dtype=np.int64), []
        for row, edges, block_noise in zip(self.conditional(logits), self.edges, noise.swapaxes(0, 1), strict=True):
            paths.append(np.argmax(row[nodes] + block_noise, axis=1))  # arXiv 1611.01144, equation 1
            nodes = edges[nodes, paths[-1]]
        return np.stack(paths, axis=1)

    def marginals(self, logits: np.ndarray) -> np.ndarray:
        """Probability [N, O] of each operation in each block, of patterns drawn from pi within the limit."""
        reached, result = np.ones(1), []
        for row, edges, size in zip(self.conditional(logits), self.edges, self.level_sizes, strict=True):
            joint = reached[:, None] * np.exp(row)  # [nodes, O]
            result.append(joint.sum(axis=0))
            reached = np.bincount(edges.ravel(), joint.ravel(), minlength=size)[:size]
        return np.stack(result)
