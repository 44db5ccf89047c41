"""Relative attention of Transformer-XL (Dai et al. 2019, arXiv 1901.02860, section 3.3 and appendix B).

Shape letters, here and in the other files of this folder:
B batch, L segment (queries), M memory, K = M + L keys, D model width, H heads, E = D / H head width.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.fused import FusedAttention, product_dtype

MASKED = -1e30  # added to a score: its weight is zero; finite, so that a query that sees no key gives no NaN


class Positions(NamedTuple):
    """Where a segment stands. encodings [>= K, D]: those of the distances ..., 1, 0, in that order, or None where
    attention does not look at them. start: how many positions of the stream come before the segment, as far as that
    matters to sparse attention: its remainder by the stride, so that what is compiled for a place is used again."""

    encodings: Tensor | None
    start: int = 0


def cache_tensors(maxsize: int | None = None) -> Callable:
    """lru_cache for functions that make tensors which are not to be changed. While the compiler traces, the function
    itself, for the compiler fuses it with what uses it. What a CUDA graph reads must not be dropped: maxsize None."""

    def decorate(function):
        cached = lru_cache(maxsize)(function)

        @wraps(function)
        def choose(*arguments, **named):
            return (function if torch.compiler.is_compiling() else cached)(*arguments, **named)

        choose.cache_clear = cached.cache_clear
        return choose

    return decorate


@cache_tensors()
def sinusoids(length: int, width: int, dtype=torch.float32, device=None) -> Tensor:
    """Sinusoidal encodings [length, width] of the distances length-1, ..., 1, 0, in that order.

    The sines stand before the cosines, as in Transformer-XL (arXiv 1901.02860, appendix B); width must be even.
    Cached: not to be changed.
    """
    distance = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=device)
    frequency = 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


@cache_tensors()
def causal_mask(length: int, keys: int, dtype=torch.float32, device=None) -> Tensor:
    """To be added to the scores of a segment [L, K]: MASKED where a key is in the future of its query, else 0.

    Cached: not to be changed.
    """
    return torch.full((length, keys), MASKED, dtype=dtype, device=device).triu(keys - length + 1)


def plain_attend(query, key_value, position, content_bias, position_bias, mask, step, with_lse):
    """attend() in plain operations: what the compiler is given, which plans buffers and fuses passes by itself."""
    key, value = key_value
    length, keys = query.shape[-2], key.shape[-2]
    if position is None:
        scores = query @ key.transpose(-2, -1)
    else:
        heads = (*[slice(None)] * (position.ndim - 2), *[None] * (query.ndim - position.ndim))
        position, content_bias, position_bias = (
            position[heads],
            content_bias[(*heads, None)],
            position_bias[(*heads, None)],
        )
        by_distance = (query + position_bias) @ position.transpose(-2, -1)
        # relative_shift() without strides: each row `step` longer, all but the first L * step entries, read by rows
        padded = F.pad(by_distance, (step, 0)).flatten(-2)[..., length * step :]
        scores = (query + content_bias) @ key.transpose(-2, -1) + padded.unflatten(-1, (length, keys))
    scores = scores * query.shape[-1] ** -0.5 + mask
    lse = scores.logsumexp(dim=-1, keepdim=True) if with_lse else None
    return scores.softmax(dim=-1) @ value, lse


def attend(
    query: Tensor,
    key_value: Tensor,
    position: Tensor | None,
    content_bias: Tensor | None,
    position_bias: Tensor | None,
    mask: Tensor,
    step: int = 1,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention with relative positions (arXiv 1901.02860, equation for A^rel in section 3.3, terms a to d).

    query [*heads, *batch, L, E]; key_value [2, *heads, *batch, K, E]; position [*heads, K, E], the projected encodings
    of the distances, descending, to which column j of query L-1 belongs, or None for plain attention (q k alone);
    content_bias (u) and position_bias (v) [*heads, E]; mask, to be added to the scores, broadcasts to
    [*heads, *batch, L, K]; step: see relative_shift. Where position is given, a key that the shift takes from beyond a
    query's row must be masked.

    Returns the mixed values [*heads, *batch, L, E] and, where with_lse, the log-sum-exp of the scores
    [*heads, *batch, L, 1], by whose exp results over disjoint sets of keys are weighed against each other. Of a query
    that sees no key they are the mean of the values and about MASKED: to be given no weight. Differentiable once.
    """
    dtype, inputs = product_dtype(query), (query, key_value, position, content_bias, position_bias, mask)
    inputs = [None if x is None else x.to(dtype) for x in inputs]
    function = plain_attend if torch.compiler.is_compiling() else FusedAttention.apply
    return function(*inputs, step, with_lse)


