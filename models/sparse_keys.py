"""Key sets of sparse attention (Child et al. 2019, arXiv 1904.10509, section 4.3).

Shape letters as in models/sparse.py: rows of l positions, R rows of queries, S rows of keys, G groups of Q queries and
N keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SUMMARY = 4  # c, at most l


@dataclass(frozen=True)
class KeySet:
    """The keys that a query attends to, and groups of queries and keys within which attention is dense.

    Groups act as part of the batch in attend(): [H, B, G, ..]. If groups differ in the distances between their queries
    and keys (own_positions), they act as part of the heads: [H, G, B, ..].
    step: number of keys between neighbouring queries of a group, see relative_shift() in models/attention.py.
    """

    stride: int  # l
    own_positions = False
    step = 1

    def __post_init__(self):
        if self.stride < 1:
            raise ValueError(f"stride={self.stride} must be at least 1")

    def contains(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query attends to a key that is not in its future.

        Both are given by their places, counted from the start of a row.
        """
        raise NotImplementedError

    def queries(self, rows: Tensor) -> Tensor:
        """[H, B, R, l, E] -> [H, B, G, Q, E], or [H, G, B, Q, E] with own_positions"""
        return rows

    def keys(self, rows: Tensor, query_rows: int) -> Tensor:
        """[.., H, B, S, l, E] -> [.., H, B, G, N, E], or [.., H, G, B, N, E] with own_positions"""
        raise NotImplementedError

    def ungroup(self, groups: Tensor) -> Tensor:
        """The inverse of queries()."""
        return groups


class LocalBlock(KeySet):
    """The query's row. Each group is one row."""

    def contains(self, query, key):
        return query // self.stride == key // self.stride

    def keys(self, rows, query_rows):
        return rows[..., -query_rows:, :, :]


class LocalWindow(KeySet):
    """The query and the l positions before it. A group has one row of queries. Its keys add the previous row."""

    def contains(self, query, key):
        return query - key <= self.stride

    def keys(self, rows, query_rows):
        return torch.cat([rows[..., -query_rows - 1 : -1, :, :], rows[..., -query_rows:, :, :]], dim=-2)


class StridedColumn(KeySet):
    """The query and every l-th position before it. Each group is one column."""

    def contains(self, query, key):
        return (query - key) % self.stride == 0

    def queries(self, rows):
        return rows.transpose(-3, -2)

    def keys(self, rows, query_rows):
        return rows.transpose(-3, -2)

    def ungroup(self, groups):
        return groups.transpose(-3, -2)


class SummaryColumns(KeySet):
    """The last c columns of every row. Each group is one column of queries; all groups have the same keys."""

    own_positions = True

    @property
    def step(self):
        return min(SUMMARY, self.stride)

    def contains(self, query, key):
        return key % self.stride >= self.stride - self.step

    def queries(self, rows):
        return rows.movedim(-2, -4)

    def keys(self, rows, query_rows):
        keys = rows[..., -self.step :, :].flatten(-3, -2).unsqueeze(-4)  # [.., H, 1, B, N, E]
        return keys.expand(*keys.shape[:-4], self.stride, *keys.shape[-3:])  # [.., H, l, B, N, E]

    def ungroup(self, groups):
        return groups.movedim(-4, -2)
