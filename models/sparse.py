"""Sparse attention at a cost of n * sqrt(n): strided and fixed (Child et al. 2019, arXiv 1904.10509, section 4).

Both see the stream as rows of l = `stride` positions. A query attends to two sets of positions, none in its future:

- strided: the previous l positions and itself, and its own column (every l-th position before);
- fixed: its own row, and the last c = `summary` columns of every row.

`merged` attends to their union by one softmax. With `heads`, the first half of the heads attends to the first set, the
second half to the second; a set may be empty (fixed, in the first row), and a head that sees nothing adds nothing.
Positions count on through the memory, so that a stream cut into segments has the sets of one uncut.

With rows as a dimension of its own, each set is dense attention within small groups, and attend() does all the work:
at no point is there an [L, K] matrix. Shape letters as in models/attention.py, and R rows of queries, S rows of keys,
of which the last R are the queries'; G groups of Q queries and N keys.
"""

from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.attention import MASKED, Positions, RelativeAttention, attend, join_heads, split_heads

FACTORIZATIONS = ("merged", "heads")
DENSE_UP_TO = 256  # keys up to which dense attention under the mask is faster: experiments/bench/sparse.py --border


# --- the sets, each as groups


@dataclass(frozen=True)
class OwnRow:
    """Each row's queries see their row: groups are the rows."""

    stride: int  # l
    rows_before = 0  # that a row's queries see
    step = 1  # by which keys move on from one query of a group to the next
    own_positions = False  # whether groups differ in the distances between their queries and keys

    def __post_init__(self):
        if self.stride < 1:
            raise ValueError(f"stride={self.stride} must be at least 1")

    def contains(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query's set has a key, by their places, which are counted from the start of some row."""
        return query // self.stride == key // self.stride

    def queries(self, rows: Tensor) -> Tensor:
        """[..., R, l, E] -> [..., G, Q, E]"""
        return rows

    def keys(self, rows: Tensor, query_rows: int) -> Tensor:
        """[..., S, l, E] -> [..., G, N, E], or [..., 1, N, E] where all groups have the same"""
        return rows[..., -query_rows:, :, :]

    def rows(self, groups: Tensor) -> Tensor:
        """[..., G, Q, E] -> [..., R, l, E]"""
        return groups


@dataclass(frozen=True)
class Previous(OwnRow):
    """Each query sees itself and the `stride` positions before: so groups are rows with the row before."""

    rows_before = 1

    def contains(self, query, key):
        return query - key <= self.stride

    def keys(self, rows, query_rows):
        return torch.cat([rows[..., -query_rows - 1 : -1, :, :], rows[..., -query_rows:, :, :]], dim=-2)


@dataclass(frozen=True)
class OwnColumn(OwnRow):
    """Each column's queries see their column: groups are the columns."""

    def contains(self, query, key):
        return (query - key) % self.stride == 0

    def queries(self, rows):
        return rows.transpose(-3, -2)

    def keys(self, rows, query_rows):
        return rows.transpose(-3, -2)

    def rows(self, groups):
        return groups.transpose(-3, -2)


@dataclass(frozen=True)
class Summaries(OwnColumn):
    """All queries see the last columns of every row. Groups are the columns of queries: within one, keys move on by
    the summary's width from one query to the next."""

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

    def keys(self, rows, query_rows):
        return rows[..., -self.summary :, :].flatten(-3, -2).unsqueeze(-3)


# --- the sets of a context


class Layout(NamedTuple):
    """How a context [B, K, D] lies in `rows` of `stride`: `before` positions of padding stand in front of it, `after`
    behind it. The last `query_rows` hold the queries, the first of them at column `first`."""

    stride: int
    before: int
    after: int
    rows: int
    query_rows: int
    first: int


def lay_out(keys: int, length: int, start: int, stride: int, rows_before: int) -> Layout:
    """Rows that begin where the stream's do; start: positions of the stream before the segment's `length`."""
    before = (start + length - keys) % stride
    if before + keys - length < rows_before * stride:
        before += stride * rows_before
    rows = -(-(before + keys) // stride)
    first_row, first = divmod(before + keys - length, stride)
    return Layout(stride, before, rows * stride - before - keys, rows, rows - first_row, first)


def additive(allowed: Tensor, dtype, device) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, MASKED).to(device)


@lru_cache(maxsize=16)
def geometry(part: OwnRow, without: OwnRow | None, layout: Layout, dtype, device) -> tuple[Tensor, Tensor]:
    """Of a set's groups: the mask [G, Q, N], additive, and the distances of the keys from each group's last query
    [G or 1, N]. Where `without` is given, its keys are left out. Cached: not to be changed."""
    places = torch.arange(layout.rows * layout.stride).view(layout.rows, layout.stride, 1)
    query = part.queries(places[-layout.query_rows :])  # [G, Q, 1]
    key = part.keys(places, layout.query_rows).transpose(-2, -1)  # [G or 1, 1, N]
    allowed = part.contains(query, key) & (key <= query) & (key >= layout.before)
    if without is not None:
        allowed &= ~without.contains(query, key)
    distance = (query[:, -1:] - key)[: None if part.own_positions else 1, 0]
    return additive(allowed, dtype, device), distance.to(device)


@lru_cache(maxsize=64)  # small, and as many as there are places of a row at which segments begin
def dense_mask(sets: tuple, keys: int, length: int, place: int, dtype, device) -> Tensor:
    """The masks [len(sets), L, K] of a context that begins at some place of its row; each of sets is a tuple of those
    to unite. Cached: not to be changed."""
    places = torch.arange(place, place + keys)
    query, key = places[-length:, None], places[None]
    allowed = [reduce(or_, [part.contains(query, key) for part in union]) & (key <= query) for union in sets]
    return additive(torch.stack(allowed), dtype, device)


class SparseAttention(RelativeAttention):
    """Attention to two sets of positions; strided or fixed by `near` and `far`, the sets.

    Raises ValueError where the factorization or the heads do not fit.
    """

    def __init__(self, d_model, heads, near: OwnRow, far: OwnRow, factorization: str = "merged", relative: bool = True):
        super().__init__(d_model, heads, relative)
        if factorization not in FACTORIZATIONS:
            raise ValueError(f"factorization={factorization!r} must be one of {', '.join(FACTORIZATIONS)}")
        if factorization == "heads" and heads % 2:
            raise ValueError(f"heads={heads} must be even: with factorization=heads each half has its own set")
        self.near, self.far, self.merged = near, far, factorization == "merged"

    def forward(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """context [B, K, D] is memory and segment, of which the last `length` positions ask. Returns [B, L, D]."""
        if context.shape[1] > DENSE_UP_TO:
            return self.output(self.by_rows(context, length, positions))
        return self.output(self.masked(context, length, positions))

    def masked(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """Dense attention under the mask: where there are few keys."""
        keys, stride = context.shape[1], self.near.stride
        sets = ((self.near, self.far),) if self.merged else ((self.near,), (self.far,))
        place = (positions.start + length - keys) % stride
        masks = dense_mask(sets, keys, length, place, context.dtype, context.device)
        mask = masks.repeat_interleave(self.heads // len(sets), dim=0)[:, None]  # [H, 1, L, K]
        mixed = self.dense(context, length, positions, mask)
        return join_heads(mixed if self.merged else mixed * (mask == 0).any(dim=-1, keepdim=True))

    def by_rows(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """Group by group: where there are many keys."""
        layout = lay_out(context.shape[1], length, positions.start, self.near.stride, self.near.rows_before)
        if layout.before or layout.after:
            context = F.pad(context, (0, 0, layout.before, layout.after))
        asking = context[:, -layout.query_rows * layout.stride :]
        (query,) = split_heads(self.query(asking), self.heads).unflatten(3, (-1, layout.stride))  # [H, B, R, l, E]
        key_value = split_heads(self.key_value(context), self.heads, 2).unflatten(3, (-1, layout.stride))

        inputs = query, key_value, positions, layout
        if self.merged:
            near, near_mass = self.attend_to(self.near, slice(None), *inputs)
            far, far_mass = self.attend_to(self.far, slice(None), *inputs, without=self.near)
            mixed = torch.lerp(far, near, torch.sigmoid(near_mass - far_mass))
        else:
            half = self.heads // 2
            near, _ = self.attend_to(self.near, slice(half), *inputs)
            far, far_mass = self.attend_to(self.far, slice(half, None), *inputs)
            mixed = torch.cat([near, far * (far_mass > MASKED / 2)])
        return join_heads(mixed.flatten(2, 3)[:, :, layout.first : layout.first + length])

    def attend_to(
        self,
        part: OwnRow,
        heads: slice,
        query: Tensor,
        key_value: Tensor,
        positions: Positions,
        layout: Layout,
        without: OwnRow | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Some heads' attention to one set, less another: query [H, B, R, l, E], key_value [2, H, B, S, l, E] of all
        heads -> of those some, mixed values [.., B, R, l, E] and their masses [.., B, R, l, 1]."""
        mask, distance = geometry(part, without, layout, query.dtype, query.device)
        query = part.queries(query[heads])  # [H, B, G, Q, E]
        key_value = part.keys(key_value[:, heads], layout.query_rows)  # [2, H, B, G or 1, N, E]
        position, content_bias, position_bias = None, None, None
        if self.position is not None:
            last = len(positions.encodings) - 1  # beyond the table, and before it, lies only what is masked
            position = self.project(positions, (last - distance).clamp(0, last))[heads]  # [H, G or 1, N, E]
            content_bias, position_bias = self.content_bias[heads, None], self.position_bias[heads, None]
        if part.own_positions:  # groups are to attend() what heads are: [H, G, B, Q, E]
            query, groups = query.movedim(2, 1), query.shape[2]
            key_value = key_value.movedim(3, 2).expand(-1, -1, groups, -1, -1, -1)
            mask = mask[:, None]
            if position is not None:
                content_bias, position_bias = (bias.expand(-1, groups, -1) for bias in (content_bias, position_bias))
        else:  # and else what the batch is: [H, 1, B, G, Q, E]
            query, key_value = query[:, None], key_value[:, :, None]
        results = attend(query, key_value, position, content_bias, position_bias, mask, part.step, with_mass=True)
        mixed, mass = (part.rows(x.movedim(1, 2) if part.own_positions else x[:, 0]) for x in results)
        return mixed, mass


def count_flops(
    near: OwnRow, far: OwnRow, merged: bool, relative: bool, d_model: int, batch: int, segment: int, memory: int
) -> float:
    """Floating-point operations of a forward pass of SparseAttention, per token of the segment, in matrix products, as
    computed (with masked scores); `memory` positions of the stream come before the segment."""
    layout = lay_out(memory + segment, segment, memory, near.stride, near.rows_before)
    square, table = 2 * d_model**2, memory + segment
    queries, keys = layout.query_rows * layout.stride, layout.rows * layout.stride
    total = square * (segment + queries + 2 * keys)
    rows = torch.empty(layout.rows, layout.stride, 1, device="meta")  # its shapes alone are needed
    for part in (near, far):
        group_keys = part.keys(rows, layout.query_rows).shape[-2]
        if relative:  # projected once a batch
            total += square * min(group_keys * (layout.stride if part.own_positions else 1), table) / batch
        total += (3 if relative else 2) * 2 * d_model * queries * group_keys * (1 if merged else 0.5)
    return total / segment
