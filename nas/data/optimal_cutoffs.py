"""Optimal cutoffs of an adaptive softmax (Grave et al. 2017, arXiv 1609.04309, section 4.2), without torch.

N words, most frequent first, are divided into K clusters of consecutive words with the lowest total cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class LayerCost:
    """Training time of models.softmax.AdaptiveSoftmax per token in nanoseconds, forward and backward, on one thread.

    Every token computes the head, which has an entry per tail; the tokens of a tail are projected if div_value > 1. The
    four constants were measured on an Intel Xeon (Sapphire Rapids, 2.6 GHz). Only their ratios matter for the cutoffs.
    size and share, numbers or arrays of one shape: the words of a cluster, and their share of all counted words.
    """

    d_model: int = 128
    div_value: int = 1
    tokens: int = 1024  # in a batch
    per_multiply_add: float = 0.044  # of width * logits, in three matrix products
    per_logit: float = 0.87  # passes over the logits
    per_row: float = 30.0  # selecting a token's hidden state for a tail, and adding its gradient back
    per_product: float = 91_000.0  # per cluster and batch, independent of size

    def per_size(self, width: int) -> float:
        return self.per_multiply_add * width + self.per_logit

    def head(self, size: np.ndarray, clusters: int) -> np.ndarray:
        return (size + clusters - 1) * self.per_size(self.d_model) + self.per_product / self.tokens

    def tail(self, index: int, size: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Tail `index`, from 1. The form is share * (a * size + b) + c, as optimal_cutoffs() needs it."""
        width, products, projection = self.d_model, 1, 0.0
        if self.div_value > 1:
            width, products = max(1, self.d_model // self.div_value**index), 2  # as in AdaptiveSoftmax
            projection = self.d_model * width * self.per_multiply_add
        once = products * self.per_product / self.tokens
        return share * (size * self.per_size(width) + self.per_row + projection) + once


def optimal_cutoffs(counts: np.ndarray, clusters: int, cost: LayerCost) -> list[int]:
    """The K - 1 cutoffs with the lowest cost, increasing; any of them if several choices have this cost.

    counts [N]: occurrences of each word, descending. Raises ValueError if there are fewer than K words.

    Exact in O(K N log N). best[k, j], the lowest cost of the first j words in k clusters, is the minimum over i of
    best[k-1, i] + cost of words i to j. share * size satisfies the quadrangle inequality, so the best i never
    decreases with j (Yao 1980, "Efficient dynamic programming using quadrangle inequalities"). Therefore the best i of
    a middle j bounds those of both halves.
    """
    words = len(counts)
    if words < clusters:
        raise ValueError(f"{clusters} clusters need at least {clusters} words, got {words}")
    cumulative = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])  # [N + 1]
    total = cumulative[-1] or 1.0

    def tail_cost(index, i, j):
        return cost.tail(index, j - i, (cumulative[j] - cumulative[i]) / total)

    best, starts = cost.head(np.arange(words + 1), clusters), []
    for index in range(1, clusters):
        ends = np.array([words]) if index == clusters - 1 else np.arange(index + 1, words + 1)
        best, start = add_cluster(best, partial(tail_cost, index), index, ends)
        starts.append(start)
    cutoffs, end = [], words
    for start in reversed(starts):
        end = int(start[end])
        cutoffs.append(end)
    return cutoffs[::-1]


def add_cluster(best: np.ndarray, tail_cost: Callable, first: int, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each j in `ends`: the minimum of best[i] + tail_cost(i, j) over first <= i < j, and the first i with it.

    Both are [N + 1]; entries outside of `ends` are undefined. All intervals of one depth are computed at once.
    """
    least, start = np.full(len(best), np.inf), np.zeros(len(best), dtype=np.int64)
    # Intervals low <= index < high of `ends`, whose best i lies in left <= i <= right.
    low, high = np.array([0]), np.array([len(ends)])
    left, right = np.array([first]), np.array([len(best) - 1])
    while len(low):
        middle = (low + high) // 2
        j = ends[middle]
        counts = np.minimum(right, j - 1) - left + 1
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        i = np.arange(counts.sum()) + np.repeat(left - offsets, counts)
        values = best[i] + tail_cost(i, np.repeat(j, counts))
        minima = np.minimum.reduceat(values, offsets)
        hits = np.flatnonzero(values == np.repeat(minima, counts))
        at = i[hits[np.searchsorted(hits, offsets)]]
        least[j], start[j] = minima, at
        low, high = np.concatenate([low, middle + 1]), np.concatenate([middle, high])
        left, right = np.concatenate([left, at]), np.concatenate([at, right])
        nonempty = low < high
        low, high, left, right = low[nonempty], high[nonempty], left[nonempty], right[nonempty]
    return least, start


def total_cost(counts: np.ndarray, cutoffs: list[int], cost: LayerCost) -> float:
    """Cost of a layer with the given cutoffs, in ns per token. counts [N], descending."""
    (head, _), *tails = cluster_table(counts, cutoffs)
    costs = (cost.tail(index, *tail) for index, tail in enumerate(tails, start=1))
    return float(sum(costs, start=cost.head(head, 1 + len(tails))))


def cluster_table(counts: np.ndarray, cutoffs: list[int]) -> list[tuple[int, float]]:
    """(words, share of all counted words) of each cluster, head first. counts [N], descending."""
    total = counts.sum(dtype=np.float64) or 1.0
    cluster_bounds = pairwise([0, *cutoffs, len(counts)])
    return [(high - low, counts[low:high].sum(dtype=np.float64) / total) for low, high in cluster_bounds]
