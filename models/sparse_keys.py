"""models.sparse_keys."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeySet:
    """Which keys a query sees, and how queries and keys lie in groups among which that is dense attention.

    Groups are to attend() part of the batch, [H, B, G, ..]; or, where they differ in the distances between their
    queries and keys (own_positions), part of the heads, [H, G, B, ..]. step: by how many keys a query's own place moves
    on from one query of a group to the next.
    """

    stride: int  # l
    own_positions = False
    step = 1

    def __post_init__(self):
        if self.stride < 1:
            raise ValueError(f"stride={self.stride} must be at least 1")

    def contains(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query sees a key that is not in its future, by their places, counted from the start of a row."""
        raise NotImplementedError

    def queries(self, rows: Tensor) -> Tensor:
        """[H, B, R, l, E] -> [H, B, G, Q, E], or [H, G, B, Q, E] with own_positions"""
        return rows

    def keys(self, rows: Tensor, query_rows: int) -> Tensor:
        """[.., H, B, S, l, E] -> [.., H, B, G, N, E], or [.., H, G, B, N, E] with own_positions"""
        raise NotImplementedError

    def ungroup(self, groups: Tensor) -> Tensor:
        """What queries() does, backwards."""
        return groups


class LocalBlock(KeySet):
    """The query's row. Groups are rows."""

    def contains(self, query, key):
        return query // self.stride == key // self.stride

    def keys(self, rows, query_rows):
        return rows[..., -query_rows:, :, :]


class LocalWindow(KeySet):
    """The query itself and the l positions before it. Groups are rows, whose keys are theirs and the row's before."""

    def contains(self, query, key):
        return query - key <= self.stride

    def keys(self, rows, query_rows):
        return torch.cat([rows[..., -query_rows - 1 : -1, :, :], rows[..., -query_rows:, :, :]], dim=-2)


class StridedColumn(KeySet):
    """Every l-th position before the query, and itself. Groups are columns."""

    def contains(self, query, key):
        return (query - key) % self.stride == 0

    def queries(self, rows):
        return rows.transpose(-3, -2)

    def keys(self, rows, query_rows):
        return rows.transpose(-3, -2)

    def ungroup(self, groups):
        return groups.transpose(-3, -2)


@dataclass(frozen=True)
class SummaryColumns(KeySet):
    """The last c columns of every row. Groups are the columns of queries, which all have the same keys."""

    summary: int  # c
    own_positions = True

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.summary <= self.stride:
            raise ValueError(f"summary={self.summary} must be from 1 to stride={self.stride}")

    @property
    def step(self):
        return self.summary

    def contains(self, query, key):
        return key % self.stride >= self.stride - self.summary

    def queries(self, rows):
        return rows.movedim(-2, -4)

    def keys(self, rows, query_rows):
        keys = rows[..., -self.summary :, :].flatten(-3, -2).unsqueeze(-4)  # [.., H, 1, B, N, E]
        return keys.expand(*keys.shape[:-4], self.stride, *keys.shape[-3:])

    def ungroup(self, groups):
        return groups.movedim(-4, -2)


def strided(stride: int) -> tuple[KeySet, KeySet]:
    """The two sets of strided attention. Raises ValueError where the stride does not fit."""
    return LocalWindow(stride), StridedColumn(stride)


def fixed(stride: int, summary: int) -> tuple[KeySet, KeySet]:
    """The two sets of fixed attention. Raises ValueError where the stride or the summary does not fit."""
    return LocalBlock(stride), SummaryColumns(stride, summary)
