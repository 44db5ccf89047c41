"""Sparse attention at a cost of n * sqrt(n): strided and fixed (Child et al. 2019, arXiv 1904.10509, section 4.3).

Both see the stream as rows of l = `stride` positions. A query attends to two sets of keys, none in its future:

- strided: the previous l positions and itself, and its own column (every l-th position before);
- fixed: its own row, and the last c = `summary` columns of every row.

`merged` attends to their union by one softmax. With `heads`, the first half of the heads attends to the first set, the
second half to the second (section 5.1); a set may be empty (fixed, in the first row), and a head that sees nothing adds
nothing. That paper's third way, the sets in turn from block to block, is what a pattern of two operations does.
Positions count on through the memory, so that a stream cut into segments has the sets of one uncut.

With rows as a dimension of its own, each set is dense attention within small groups, and attend() does all the work:
at no point is there an [L, K] matrix. Shape letters as in models/attention.py, and R rows of queries, S rows of keys,
of which the last R are the queries'; G groups of Q queries and N keys.
"""

from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models import attention
from models.attention import MASKED, Positions, RelativeAttention, attend, cache_tensors, join_heads, split_heads
from models.sparse_keys import KeySet

FACTORIZATIONS = ("merged", "heads")


DENSE_UP_TO = 256  # keys up to which dense attention under the mask is faster: experiments/bench/sparse.py --border


class Layout(NamedTuple):
    """How a context [B, K, D] lies in `rows` of `stride`: `before` positions of padding stand in front of it, `after`
    behind it. The last `query_rows` hold the queries, the first of them at column `first`."""

    stride: int
    before: int
    after: int
    rows: int
    query_rows: int
    first: int


