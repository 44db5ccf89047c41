"""Multi-head attention with relative positions (Transformer-XL, Dai et al. 2019, arXiv 1901.02860).

Shape letters, here and in the other files of this folder:
B batch, L segment (queries), M memory, K = M + L keys, D model width, H heads, E = D / H head width.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.fused import FusedAttention, cast_inputs

MASKED = -1e30  # added to the scores of masked keys; finite, so that a query that sees no key does not give NaN


class Positions(NamedTuple):
    """Positions of a segment in its stream.

    encodings [>= K, D]: encodings of the distances ..., 2, 1, 0, in this order; None for attention without positions.
    start: number of positions before the segment, modulo the stride of sparse attention, so that masks can be cached.
    """

    encodings: Tensor | None
    start: int = 0


def cache_tensors(maxsize: int | None = None) -> Callable:
    """Cache the tensors that a function returns (lru_cache). Callers must not modify them.

    While torch.compile traces, the function runs uncached, because the compiler fuses it with its users.
    """

    def decorate(function):
        cached, kept = lru_cache(maxsize)(function), []

        @wraps(function)
        def choose(*arguments, **named):
            if torch.compiler.is_compiling():
                return function(*arguments, **named)
            tensors = cached(*arguments, **named)
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                kept.append(tensors)  # a CUDA graph reads them at its replays
            return tensors

        choose.cache_clear = cached.cache_clear
        return choose

    return decorate


@cache_tensors()
def sinusoidal_encodings(length: int, width: int, dtype=torch.float32, device=None) -> Tensor:
    """Cached encodings [length, width] of the distances length-1, ..., 1, 0, in this order. width must be even.

    All sines come before the cosines, as in Transformer-XL (arXiv 1901.02860, appendix B).
    """
    distance = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=device)  # [length]
    frequency = 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)  # [width / 2]
    angle = distance[:, None] * frequency  # [length, width / 2]
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)  # [length, width]


@cache_tensors()
def causal_mask(length: int, keys: int, dtype=torch.float32, device=None) -> Tensor:
    """Cached additive mask [L, K]: MASKED where the key lies in the query's future, else 0."""
    return torch.full((length, keys), MASKED, dtype=dtype, device=device).triu(keys - length + 1)


def relative_shift(scores: Tensor, step: int = 1) -> Tensor:
    """Move scores from columns of distances to columns of keys: [..., L, K] -> [..., L, K].

    Column c of the input holds the score of distance K-1-c. Query i stands at place M+i, so its score of key j is in
    column j + (L-1-i). If queries are `step` keys apart, output (i, j) is input (i, j + step * (L-1-i)).

    Padding each row with `step` zeros in front makes the shift a reshape (arXiv 1901.02860, appendix B). Values that a
    row takes from beyond its end belong to keys in the query's future; the caller must mask them.
    """
    length, keys = scores.shape[-2:]
    padded = F.pad(scores, (step, 0))  # [..., L, step + K]
    return padded.flatten(-2)[..., length * step :].unflatten(-1, (length, keys))  # [..., L, K]


def plain_attend(query, key_value, position, content_bias, position_bias, mask, step, with_lse):
    """The definition of attend() in ordinary operations. torch.compile gets this version and fuses it by itself."""
    key, value = key_value  # [*H, *B, K, E] each
    if position is None:
        scores = query @ key.transpose(-2, -1)  # [*H, *B, L, K]
    else:
        batch = (None,) * (query.ndim - position.ndim)
        heads = (slice(None),) * (position.ndim - 2)
        position = position[(*heads, *batch)]  # [*H, *1, K, E]
        content_bias, position_bias = content_bias[(*heads, *batch, None)], position_bias[(*heads, *batch, None)]
        by_distance = (query + position_bias) @ position.transpose(-2, -1)  # [*H, *B, L, K], terms (b) and (d)
        scores = (query + content_bias) @ key.transpose(-2, -1) + relative_shift(by_distance, step)
    scores = scores * query.shape[-1] ** -0.5 + mask  # [*H, *B, L, K]
    lse = scores.logsumexp(dim=-1, keepdim=True) if with_lse else None  # [*H, *B, L, 1]
    return scores.softmax(dim=-1) @ value, lse  # [*H, *B, L, E]


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
    """Attention with relative positions (arXiv 1901.02860, section 3.3, terms (a) to (d)), differentiable once.

    Args:
        query: [*H, *B, L, E], with any number of head and batch dimensions.
        key_value: [2, *H, *B, K, E].
        position: [*H, K, E], projected encodings; column j belongs to the distance between key j and the last query.
            None means plain attention: scores are query . key alone.
        content_bias, position_bias: u and v of the paper, [*H, E].
        mask: added to the scores; broadcasts to [*H, *B, L, K]. It must mask keys in a query's future.
        step: number of keys between neighbouring queries, see relative_shift().

    Returns:
        The mixed values [*H, *B, L, E] and, with_lse, the log-sum-exp of the scores [*H, *B, L, 1], which combines
        results over disjoint key sets. The caller must ignore the results of a query that sees no key.
    """
    inputs = cast_inputs(query, key_value, position, content_bias, position_bias, mask)
    function = plain_attend if torch.compiler.is_compiling() else FusedAttention.apply
    return function(*inputs, step, with_lse)


