"""Attention to sets of keys: strided and fixed sparse attention at a cost of n * sqrt(n) (Child et al. 2019,
arXiv 1904.10509, section 4.3), and sliding-window attention at a cost of n (arXiv 2004.05150, section 3.1).

The stream is divided into rows of l = `stride` or `window` positions. A query attends to one or two sets of past keys.
One softmax covers the union of both sets, unlike the paper's variants that give each set half of the heads, or
alternate them between blocks (section 5.1). Rows are counted from the start of the stream, so its division into
segments does not change the sets.

attend() computes each set as dense attention within small groups, so no [L, K] matrix is built. Shape letters as in
models/relative_attention.py, and R rows of queries, S rows of keys (the queries' are the last R), G groups of Q queries
and N keys.
"""

from dataclasses import dataclass
from functools import partial, reduce
from operator import or_

import torch
from torch import Tensor
from torch.nn import functional as F

from models.operations.attention import Attention, RelativeAttention
from models.operations.operation import Segment
from models.relative_attention import MASKED, attend, cache_tensors, join_heads, split_heads

DENSE_UP_TO = 256  # up to this many keys a dense mask is faster (experiments/bench/README.md)


@dataclass(frozen=True)
class KeySet:
    """The keys that a query attends to, and groups of queries and keys within which attention is dense.

    Groups act as part of the batch in attend(): [H, B, G, ..]. If groups differ in the distances between their queries
    and keys (own_positions), they act as part of the heads: [H, G, B, ..].
    step: number of keys between neighbouring queries of a group, see relative_shift() in models/relative_attention.py.
    Subclasses have contains(query, key), which tells whether a query attends to a key that is not in its future, both
    given by their places from the start of a row; and
    keys(rows [.., H, B, S, l, E], R) -> [.., H, B, G, N, E], or [.., H, G, B, N, E] with own_positions.
    columns: the dimension of the groups that has the columns of rows.
    """

    stride: int  # l
    own_positions = False
    step = 1
    columns = -2

    def queries(self, rows: Tensor) -> Tensor:
        """[H, B, R, l, E] -> [H, B, G, Q, E], or [H, G, B, Q, E] with own_positions"""
        return rows.movedim(-2, self.columns)

    def ungroup(self, groups: Tensor) -> Tensor:
        """The inverse of queries()."""
        return groups.movedim(self.columns, -2)


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

    columns = -3

    def contains(self, query, key):
        return (query - key) % self.stride == 0

    def keys(self, rows, query_rows):
        return self.queries(rows)


@dataclass(frozen=True)
class SummaryColumns(KeySet):
    """The last `step` columns of every row. Each group is one column of queries; all groups have the same keys."""

    step: int
    own_positions = True
    columns = -4

    def contains(self, query, key):
        return key % self.stride >= self.stride - self.step

    def keys(self, rows, query_rows):
        keys = rows[..., -self.step :, :].flatten(-3, -2).unsqueeze(-4)  # [.., H, 1, B, N, E]
        return keys.expand(*keys.shape[:-4], self.stride, *keys.shape[-3:])  # [.., H, l, B, N, E]


