"""Candidate operations of a block. Each computes the residual branch: block(x) = x + operation(x).

A search weighs only the branch, because the term x is common to all candidates. nas/core/blocks.py describes the
sizes of each operation, which are the arguments of its constructor after `config`. The last layer of each branch is
called `output`. Shape letters as in models/relative_attention.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.linear import TAPS, LinearAttention, convolve, new_kernel
from models.relative_attention import Positions, RelativeAttention
from models.sparse import KeySet, LocalBlock, LocalWindow, SparseAttention, StridedColumn, SummaryColumns


class SquaredReLU(nn.Module):
    """max(0, x)^2 (Primer, arXiv 2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()


ACTIVATIONS = {"relu_squared": SquaredReLU, "relu": nn.ReLU, "gelu": nn.GELU}


@dataclass(frozen=True)
class BlockConfig:
    """Options of every operation.

    dropout: of embeddings, of the results of branches, within dense blocks, and of the network's last layer.
    norm: `pre` (x + f(norm(x))) or `post` (norm(x + f(x))). relative: whether attention uses relative positions.
    """

    d_model: int
    dropout: float = 0.0
    norm: str = "pre"
    activation: str = "relu"
    relative: bool = True


class Operation(nn.Module):
    """A residual branch with its own normalisation and dropout. Subclasses implement branch().

    reach: the number of positions before the segment that it reads at most; 0: none; None: all.
    period: the result does not change if the whole stream is shifted by this number of positions.
    stride: positions of a row; masks of sparse attention depend on the place of a segment in its row.
    step: a method (x [B, L, D], state) -> [B, L, D] and the new state, without gradient; or None. The state replaces
    the inputs before the segment; None: the stream begins. Generation calls it.
    one: a method (x [B, D], state) -> the branch [B, D] of one position, without normalisation and dropout, in few
    calls, and the new state; or None.
    carries_state: whether training calls step() too, because the state depends on the whole stream.
    has_keys: whether it attends to the keys of earlier positions.
    """

    reach: int | None = 0
    period = stride = 1
    step = one = None
    carries_state = has_keys = False

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.post_norm = config.norm == "post"
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor | None, positions: Positions) -> Tensor:
        """x [B, L, D], memory: the inputs before the segment [B, M, D], or None -> [B, L, D]."""
        context = x
        if memory is not None and self.reach != 0:
            context = torch.cat([memory if self.reach is None else memory[:, -self.reach :], x], dim=1)  # [B, M + L, D]
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

    reach, has_keys = None, True

    def __init__(self, config: BlockConfig, heads: int, key_heads: int, key_sets: tuple[KeySet, ...] = ()):
        """key_sets: the keys that a query attends to, as SparseAttention takes them; none: all keys."""
        super().__init__(config)
        shape = config.d_model, heads, key_heads, config.relative
        self.attention = SparseAttention(*shape, key_sets) if key_sets else RelativeAttention(*shape)

    def branch(self, context, length, positions):
        return self.attention(context, length, positions)


class SparseStrided(Attention):
    """Strided sparse attention (arXiv 1904.10509, section 4.3): a local window and a strided column."""

    def __init__(self, config, stride: int, heads: int, key_heads: int):
        super().__init__(config, heads, key_heads, (LocalWindow(stride), StridedColumn(stride)))
        self.stride = stride


class SparseFixed(Attention):
    """Fixed sparse attention (arXiv 1904.10509, section 4.3): the query's block, and the last columns of all rows."""

    def __init__(self, config, stride: int, summary: int, heads: int, key_heads: int):
        super().__init__(config, heads, key_heads, (LocalBlock(stride), SummaryColumns(stride, summary)))
        self.stride = self.period = stride  # the keys of a query depend on its column


class Window(Attention):
    """Sliding-window attention (arXiv 2004.05150, section 3.1)."""

    def __init__(self, config, window: int, heads: int, key_heads: int):
        super().__init__(config, heads, key_heads, (LocalWindow(window),))
        self.reach = window


class GatedDeltaNet(Operation):
    """Linear attention with a state of fixed size instead of keys and values (arXiv 2412.06464).

    step() carries the state from segment to segment. forward() reads the memory of inputs anew, without gradient.
    """

    reach = None
    carries_state = True

    def __init__(self, config, heads: int, chunk: int):
        super().__init__(config)
        self.attention = LinearAttention(config.d_model, heads, chunk)

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


class ShortConvolution(Operation):
    """Gated short convolution (LFM2, arXiv 2511.23404): output(b * convolve(a * value)), with a, b, value = project(x).

    The convolution is causal and has a kernel for each channel.
    """

    def __init__(self, config, kernel: int):
        super().__init__(config)
        self.reach = kernel - 1
        self.project = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.kernel = new_kernel(kernel, config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)

    def branch(self, context, length, positions):
        return self.mix(context, length, None)[0]

    def step(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """As Operation.step. A state holds a * value [B, T, D] of the last T = kernel - 1 positions."""
        branch, products = self.mix(self.prepare(x), x.shape[1], state)
        return self.finish(x, branch), products[:, products.shape[1] - self.reach :].detach()

    def one(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        a, b, value = F.linear(x, self.project.weight).chunk(3, dim=-1)
        products = torch.cat([state, (a * value)[:, None]], dim=1)  # [B, T + 1, D]
        mixed = (products * self.kernel[:, 0]).sum(dim=1)  # [B, D]
        return F.linear(b * mixed, self.output.weight), products[:, 1:]

    def mix(self, context: Tensor, length: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """The branch [B, L, D] of the last L = `length` positions, and the products a * value [B, T + K, D].

        context [B, K, D]: positions without `before`; before: products of earlier positions, None: zeros.
        """
        a, b, value = self.project(context).chunk(3, dim=-1)
        before = context.new_zeros(len(context), self.reach, context.shape[2]) if before is None else before
        products = torch.cat([before, a * value], dim=1)  # [B, T + K, D]
        return self.output(b[:, -length:] * convolve(products, self.kernel, length)), products


class Dense(Operation):
    """Position-wise feed-forward network (arXiv 1706.03762, section 3.3)."""

    def __init__(self, config: BlockConfig, d_ffn: int):
        super().__init__(config)
        self.expand = nn.Linear(config.d_model, d_ffn)
        self.activation = ACTIVATIONS[config.activation]()
        self.output = nn.Linear(d_ffn, config.d_model)

    def branch(self, context, length, positions):
        return self.output(self.dropout(self.activation(self.expand(context))))

    def one(self, x: Tensor, state: None) -> tuple[Tensor, None]:
        hidden = self.activation.forward(F.linear(x, self.expand.weight, self.expand.bias))
        return F.linear(hidden, self.output.weight, self.output.bias), None


class Identity(nn.Module):
    """An empty branch. A search can choose it to leave out a block."""

    reach, period, stride, step, one, carries_state, has_keys = 0, 1, 1, None, None, False, False

    def __init__(self, config: BlockConfig):
        super().__init__()

    def forward(self, x, memory, positions):
        return x.new_zeros(())  # broadcasts over [B, L, D]


OPERATIONS = {
    "attention": Attention,
    "sparse_strided": SparseStrided,
    "sparse_fixed": SparseFixed,
    "window": Window,
    "linear": GatedDeltaNet,
    "conv": ShortConvolution,
    "dense": Dense,
    "identity": Identity,
}
