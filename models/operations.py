"""Candidate operations of a block. Each computes the residual branch: block(x) = x + operation(x).

A search weighs only the branch, because the term x is common to all candidates. Shape letters as in
models/attention.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.attention import Positions, RelativeAttention
from models.linear import TAPS, LinearAttention
from models.sparse import KeySet, LocalBlock, LocalWindow, SparseAttention, StridedColumn, SummaryColumns

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


@dataclass(frozen=True)
class BlockConfig:
    """Options of every operation.

    dropout: of embeddings, of the results of branches, within dense blocks, and of the network's last layer.
    norm: `pre` (x + f(norm(x))) or `post` (norm(x + f(x))). relative: whether attention uses relative positions.
    stride, window: see models/sparse.py. Raises ValueError if heads does not divide d_model.
    """

    d_model: int
    heads: int
    d_ffn: int
    dropout: float = 0.0
    norm: str = "pre"
    activation: str = "relu"
    relative: bool = True
    stride: int = 32
    window: int = 32

    def __post_init__(self):
        if self.d_model % self.heads:
            raise ValueError(f"heads={self.heads} must divide d_model={self.d_model}")


class Operation(nn.Module):
    """A residual branch with its own normalisation and dropout. Subclasses implement branch().

    reach: the number of positions before the segment that it reads at most; 0: none; None: all.
    period: the result does not change if the whole stream is shifted by this number of positions.
    carries_state: whether the operation is called through its step(), which carries a state through the stream.
    """

    reach: int | None = 0
    period = 1
    carries_state = False

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.post_norm = config.norm == "post"
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor | None, positions: Positions) -> Tensor:
        """x [B, L, D], memory: the inputs before the segment [B, M, D], or None -> [B, L, D]."""
        context = x if memory is None or self.reach == 0 else torch.cat([memory, x], dim=1)  # [B, M + L, D]
        return self.finish(x, self.branch(self.prepare(context), x.shape[1], positions))

    def prepare(self, context: Tensor) -> Tensor:
        return context if self.post_norm else self.norm(context)

    def finish(self, x: Tensor, branch: Tensor) -> Tensor:
        """The change of x that a branch makes."""
        return self.norm(x + self.dropout(branch)) - x if self.post_norm else self.dropout(branch)

    def branch(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """context [B, M + L, D] -> [B, L, D]"""
        raise NotImplementedError


class Attention(Operation):
    """Multi-head attention with relative positions (arXiv 1901.02860)."""

    reach = None

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        shape, key_sets = (config.d_model, config.heads, config.relative), self.key_sets(config)
        self.attention = SparseAttention(*shape, key_sets) if key_sets else RelativeAttention(*shape)

    @staticmethod
    def key_sets(config: BlockConfig) -> tuple[KeySet, ...]:
        """The sets of keys that a query attends to, as SparseAttention takes them; none: all keys."""
        return ()

    def branch(self, context, length, positions):
        return self.attention(context, length, positions)


class SparseStrided(Attention):
    """Strided sparse attention (arXiv 1904.10509, section 4.3): a local window and a strided column."""

    @staticmethod
    def key_sets(config):
        return LocalWindow(config.stride), StridedColumn(config.stride)


class SparseFixed(Attention):
    """Fixed sparse attention (arXiv 1904.10509, section 4.3): the query's block, and the last columns of all rows."""

    def __init__(self, config):
        super().__init__(config)
        self.period = config.stride  # the keys of a query depend on its column

    @staticmethod
    def key_sets(config):
        return LocalBlock(config.stride), SummaryColumns(config.stride)


class Window(Attention):
    """Sliding-window attention (arXiv 2004.05150, section 3.1)."""

    def __init__(self, config):
        super().__init__(config)
        self.reach = config.window

    @staticmethod
    def key_sets(config):
        return (LocalWindow(config.window),)


class GatedDeltaNet(Operation):
    """Linear attention with a state of fixed size instead of keys and values (arXiv 2412.06464).

    step() carries the state from segment to segment. forward() reads the memory of inputs anew, without gradient.
    """

    reach = None
    carries_state = True

    def __init__(self, config):
        super().__init__(config)
        self.attention = LinearAttention(config.d_model, config.heads)

    def branch(self, context, length, positions):
        return self.attention(context, length)[0]

    def step(self, x: Tensor, memory: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, L, D], and the last step's memory -> [B, L, D], and the memory for the next step, without gradient.

        A memory is the state [B, H, E, E], and the inputs [B, T, D] of the last T <= TAPS - 1 positions.
        """
        state, before = memory or (None, x[:, :0])
        context = torch.cat([before, x], dim=1)  # [B, T + L, D]
        branch, state = self.attention(self.prepare(context), x.shape[1], state)
        return self.finish(x, branch), (state.detach(), context[:, 1 - TAPS :].detach())


class Dense(Operation):
    """Position-wise feed-forward network (arXiv 1706.03762, section 3.3)."""

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.expand = nn.Linear(config.d_model, config.d_ffn)
        self.activation = ACTIVATIONS[config.activation]()
        self.contract = nn.Linear(config.d_ffn, config.d_model)

    def branch(self, context, length, positions):
        return self.contract(self.dropout(self.activation(self.expand(context))))


class Identity(nn.Module):
    """An empty branch. A search can choose it to leave out a block."""

    reach, period, carries_state = 0, 1, False

    def __init__(self, config: BlockConfig):
        super().__init__()

    def forward(self, x, memory, positions):
        return x.new_zeros(())  # broadcasts over [B, L, D]


LAST_LAYERS = ("attention.output.weight", "contract.weight")  # the weights of the last layer of each branch
# CONTRIBUTING.md lists what else a new operation needs.
OPERATIONS = {
    "attention": Attention,
    "sparse_strided": SparseStrided,
    "sparse_fixed": SparseFixed,
    "window": Window,
    "linear": GatedDeltaNet,
    "dense": Dense,
    "identity": Identity,
}
