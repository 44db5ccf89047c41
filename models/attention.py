"""Relative attention of Transformer-XL (Dai et al. 2019, arXiv 1901.02860, section 3.3 and appendix B).

Shape letters, here and in the other files of this folder:
B batch, L segment (queries), M memory, K = M + L keys, D model width, H heads, E = D / H head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sinusoids(length: int, width: int, dtype=torch.float32, device=None) -> Tensor:
    """Sinusoidal encodings [length, width] of the distances length-1, ..., 1, 0, in that order.

    The sines stand before the cosines, as in Transformer-XL (arXiv 1901.02860, appendix B); width must be even.
    """
    distance = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=device)
    frequency = 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


def relative_shift(scores: Tensor) -> Tensor:
    """Turn scores by distance into scores by key, [..., L, K] -> [..., L, K] (arXiv 1901.02860, appendix B).

    Column c of the input belongs to the distance K-1-c. In the output, column j of row i holds the score of the
    distance M+i-j between that query and that key. Entries with j > M+i (the future) hold other rows' values and must
    be masked. A column of padding moves every row on by one more than the row before, so that a reshape does it all.
    """
    length, keys = scores.shape[-2:]
    padded = F.pad(scores, (1, 0)).view(*scores.shape[:-2], keys + 1, length)
    return padded[..., 1:, :].reshape(scores.shape)


def causal_mask(length: int, keys: int, device=None) -> Tensor:
    """Boolean [L, K], true where key j lies in the future of query i: j > M + i."""
    return torch.ones(length, keys, dtype=torch.bool, device=device).triu(keys - length + 1)


def relative_attention(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, content_bias: Tensor, position_bias: Tensor
) -> Tensor:
    """Causal attention with relative positions (arXiv 1901.02860, equation for A^rel in section 3.3, terms a to d).

    query [B, H, L, E]; key, value [B, H, K, E]; position [H, K, E], the projected encodings of the distances
    K-1, ..., 0; content_bias (u) and position_bias (v) [H, E]. Returns [B, H, L, E].
    """
    batch, heads, length, width = query.shape
    keys = key.shape[2]
    content = (query + content_bias[:, None]) @ key.transpose(-1, -2)
    # Positions are the same for every row of the batch: one matrix product per head instead of one per row and head.
    by_head = (query + position_bias[:, None]).transpose(0, 1).reshape(heads, batch * length, width)
    by_distance = (by_head @ position.transpose(-1, -2)).view(heads, batch, length, keys).transpose(0, 1)
    scores = (content + relative_shift(by_distance)) * width**-0.5
    scores = scores.masked_fill(causal_mask(length, keys, scores.device), float("-inf"))
    return scores.softmax(dim=-1) @ value


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

    def split_heads(self, x: Tensor) -> Tensor:
        """[..., T, D] -> [..., H, T, E]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def forward(self, context: Tensor, length: int, positions: Tensor) -> Tensor:
        """context [B, K, D] is memory and segment, of which the last `length` positions ask; positions [K, D] are the
        sinusoids of the distances K-1, ..., 0. Returns [B, L, D]."""
        query = self.split_heads(self.query(context[:, -length:]))
        key, value = self.split_heads(self.key_value(context)).chunk(2, dim=-1)
        position = self.split_heads(self.position(positions))
        mixed = relative_attention(query, key, value, position, self.content_bias, self.position_bias)
        return self.output(mixed.transpose(1, 2).flatten(-2))
