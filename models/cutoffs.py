"""models.cutoffs."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np


class Cost(Protocol):
    """What clusters cost. Arrays of one shape in, an array of that shape out; `share` is of all counted words."""

    def head(self, size: np.ndarray, share: np.ndarray, clusters: int) -> np.ndarray: ...

    def tail(self, index: int, size: np.ndarray, share: np.ndarray) -> np.ndarray:
        """Cluster `index`, from 1. Must be of the form share * (a * size + b) + c, a >= 0, with a, b and c its own."""


@dataclass(frozen=True)
class PlainCost:
    """Size times share for every cluster, the head too: logits per token, were each token only in its own cluster."""

    unit = "logits per token"

    def head(self, size, share, clusters):
        return size * share

    def tail(self, index, size, share):
        return size * share


@dataclass(frozen=True)
class LayerCost:
    """Nanoseconds per token that models.softmax.AdaptiveSoftmax trains for, forward and backward, on one thread.

    Every token computes the head, which has an entry per tail; the tokens of a tail are picked, projected where
    div_value > 1, and computed. The four constants are those of an Intel Xeon (Sapphire Rapids, 2.6 GHz) as
    `python -m nas.cutoffs --cost layer --measure` found them; only their ratios matter for the cutoffs.
    """

    d_model: int = 128
    div_value: int = 1
    tokens: int = 1024  # in a batch
    per_multiply_add: float = 0.044  # of width * logits: three products
    per_logit: float = 0.87  # of the passes over the logits
    per_row: float = 30.0  # to pick a token's hidden state for a tail, and to add its gradient back
    per_product: float = 91_000.0  # of each cluster in each batch, whatever its size

    unit = "ns per token"

    def per_size(self, width: int) -> float:
        return self.per_multiply_add * width + self.per_logit

    def head(self, size, share, clusters):
        return (size + clusters - 1) * self.per_size(self.d_model) + self.per_product / self.tokens

    def tail(self, index, size, share):
        width, products, projection = self.d_model, 1, 0.0
        if self.div_value > 1:
            width, products = max(1, self.d_model // self.div_value**index), 2  # as in AdaptiveSoftmax
            projection = self.d_model * width * self.per_multiply_add
        once = products * self.per_product / self.tokens
        return share * (size * self.per_size(width) + self.per_row + projection) + once


def optimal_cutoffs(counts: np.ndarray, clusters: int, cost: Cost) -> list[int]:
    """The K - 1 borders between the clusters, increasing; of several that cost the same, one.

    counts [N]: how often each word occurs, descending. Raises ValueError below K words.

    Exact in O(K N log N): best[k, j], the least cost of the first j words in k clusters, is the minimum over i of
    best[k-1, i] + cost of words i to j. share * size satisfies the quadrangle inequality, so the best i never
    decreases with j (Yao 1980, "Efficient dynamic programming using quadrangle inequalities"), and the i of a middle
    j bounds those of both halves.
    """
    words = len(counts)
    if words < clusters:
        raise ValueError(f"{clusters} clusters need as many words, got {words}")
    upto = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
    total = upto[-1] or 1.0
    sizes = np.arange(words + 1, dtype=np.float64)

    best, chosen = cost.head(sizes, upto / total, clusters), []
    for index in range(1, clusters):

        def tail(i, j, index=index):
            return cost.tail(index, sizes[j] - sizes[i], (upto[j] - upto[i]) / total)

        ends = np.array([words]) if index == clusters - 1 else np.arange(index + 1, words + 1)
        best, start = next_cluster(best, tail, index, ends)
        chosen.append(start)
    cutoffs, end = [], words
    for start in reversed(chosen):
        end = int(start[end])
        cutoffs.append(end)
    return cutoffs[::-1]


def next_cluster(best: np.ndarray, tail, first: int, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each j of `ends`, the least best[i] + tail(i, j) over first <= i < j, and the first i that gives it.

    Both come as [N + 1] arrays, of which the other entries mean nothing. The halves of all intervals of one depth are
    handled in one go, as arrays.
    """
    least, start = np.full(len(best), np.inf), np.zeros(len(best), dtype=np.int64)
    # Intervals of `ends`, from `low` up to but without `high`, whose i lies between `left` and `right`.
    low, high = np.array([0]), np.array([len(ends)])
    left, right = np.array([first]), np.array([len(best) - 1])
    while len(low):
        middle = (low + high) // 2
        j = ends[middle]
        counts = np.minimum(right, j - 1) - left + 1
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        i = np.arange(counts.sum()) + np.repeat(left - offsets, counts)
        values = best[i] + tail(i, np.repeat(j, counts))
        minima = np.minimum.reduceat(values, offsets)
        hits = np.flatnonzero(values == np.repeat(minima, counts))
        at = i[hits[np.searchsorted(hits, offsets)]]
        least[j], start[j] = minima, at
        low, high = np.concatenate([low, middle + 1]), np.concatenate([middle, high])
        left, right = np.concatenate([left, at]), np.concatenate([at, right])
        cache_tensors = low < high
        low, high, left, right = low[cache_tensors], high[cache_tensors], left[cache_tensors], right[cache_tensors]
    return least, start


def total_cost(counts: np.ndarray, cutoffs: list[int], cost: Cost) -> float:
    """What a layer with these cutoffs costs, in the model's unit. counts [N], descending."""
    (head, share), *tails = cluster_table(counts, cutoffs)
    result = cost.head(np.float64(head), share, 1 + len(tails))
    for index, (size, share) in enumerate(tails, start=1):
        result += cost.tail(index, np.float64(size), share)
    return float(result)


def cluster_table(counts: np.ndarray, cutoffs: list[int]) -> list[tuple[int, float]]:
    """(words, share of all counted) of each cluster, head first. counts [N], descending."""
    total = counts.sum(dtype=np.float64) or 1.0
    cluster_bounds = pairwise([0, *cutoffs, len(counts)])
    return [(high - low, counts[low:high].sum(dtype=np.float64) / total) for low, high in cluster_bounds]