def additive_mask(allowed: Tensor, dtype) -> Tensor:
    """0 where allowed, else MASKED."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, MASKED)


@cache_tensors(16)  # few entries, because the masks are large and cheap to compute again
def group_masks(
    key_set: KeySet, without: KeySet | None, before: int, rows: int, query_rows: int, dtype, device
) -> tuple[Tensor, Tensor]:
    """Cached additive mask, which broadcasts to the groups' scores [.., Q, N], and distances for a key set.

    The distances [N], or [G, N] with own_positions, are those between the keys and the last query of a group. The keys
    of `without` are masked too, and the first `before` positions, which pad the context. rows: S. query_rows: R.
    """
    places = torch.arange(rows * key_set.stride, device=device)
    places = places.view(1, 1, rows, key_set.stride, 1)  # H = B = E = 1
    query = key_set.queries(places[:, :, -query_rows:])  # [1, 1, G, Q, 1], or [1, G, 1, Q, 1]
    key = key_set.keys(places, query_rows).transpose(-2, -1)  # [1, 1, G, 1, N], or [1, G, 1, 1, N]
    allowed = key_set.contains(query, key) & (key <= query) & (key >= before)
    if without is not None:
        allowed &= ~without.contains(query, key)
    distance = (query[..., -1:, :] - key)[..., 0, :]  # [1, 1, G, N], or [1, G, 1, N]
    distance = distance[0, :, 0] if key_set.own_positions else distance[0, 0, 0]
    return additive_mask(allowed, dtype), distance


@cache_tensors(64)  # many entries, because the masks are small and a segment may begin in any column
def dense_mask(key_sets: tuple[KeySet, ...], keys: int, length: int, place: int, dtype, device) -> Tensor:
    """Cached additive mask [L, K] of the union of key sets, for a context that begins in column `place` of a row."""
    places = torch.arange(keys, device=device) + place
    query, key = places[-length:, None], places[None]  # [L, 1], [1, K]
    allowed = reduce(or_, [key_set.contains(query, key) for key_set in key_sets]) & (key <= query)
    return additive_mask(allowed, dtype)


def uses_dense_mask(is_window: bool, stride: int, keys: int, length: int) -> bool:
    """Whether dense attention under a mask is faster than attention in groups."""
    return keys <= DENSE_UP_TO or (is_window and length <= stride)


class SparseAttention(RelativeAttention):
    """Attention to one set of keys, a window, or to the union of two sets."""

    def __init__(self, d_model: int, heads: int, key_heads: int, relative: bool, key_sets: tuple[KeySet, ...]):
        super().__init__(d_model, heads, key_heads, relative)
        self.key_sets, self.stride = key_sets, key_sets[0].stride
        self.last_sees_all = len(key_sets) == 1  # a window, of a context that is no longer than the window

    def forward(self, context: Tensor, length: int, segment: Segment) -> Tensor:
        if self.last_sees_all:
            # It moves with the query, so rows may begin anywhere: one layout fits all segments.
            context = context[:, -(self.stride + length) :]
            segment = segment._replace(start=context.shape[1] - length)
        if uses_dense_mask(self.last_sees_all, self.stride, context.shape[1], length):
            return super().forward(context, length, segment)
        return self.blocked(context, length, segment)

    def mask(self, length: int, keys: int, start: int, dtype, device) -> Tensor:
        place = 0 if self.last_sees_all else (start + length - keys) % self.stride
        return dense_mask(self.key_sets, keys, length, place, dtype, device)

    def blocked(self, context: Tensor, length: int, segment: Segment) -> Tensor:
        """forward() in groups, for many keys."""
        keys, stride = context.shape[1], self.stride
        before = (segment.start + length - keys) % stride  # rows begin where the stream's rows begin
        if before + keys - length < stride:  # LocalWindow reads the row before the queries' rows
            before += stride
        first_row, first = divmod(before + keys - length, stride)  # of the queries
        if before or (before + keys) % stride:
            context = F.pad(context, (0, 0, before, -(before + keys) % stride))  # [B, S * l, D], whole rows
        asking = context[:, first_row * stride :]  # [B, R * l, D]
        (query,) = split_heads(self.query(asking), self.heads).unflatten(3, (-1, stride))  # [H, B, R, l, E]
        key_value = self.repeat_keys(self.project_keys(context)).unflatten(3, (-1, stride))  # [2, H, B, S, l, E]

        near, *others = self.key_sets
        mixed, lse = self.attend_to(near, None, query, key_value, segment.encodings, before)
        for key_set in others:  # weigh each set's softmax by its share of the sum of exp(scores)
            far, far_lse = self.attend_to(key_set, near, query, key_value, segment.encodings, before)
            mixed = torch.lerp(far, mixed, torch.sigmoid(lse - far_lse))
        return self.output(join_heads(mixed.flatten(2, 3)[:, :, first : first + length]))

    def attend_to(self, key_set, without, query, key_value, encodings, before) -> tuple[Tensor, Tensor]:
        """Attention to one key set, without the keys of another and the first `before` positions.

        query [H, B, R, l, E], key_value [2, H, B, S, l, E] -> values [H, B, R, l, E] and log-sum-exp [H, B, R, l, 1].
        """
        rows, query_rows = key_value.shape[3], query.shape[2]
        mask, distance = group_masks(key_set, without, before, rows, query_rows, query.dtype, query.device)
        position, biases = None, (None, None)
        if self.position is not None:
            last = len(encodings) - 1  # distances outside of the table belong to masked keys
            position = self.project_positions(encodings, (last - distance).clamp(0, last))  # [H, (G,) N, E]
            biases = (self.content_bias, self.position_bias)  # [H, E] each
            if key_set.own_positions:
                biases = (bias.unsqueeze(1).expand(*position.shape[:2], -1) for bias in biases)  # [H, G, E] each
        query, key_value = key_set.queries(query), key_set.keys(key_value, query_rows)
        return tuple(map(key_set.ungroup, attend(query, key_value, position, *biases, mask, key_set.step, True)))


class SparseStrided(Attention):
    """Strided sparse attention (arXiv 1904.10509, section 4.3): a local window and a strided column."""

    def __init__(self, config, stride: int, heads: int, key_heads: int):
        key_sets = LocalWindow(stride), StridedColumn(stride)
        super().__init__(config, heads, key_heads, partial(SparseAttention, key_sets=key_sets))
        self.stride = stride


class SparseFixed(Attention):
    """Fixed sparse attention (arXiv 1904.10509, section 4.3): the query's block, and the last columns of all rows."""

    def __init__(self, config, stride: int, summary: int, heads: int, key_heads: int):
        key_sets = LocalBlock(stride), SummaryColumns(stride, summary)
        super().__init__(config, heads, key_heads, partial(SparseAttention, key_sets=key_sets))
        self.stride = self.period = stride  # the keys of a query depend on its column


class Window(Attention):
    """Sliding-window attention (arXiv 2004.05150, section 3.1)."""

    def __init__(self, config, window: int, heads: int, key_heads: int):
        super().__init__(config, heads, key_heads, partial(SparseAttention, key_sets=(LocalWindow(window),)))
        self.reach = window
