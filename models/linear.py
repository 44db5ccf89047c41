"""Gated linear attention with the delta rule (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464, section 3.4).

Shape letters as in models/attention.py.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.attention import join_heads, split_heads
from models.delta import gated_delta

TAPS = 4  # positions that the short convolution reads


class LinearAttention(nn.Module):
    """Heads with a state of fixed size instead of keys and values. They have no positions of their own.

    Queries, keys and values pass through a short causal convolution. Keys and queries have length 1. Each head decays
    its state and writes to it at rates that depend on the input. The output is normalised per head and gated.

    Raises ValueError if heads does not divide d_model.
    """

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        if d_model % heads:
            raise ValueError(f"heads={heads} must divide d_model={d_model}")
        self.heads, width = heads, d_model // heads
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.taps = nn.Parameter(torch.empty(TAPS, 3 * d_model))
        self.gates = nn.Linear(d_model, 2 * heads)  # of the decay and of the rate of writing
        self.log_speed = nn.Parameter(torch.zeros(heads))  # of the decay
        self.norm = nn.RMSNorm(width)
        self.output_gate = nn.Linear(d_model, d_model, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)

    def forward(self, context: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read context [B, K, D] after a state [B, H, E, E], or from the start of a stream if it is None.

        Returns [B, K, D] and the state after the context.
        """
        mixed = self.convolve(self.query_key_value(context))  # [B, K, 3D]
        query, key, value = split_heads(F.silu(mixed), self.heads, 3).transpose(1, 2)  # [B, H, K, E] each
        decay, rate = self.gates(context).transpose(1, 2).chunk(2, dim=1)  # [B, H, K] each
        log_decay = -self.log_speed.exp()[:, None] * F.softplus(decay)
        key, query = F.normalize(key, dim=-1), F.normalize(query, dim=-1)
        read, state = gated_delta(query, key, value, log_decay, rate.sigmoid(), state)  # [B, H, K, E]
        read = join_heads(self.norm(read).transpose(0, 1))  # [B, K, D]
        return self.output(read * F.silu(self.output_gate(context))), state

    def convolve(self, x: Tensor) -> Tensor:
        """A causal convolution of each column of x [B, K, 3D] over the last TAPS positions."""
        padded = F.pad(x, (0, 0, TAPS - 1, 0))
        return sum(tap * padded[:, offset : offset + x.shape[1]] for offset, tap in enumerate(self.taps))
