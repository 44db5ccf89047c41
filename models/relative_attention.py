"""The mathematics of multi-head attention with relative positions (Transformer-XL, Dai et al. 2019, arXiv 1901.02860).

Shape letters, here and in the other files of models/:
B batch, L segment (queries), M memory, K = M + L keys, D model width, H heads, E = D / H head width.
HB, BL and LK are products: two dimensions flattened into one.
"""

from collections.abc import Callable
from functools import lru_cache, wraps

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

MASKED = -1e30  # added to the scores of masked keys; finite, so that a query that sees no key does not give NaN


def cache_tensors(maxsize: int | None = None) -> Callable:
    """Cache the tensors that a function returns (lru_cache). Callers must not modify them.

    While torch.compile traces, the function runs uncached, because the compiler fuses it with its users.
    """

    def decorate(function):
        cached, kept = lru_cache(maxsize)(torch.inference_mode(False)(function)), []  # for backward passes, too

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
    if isinstance(length, int) and length == 1:  # nothing to move; exports of single tokens have fewer operations
        return scores
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


def autocast_device(x: Tensor) -> str:
    """The type of device whose autocast applies to x. Tensors on `meta`, which count FLOPs, have none of their own."""
    return "cpu" if x.is_meta else x.device.type


def cast_inputs(*inputs: Tensor | None) -> list[Tensor | None]:
    """Cast inputs as autocast does for a matrix product, because a custom autograd function must do this itself."""
    device = autocast_device(inputs[0])
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs[0].dtype
    return [None if x is None else x.to(dtype) for x in inputs]


def shifted_view(scores: Tensor, step: int) -> Tensor:
    """relative_shift() of contiguous scores [..., L, K] as a view, whose rows start K - step values apart."""
    length, keys = scores.shape[-2:]
    strides = (*scores.stride()[:-2], keys - step, 1)
    return scores.flatten(-2)[..., step * (length - 1) :].as_strided(scores.shape, strides)


def add_bias(query: Tensor, bias: Tensor) -> Tensor:
    """Sum of query [*H, *B, L, E] in any layout and bias [*H, E], contiguous."""
    bias = bias.view(*bias.shape[:-1], *[1] * (query.ndim - bias.ndim), bias.shape[-1])  # [*H, *1, 1, E]
    return torch.add(query, bias, out=query.new_empty(query.shape))


class FusedAttention(torch.autograd.Function):
    """plain_attend() with about a third of autograd's memory traffic.

    One buffer holds the scores while they are computed, shifted, masked and normalised. The shift moves no data in
    either direction. The batch shares its positions, so the position term takes one product per head.
    """

    @staticmethod
    def forward(ctx, query, key_value, position, content_bias, position_bias, mask, step, with_lse):
        lead, (length, width), keys = query.shape[:-2], query.shape[-2:], key_value.shape[-2]  # lead: *H, *B
        rows, scale = lead.numel(), width**-0.5
        key, value = key_value.reshape(2, rows, keys, width)  # [HB, K, E] each
        scores, position_query = query.new_empty(*lead, length, keys), None
        if position is None:
            content_query = query.reshape(rows, length, width)  # [HB, L, E]
            scores.copy_(mask)  # [*H, *B, L, K]
        else:
            ctx.heads = position.shape[:-2]
            position = position.reshape(-1, keys, width)  # [H, K, E]
            content_query = add_bias(query, content_bias).view(rows, length, width)  # [HB, L, E]
            position_query = add_bias(query, position_bias).view(len(position), -1, width)  # [H, BL, E]
            by_distance = torch.bmm(position_query, position.transpose(1, 2))  # [H, BL, K]
            torch.add(mask, shifted_view(by_distance.view(scores.shape), step), alpha=scale, out=scores)
        flat = scores.view(rows, length, keys)  # [HB, L, K]
        torch.baddbmm(flat, content_query, key.transpose(1, 2), alpha=scale, out=flat)  # [HB, L, K]
        highest = flat.amax(dim=-1, keepdim=True) if with_lse else None  # [HB, L, 1]
        weights = torch.softmax(flat, dim=-1, out=flat)  # [HB, L, K]
        # The largest weight is exp(highest - lse).
        lse = (highest - weights.amax(dim=-1, keepdim=True).log()).view(*lead, length, 1) if with_lse else None
        mixed = torch.bmm(weights, value)  # [HB, L, E]
        ctx.save_for_backward(content_query, position_query, key, value, position, weights, mixed)
        ctx.lead, ctx.step = lead, step
        ctx.set_materialize_grads(False)
        return mixed.view(*lead, length, width), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_lse):
        content_query, position_query, key, value, position, weights, mixed = ctx.saved_tensors
        (rows, keys, width), length = key.shape, mixed.shape[1]
        grad_output = torch.zeros_like(mixed) if grad_output is None else grad_output.reshape(mixed.shape)  # [HB, L, E]

        # With g = grad_output @ value^T, the gradient of the scores is weights * (g - expected). Here `expected` is the
        # mean of g under the weights, and equals grad_output . mixed. The log-sum-exp adds weights * grad_lse.
        expected, scale = (grad_output * mixed).sum(dim=-1, keepdim=True), width**-0.5  # [HB, L, 1]
        if grad_lse is not None:
            expected -= grad_lse.reshape(expected.shape)
        expected = expected.expand_as(weights)
        centred = torch.baddbmm(expected, grad_output, value.transpose(1, 2), beta=-scale, alpha=scale)  # [HB, L, K]

        # Behind L * step zeros, the gradient by key also holds the gradient by distance, the input gradient of
        # relative_shift(). To read it, take rows of step + K values, and drop the first `step` columns. The values that
        # such a row takes from its neighbour are zero: they belong to masked keys, or to queries that see no key.
        zeros = 0 if position is None else length * ctx.step
        storage = grad_output.new_empty(rows, zeros + length * keys)
        storage[:, :zeros] = 0
        grad_scores = torch.mul(centred, weights, out=storage[:, zeros:].view_as(weights))  # [HB, L, K]
        grad_key_value = grad_output.new_empty(2, rows, keys, width)  # [2, HB, K, E]
        torch.bmm(grad_scores.transpose(1, 2), content_query, out=grad_key_value[0])  # [HB, K, E]
        torch.bmm(weights.transpose(1, 2), grad_output, out=grad_key_value[1])  # [HB, K, E]
        grad_key_value = grad_key_value.view(2, *ctx.lead, keys, width)  # [2, *H, *B, K, E]
        grad_query = torch.bmm(grad_scores, key)  # [HB, L, E]
        if position is None:
            return grad_query.view(*ctx.lead, length, width), grad_key_value, *[None] * 6
        heads = len(position)
        grad_distance = storage.view(heads, -1, keys + ctx.step)[:, :, ctx.step :]  # [H, BL, K]
        grad_position_query = torch.bmm(grad_distance, position)  # [H, BL, E]
        grad_position = torch.bmm(grad_distance.transpose(1, 2), position_query)  # [H, K, E]
        grad_content_bias = grad_query.view(heads, -1, width).sum(dim=1)  # [H, E]
        grad_position_bias = grad_position_query.sum(dim=1)  # [H, E]
        grad_query = grad_query + grad_position_query.view_as(grad_query)  # [HB, L, E]
        return (
            grad_query.view(*ctx.lead, length, width),
            grad_key_value,
            grad_position.view(*ctx.heads, keys, width),
            grad_content_bias.view(*ctx.heads, width),
            grad_position_bias.view(*ctx.heads, width),
            *[None] * 3,
        )


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
