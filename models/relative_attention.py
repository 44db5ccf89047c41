"""The mathematics of multi-head attention with relative positions (Transformer-XL, Dai et al. 2019, arXiv 1901.02860).

Shape letters, here and in the other files of models/:
B batch, L segment (queries), M memory, K = M + L keys, D model width, H heads, E = D / H head width.
"""

from collections.abc import Callable
from functools import lru_cache, wraps

import torch
from torch import Tensor
from torch.nn import functional as F

from models.fused import FusedAttention, cast_inputs

MASKED = -1e30  # added to the scores of masked keys; finite, so that a query that sees no key does not give NaN


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