def split_heads(x: Tensor, heads: int, parts: int = 1) -> Tensor:
    """[B, N, parts * D] -> [parts, H, B, N, E], a view. Each head's columns hold its parts one after another."""
    return x.unflatten(-1, (heads, parts, -1)).permute(3, 2, 0, 1, 4)


def join_heads(x: Tensor) -> Tensor:
    """[H, B, N, E] -> [B, N, D], the heads side by side."""
    return x.permute(1, 2, 0, 3).flatten(2)


class RelativeAttention(nn.Module):
    """Multi-head attention of a segment to its memory and itself, optionally with relative positions.

    key_heads: heads of keys and values; groups of heads / key_heads heads share one (arXiv 2305.13245). Below, G is
    their number.
    last_sees_all: whether the last query of a context attends to all of its keys.
    """

    last_sees_all = True

    def __init__(self, d_model: int, heads: int, key_heads: int, relative: bool = True):
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, d_model // heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key_value = nn.Linear(d_model, 2 * d_model * key_heads // heads, bias=False)
        self.position = nn.Linear(d_model, d_model, bias=False) if relative else None
        self.output = nn.Linear(d_model, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, d_model // heads)) if relative else None  # u
        self.position_bias = nn.Parameter(torch.zeros(heads, d_model // heads)) if relative else None  # v

    def forward(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """context [B, K, D]: memory and segment. Its last `length` positions are the queries. Returns [B, L, D]."""
        position = self.project_positions(positions, slice(-context.shape[1], None))  # [H, K, E]
        key_value = self.project_keys(context).contiguous()
        return self.attend_masked(context[:, -length:], key_value, position, positions.start)

    def project_keys(self, context: Tensor) -> Tensor:
        """Keys and values [2, G, B, K, E] of a context [B, K, D], a view."""
        return split_heads(self.key_value(context), self.key_heads, 2)

    def repeat_keys(self, key_value: Tensor) -> Tensor:
        """Keys and values of all heads: [2, G, ..] -> [2, H, ..]."""
        times = self.heads // self.key_heads
        return key_value if times == 1 else key_value.repeat_interleave(times, dim=1)

    def attend_masked(self, x: Tensor, key_value: Tensor, position: Tensor | None, start: int) -> Tensor:
        """Dense attention [B, L, D] under mask().

        x [B, L, D]: the queries' inputs; key_value [2, G, B, K, E]: of the positions before x and of x; position
        [H, K, E]: projected encodings of the distances K - 1, ..., 0, or None; start: as in Positions.
        """
        (query,) = split_heads(self.query(x), self.heads)  # [H, B, L, E]
        mask = self.mask(x.shape[1], key_value.shape[-2], start, x.dtype, x.device)
        inputs = query, self.repeat_keys(key_value), position, self.content_bias, self.position_bias, mask
        mixed, _ = attend(*inputs)  # [H, B, L, E]
        return self.output(join_heads(mixed))

    def mask(self, length: int, keys: int, start: int, dtype, device) -> Tensor:
        """Additive mask that broadcasts to [H, B, L, K], for L queries that end a context of K keys."""
        return causal_mask(length, keys, dtype, device)

    def project_positions(self, positions: Positions, rows) -> Tensor | None:
        """Projected encodings [H, .., E] of the given rows of the table: a slice, or indices [..]."""
        if self.position is None:
            return None
        if isinstance(rows, Tensor) and rows.numel() > len(positions.encodings):  # rows repeat: project each once
            projected = F.embedding(rows, self.position(positions.encodings))  # [.., D]
        else:
            projected = self.position(positions.encodings[rows])  # [.., D]
        return projected.unflatten(-1, (self.heads, -1)).movedim(-2, 0)
