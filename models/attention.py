"""Relative attention of Transformer-XL (Dai et al. 2019, arXiv 1901.02860, section 3.3 and appendix B).

Shape letters, here and in the other files of this folder:
B batch, L segment (queries), M memory, K = M + L keys, D model width, H heads, E = D / H head width.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@lru_cache(maxsize=16)
def sinusoids(length: int, width: int, dtype=torch.float32, device=None) -> Tensor:
    """Sinusoidal encodings [length, width] of the distances length-1, ..., 1, 0, in that order.

    The sines stand before the cosines, as in Transformer-XL (arXiv 1901.02860, appendix B); width must be even.
    Cached: not to be changed.
    """
    distance = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=device)
    frequency = 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def relative_shift(scores: Tensor) -> Tensor:
    """Turn scores by distance into scores by key, contiguous [..., L, K] -> [..., L, K], a view of the same storage
    (arXiv 1901.02860, appendix B).

    Column c of the input belongs to the distance K-1-c. In the output, column j of row i holds the score of the
    distance M+i-j between that query and that key, which is column j+L-1-i of the input: a step down a row is K-1
    entries further, not K. Entries with j > M+i (the future) hold other rows' values and must be masked.
    """
    length, keys = scores.shape[-2:]
    strides = (*scores.stride()[:-2], keys - 1, 1)
    return scores.as_strided(scores.shape, strides, scores.storage_offset() + length - 1)


@lru_cache(maxsize=16)
def causal_mask(length: int, dtype=torch.float32, device=None) -> Tensor:
    """To be added to a segment's scores of itself [L, L]: -inf where key j is in the future of query i, j > i, else 0.

    The memory before the segment is all past. Cached: not to be changed.
    """
    return torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1)


class RelativeAttentionFunction(torch.autograd.Function):
    """relative_attention with a backward pass by hand.

    What autograd would do step by step costs three times the memory traffic: here the scores are made, shifted, masked
    and normalised in one buffer, and neither direction of the shift moves data. Matrices are laid out head by head,
    [H, B, ...], so that the position products, in which the batch shares its positions, are one product per head.
    """

    @staticmethod
    def forward(ctx, query, key_value, position, content_bias, position_bias):
        batch, length, model = query.shape
        keys, (heads, width) = key_value.shape[1], content_bias.shape
        rows = heads * batch
        query = query.view(batch, length, heads, width).permute(2, 0, 1, 3)
        content_query = add_bias(query, content_bias).view(rows, length, width)
        position_query = add_bias(query, position_bias).view(heads, batch * length, width)
        by_head = key_value.view(batch, keys, heads, 2, width).permute(3, 2, 0, 1, 4).contiguous()
        key, value = by_head.view(2, rows, keys, width)
        position = position.view(keys, heads, width).transpose(0, 1)

        scale = width**-0.5
        by_distance = torch.bmm(position_query, position.transpose(1, 2)).view(rows, length, keys)
        shifted = relative_shift(by_distance)
        scores = torch.baddbmm(shifted, content_query, key.transpose(1, 2), beta=scale, alpha=scale)
        scores[:, :, keys - length :] += causal_mask(length, scores.dtype, scores.device)
        weights = torch.softmax(scores, dim=-1, out=scores)
        mixed = torch.bmm(weights, value)
        ctx.save_for_backward(content_query, position_query, key, value, position, weights, mixed)
        return mixed.view(heads, batch, length, width).permute(1, 2, 0, 3).reshape(batch, length, model)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        content_query, position_query, key, value, position, weights, mixed = ctx.saved_tensors
        (rows, keys, width), (heads, _, _) = key.shape, position.shape
        batch, length, model = gradient.shape
        gradient = gradient.view(batch, length, heads, width).permute(2, 0, 1, 3).reshape(rows, length, width)

        # With g = gradient @ value^T, a softmax's gradient is weights * (g - expected g under the weights), and that
        # expectation is gradient . mixed. The scale of the scores comes along.
        expected, scale = (gradient * mixed).sum(dim=-1, keepdim=True), width**-0.5
        centred = torch.baddbmm(
            expected.expand(rows, length, keys), gradient, value.transpose(1, 2), beta=-scale, alpha=scale
        )
        # Written behind L zeros, so that the same storage read in rows of K + 1, less their first column, is the
        # gradient by distance: the shift backwards. (What it reads across a row's end is future, and so is zero.)
        storage = gradient.new_empty(rows, length * (keys + 1))
        storage[:, :length] = 0
        by_key = storage[:, length:].view(rows, length, keys)
        by_distance = storage.view(heads, batch * length, keys + 1)[:, :, 1:]
        torch.mul(centred, weights, out=by_key)

        by_head = gradient.new_empty(2, rows, keys, width)
        torch.bmm(by_key.transpose(1, 2), content_query, out=by_head[0])
        torch.bmm(weights.transpose(1, 2), gradient, out=by_head[1])
        to_content = torch.bmm(by_key, key).view(heads, batch * length, width)
        to_position = torch.bmm(by_distance, position)
        return (
            (to_content + to_position).view(heads, batch, length, width).permute(1, 2, 0, 3)
            .reshape(batch, length, model),
            by_head.view(2, heads, batch, keys, width).permute(2, 3, 1, 0, 4).reshape(batch, keys, 2 * model),
            torch.bmm(by_distance.transpose(1, 2), position_query).transpose(0, 1).reshape(keys, model),
            to_content.sum(dim=1),
            to_position.sum(dim=1),
        )  # fmt: skip


def add_bias(by_head: Tensor, bias: Tensor) -> Tensor:
    """A strided [H, B, L, E] and a bias [H, E], added into a contiguous result."""
    return torch.add(by_head, bias[:, None, None], out=by_head.new_empty(by_head.shape))


def relative_attention(
    query: Tensor, key_value: Tensor, position: Tensor, content_bias: Tensor, position_bias: Tensor
) -> Tensor:
    """Causal attention with relative positions (arXiv 1901.02860, equation for A^rel in section 3.3, terms a to d).

    query [B, L, D]; key_value [B, K, 2D], for each head its E columns of keys, then its E of values; position [K, D],
    the projected encodings of the distances K-1, ..., 0; content_bias (u) and position_bias (v) [H, E]. Returns
    [B, L, D]; heads stand one after the other in its columns. Differentiable once.
    """
    return RelativeAttentionFunction.apply(query, key_value, position, content_bias, position_bias)


class RelativeAttention(nn.Module):
    """Multi-head relative attention over a memory and the segment that follows it.

    Raises ValueError where heads does not divide d_model.
    """

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        if d_model % heads:
            raise ValueError(f"heads={heads} must divide d_model={d_model}")
        self.heads = heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key_value = nn.Linear(d_model, 2 * d_model, bias=False)
        self.position = nn.Linear(d_model, d_model, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, d_model // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, d_model // heads))

    def forward(self, context: Tensor, length: int, positions: Tensor) -> Tensor:
        """context [B, K, D] is memory and segment, of which the last `length` positions ask; positions [K, D] are the
        sinusoids of the distances K-1, ..., 0. Returns [B, L, D]."""
        mixed = relative_attention(
            self.query(context[:, -length:]),
            self.key_value(context),
            self.position(positions),
            self.content_bias,
            self.position_bias,
        )
        return self.output(mixed)