def split_heads(x: Tensor, heads: int, parts: int = 1) -> Tensor:
    """[B, N, parts * D], for each head its columns of each part, -> [parts, H, B, N, E], a view."""
    return x.unflatten(-1, (heads, parts, -1)).permute(3, 2, 0, 1, 4)


def join_heads(x: Tensor) -> Tensor:
    """[H, B, N, E] -> [B, N, D]; heads stand one after the other in its columns."""
    return x.permute(1, 2, 0, 3).flatten(2)


def count_flops(relative: bool, d_model: int, batch: int, segment: int, memory: int) -> float:
    """Floating-point operations of a forward pass of RelativeAttention, per token of the segment, in matrix products,
    as computed (with the masked half of the scores)."""
    keys_per_query = (segment + memory) / segment
    square = 2 * d_model**2
    positions = keys_per_query / batch if relative else 0  # once a batch
    projections = square * (2 + 2 * keys_per_query + positions)  # q, o; k, v
    scores = (3 if relative else 2) * 2 * d_model * (segment + memory)  # content, position; the mixture
    return projections + scores


class RelativeAttention(nn.Module):
    """Multi-head attention over a memory and the segment that follows it, with relative positions or, where `relative`
    is off, without any.

    Raises ValueError where heads does not divide d_model.
    """

    def __init__(self, d_model: int, heads: int, relative: bool = True):
        super().__init__()
        if d_model % heads:
            raise ValueError(f"heads={heads} must divide d_model={d_model}")
        self.heads = heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key_value = nn.Linear(d_model, 2 * d_model, bias=False)
        self.position = nn.Linear(d_model, d_model, bias=False) if relative else None
        self.output = nn.Linear(d_model, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, d_model // heads)) if relative else None
        self.position_bias = nn.Parameter(torch.zeros(heads, d_model // heads)) if relative else None

    def forward(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """context [B, K, D] is memory and segment, of which the last `length` positions ask. Returns [B, L, D]."""
        mask = causal_mask(length, context.shape[1], context.dtype, context.device)
        return self.output(join_heads(self.dense(context, length, positions, mask)))

    def dense(self, context: Tensor, length: int, positions: Positions, mask: Tensor) -> Tensor:
        """Mixed values [H, B, L, E] of a score for every query and key, to which a mask [.., L, K] is added."""
        (query,) = split_heads(self.query(context[:, -length:]), self.heads)
        key_value = split_heads(self.key_value(context), self.heads, 2).contiguous()
        position = self.project(positions, slice(-context.shape[1], None))
        mixed, _ = attend(query, key_value, position, self.content_bias, self.position_bias, mask)
        return mixed

    def project(self, positions: Positions, rows) -> Tensor | None:
        """The projected encodings [H, .., E] of some rows of the positions' table: a slice, or indices [..]."""
        if self.position is None:
            return None
        if isinstance(rows, Tensor) and rows.numel() > len(positions.encodings):  # many times the same
            projected = F.embedding(rows, self.position(positions.encodings))
        else:
            projected = self.position(positions.encodings[rows])
        return projected.unflatten(-1, (self.heads, -1)).movedim(-2, 0)