def lay_out(keys: int, length: int, start: int, stride: int) -> Layout:
    """Rows that begin where the stream's do, with at least one before the queries', which Previous needs; start: the
    positions of the stream before the segment's `length`."""
    before = (start + length - keys) % stride
    if before + keys - length < stride:
        before += stride
    rows = -(-(before + keys) // stride)
    first_row, first = divmod(before + keys - length, stride)
    return Layout(stride, before, rows * stride - before - keys, rows, rows - first_row, first)


def additive(allowed: Tensor, dtype, device) -> Tensor:
    """A mask to be added to scores."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, MASKED).to(device)


@cache_tensors(16)  # masks are large; where segments begin at many places of a row they are made anew, which is cheap
def geometry(keyset: KeySet, without: KeySet | None, layout: Layout, dtype, device) -> tuple[Tensor, Tensor]:
    """Of a set's groups: the mask, additive, which broadcasts to their scores [.., Q, N]; and the distances of the keys
    from a group's last query, [N], or [G, N] with own_positions. Where `without` is given, its keys are left out.
    Cached: not to be changed."""
    places = torch.arange(layout.rows * layout.stride).view(1, 1, layout.rows, layout.stride, 1)  # as H = B = E = 1
    query = keyset.queries(places[:, :, -layout.query_rows :])
    key = keyset.keys(places, layout.query_rows).transpose(-2, -1)
    allowed = keyset.contains(query, key) & (key <= query) & (key >= layout.before)
    if without is not None:
        allowed &= ~without.contains(query, key)
    distance = (query[..., -1:, :] - key)[..., 0, :]  # [1, 1, G, N], or [1, G, 1, N]
    distance = distance[0, :, 0] if keyset.own_positions else distance[0, 0, 0]
    return additive(allowed, dtype, device), distance.to(device)


@cache_tensors(64)  # masks are small, and there are as many as places of a row at which segments begin
def dense_mask(unions: tuple, keys: int, length: int, place: int, dtype, device) -> Tensor:
    """Masks [len(unions), L, K], additive, of a context that begins at some place of its row; a union is a tuple of
    sets. Cached: not to be changed."""
    places = torch.arange(place, place + keys)
    query, key = places[-length:, None], places[None]
    allowed = [reduce(or_, [keyset.contains(query, key) for keyset in union]) & (key <= query) for union in unions]
    return additive(torch.stack(allowed), dtype, device)


def uses_dense_mask(keys: int) -> bool:
    """Whether dense attention under the mask is faster."""
    return keys <= DENSE_UP_TO


class SparseAttention(RelativeAttention):
    """Attention to two sets of keys: sets = strided(stride) or fixed(stride, summary).

    Raises ValueError where the factorization or the heads do not fit.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        sets: tuple[KeySet, KeySet],
        factorization: str = "merged",
        relative: bool = True,
    ):
        super().__init__(d_model, heads, relative)
        if factorization not in FACTORIZATIONS:
            raise ValueError(f"factorization={factorization!r} must be one of {', '.join(FACTORIZATIONS)}")
        if factorization == "heads" and heads % 2:
            raise ValueError(f"heads={heads} must be even: with factorization=heads each half has its own set")
        self.sets, self.stride, self.merged = sets, sets[0].stride, factorization == "merged"

    def forward(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """context [B, K, D] is memory and segment, of which the last `length` positions ask. Returns [B, L, D]."""
        way = self.masked if uses_dense_mask(context.shape[1]) else self.blocked
        return self.output(way(context, length, positions))

    def masked(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """Dense attention under the mask: where there are few keys."""
        keys, (near, far) = context.shape[1], self.sets
        unions = ((near, far),) if self.merged else ((near,), (far,))
        place = (positions.start + length - keys) % self.stride
        masks = dense_mask(unions, keys, length, place, context.dtype, context.device)
        mask = masks.repeat_interleave(self.heads // len(unions), dim=0)[:, None]  # [H, 1, L, K]
        mixed = self.dense(context, length, positions, mask)
        if not self.merged:  # a head that sees nothing adds nothing
            mixed = mixed * (mask == 0).any(dim=-1, keepdim=True)
        return join_heads(mixed)

    def blocked(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """Group by group: where there are many keys."""
        layout = lay_out(context.shape[1], length, positions.start, self.stride)
        if layout.before or layout.after:
            context = F.pad(context, (0, 0, layout.before, layout.after))
        asking = context[:, -layout.query_rows * self.stride :]
        (query,) = split_heads(self.query(asking), self.heads).unflatten(3, (-1, self.stride))  # [H, B, R, l, E]
        key_value = split_heads(self.key_value(context), self.heads, 2).unflatten(3, (-1, self.stride))

        (near, far), inputs = self.sets, (query, key_value, positions, layout)
        if self.merged:  # each set's softmax, put together by its share of the sum of exp(scores)
            mixed, lse = self.attend_to(near, slice(None), *inputs)
            others, others_lse = self.attend_to(far, slice(None), *inputs, without=near)
            mixed = torch.lerp(others, mixed, torch.sigmoid(lse - others_lse))
        else:
            half = self.heads // 2
            mixed, _ = self.attend_to(near, slice(half), *inputs)
            others, others_lse = self.attend_to(far, slice(half, None), *inputs)
            mixed = torch.cat([mixed, others * (others_lse > MASKED / 2)])  # a head that sees nothing adds nothing
        return join_heads(mixed.flatten(2, 3)[:, :, layout.first : layout.first + length])

    def attend_to(
        self,
        keyset: KeySet,
        heads: slice,
        query: Tensor,
        key_value: Tensor,
        positions: Positions,
        layout: Layout,
        without: KeySet | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Some heads' attention to one set, less another: query [H, B, R, l, E], key_value [2, H, B, S, l, E] of all
        heads -> of those some, mixed values [.., B, R, l, E] and the log-sum-exp of their scores [.., B, R, l, 1]."""
        mask, distance = geometry(keyset, without, layout, query.dtype, query.device)
        position, biases = None, (None, None)
        if self.position is not None:
            last = len(positions.encodings) - 1  # beyond the table, and before it, lies only what is masked
            position = self.project(positions, (last - distance).clamp(0, last))[heads]  # [H, N, E] or [H, G, N, E]
            biases = (self.content_bias[heads], self.position_bias[heads])
            if keyset.own_positions:
                biases = (bias.unsqueeze(1).expand(*position.shape[:2], -1) for bias in biases)
        query, key_value = keyset.queries(query[heads]), keyset.keys(key_value[:, heads], layout.query_rows)
        results = attend(query, key_value, position, *biases, mask, keyset.step, with_lse=True)
        mixed, lse = map(keyset.ungroup, results)
        return mixed, lse


def count_flops(
    sets: tuple[KeySet, KeySet], merged: bool, relative: bool, d_model: int, batch: int, segment: int, memory: int
) -> float:
    """Floating-point operations of a forward pass of SparseAttention, per token of the segment, in matrix products, as
    computed (with masked scores); `memory` positions of the stream come before the segment."""
    keys, stride = memory + segment, sets[0].stride
    if uses_dense_mask(keys):
        return attention.count_flops(relative, d_model, batch, segment, memory)
    layout = lay_out(keys, segment, memory, stride)
    places = torch.empty(1, 1, layout.rows, stride, 1, device="meta")  # its shapes alone are needed
    square, queries = 2 * d_model**2, layout.query_rows * stride
    total = square * (segment + queries + 2 * layout.rows * stride)
    for keyset in sets:
        group_keys = keyset.keys(places, layout.query_rows).shape[-2]
        if relative:  # projected once a batch
            total += square * min(group_keys * (stride if keyset.own_positions else 1), keys) / batch
        total += (3 if relative else 2) * 2 * d_model * queries * group_keys * (1 if merged else 0.5)
    return total / segment
