"""The candidate operations of a block. Each computes what the block adds to its input: block(x) = x + operation(x).

Returning the addition, not the sum, lets a search weigh what an operation does without the term in x that all
candidates share. Shape letters as in models/attention.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models import attention, sparse
from models.attention import Positions, RelativeAttention
from models.fused import product_dtype
from models.sparse import SparseAttention
from models.sparse_keys import KeySet, fixed, strided

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


@dataclass(frozen=True)
class BlockConfig:
    """What every operation is built from. norm: `pre` (x + f(norm(x))) or `post` (norm(x + f(x))); relative: whether
    attention looks at distances; stride, summary, factorization: of sparse attention, see models/sparse.py."""

    d_model: int
    heads: int
    d_ffn: int
    dropout: float = 0.0
    norm: str = "pre"
    activation: str = "relu"
    relative: bool = True
    stride: int = 32
    summary: int = 4
    factorization: str = "merged"


class Operation(nn.Module):
    """A branch with its own normalisation and dropout; subclasses give branch().

    needs_memory says whether the operation reads positions before the segment; period: moving the whole stream on by so
    many positions changes nothing.
    """

    needs_memory = False
    period = 1

    def __init__(self, sizes: BlockConfig):
        super().__init__()
        self.post_norm = sizes.norm == "post"
        self.norm = nn.LayerNorm(sizes.d_model)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, memory: Tensor | None, positions: Positions) -> Tensor:
        """x [B, L, D], memory [B, M, D] or None. Returns [B, L, D], or a
        scalar where nothing is added, at whose value nobody looks."""
        context = x if memory is None or not self.needs_memory else torch.cat([memory, x], dim=1)
        if self.post_norm:
            return self.norm(x + self.dropout(self.branch(context, x.shape[1], positions))) - x
        return self.dropout(self.branch(self.norm(context), x.shape[1], positions))

    def branch(self, context: Tensor, length: int, positions: Positions) -> Tensor:
        """context [B, M + L, D] (M = 0 without memory) -> [B, L, D]"""
        raise NotImplementedError

    def output_layer(self) -> nn.Linear:
        """The one that the branch comes out of."""
        raise NotImplementedError

    @classmethod
    def flops(cls, sizes: BlockConfig, batch: int, segment: int, memory: int) -> float:
        """Floating-point operations of a forward pass, per token of the segment; a multiply-add counts as two.
        Matrix products alone are counted, as computed (with the masked half of the scores)."""
        raise NotImplementedError


class Attention(Operation):
    """Relative multi-head attention (arXiv 1901.02860)."""

    needs_memory = True

    def __init__(self, sizes: BlockConfig):
        super().__init__(sizes)
        self.attention = self.build(sizes)

    @staticmethod
    def build(sizes: BlockConfig) -> RelativeAttention:
        return RelativeAttention(sizes.d_model, sizes.heads, sizes.relative)

    def branch(self, context, length, positions):
        return self.attention(context, length, positions)

    def output_layer(self):
        return self.attention.output

    @classmethod
    def flops(cls, sizes, batch, segment, memory):
        return attention.count_flops(sizes.relative, sizes.d_model, batch, segment, memory)


class SparseOperation(Attention):
    """Sparse attention to the two sets of keys that subclasses name."""

    @staticmethod
    def sets(sizes: BlockConfig) -> tuple[KeySet, KeySet]:
        """Raises ValueError where the stride or the summary does not fit."""
        raise NotImplementedError

    @classmethod
    def build(cls, sizes):
        return SparseAttention(sizes.d_model, sizes.heads, cls.sets(sizes), sizes.factorization, sizes.relative)

    @classmethod
    def flops(cls, sizes, batch, segment, memory):
        merged = sizes.factorization == "merged"
        return sparse.count_flops(cls.sets(sizes), merged, sizes.relative, sizes.d_model, batch, segment, memory)


class SparseStrided(SparseOperation):
    """Strided sparse attention (arXiv 1904.10509, section 4.3): the previous positions, and every stride-th before."""

    @staticmethod
    def sets(sizes):
        return strided(sizes.stride)


class SparseFixed(SparseOperation):
    """Fixed sparse attention (arXiv 1904.10509, section 4.3): the own row, and the last columns of all rows."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.period = sizes.stride  # what a position sees depends on its place in the row

    @staticmethod
    def sets(sizes):
        return fixed(sizes.stride, sizes.summary)


class FeedForwardFunction(torch.autograd.Function):
    """W2 dropout(relu(W1 x + b1)) + b2, which keeps its inner values alone: where they are zero, relu or dropout
    stopped the gradient, and elsewhere dropout scaled it."""

    @staticmethod
    def forward(ctx, x, expand, expand_bias, contract, contract_bias, dropout):
        inner = (x @ expand.t()).add_(expand_bias).relu_()
        if dropout:
            F.dropout(inner, dropout, inplace=True)
        ctx.save_for_backward(x, expand, contract, inner)
        ctx.scale = 1 / (1 - dropout)
        return (inner @ contract.t()).add_(contract_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, expand, contract, inner = ctx.saved_tensors
        to_inner = gradient @ contract
        # relu's own gradient, but written where its input stood: the public one would take another [N, F].
        torch.ops.aten.threshold_backward.grad_input(to_inner, inner, 0, grad_input=to_inner)
        if ctx.scale != 1:
            to_inner *= ctx.scale
        to_expand, to_contract = to_inner.t() @ x, gradient.t() @ inner
        return to_inner @ expand, to_expand, to_inner.sum(dim=0), to_contract, gradient.sum(dim=0), None


class Dense(Operation):
    """Position-wise feed-forward network (arXiv 1706.03762, section 3.3)."""

    def __init__(self, sizes: BlockConfig):
        super().__init__(sizes)
        self.expand = nn.Linear(sizes.d_model, sizes.d_ffn)
        self.activation = ACTIVATIONS[sizes.activation]()
        self.inner_dropout = nn.Dropout(sizes.dropout)
        self.contract = nn.Linear(sizes.d_ffn, sizes.d_model)

    def branch(self, context, length, positions):
        if isinstance(self.activation, nn.ReLU):
            dropout = self.inner_dropout.p if self.training else 0.0
            weights = self.expand.weight, self.expand.bias, self.contract.weight, self.contract.bias
            inputs = [x.to(product_dtype(context)) for x in (context.flatten(0, 1), *weights)]
            return FeedForwardFunction.apply(*inputs, dropout).view_as(context)
        return self.contract(self.inner_dropout(self.activation(self.expand(context))))

    def output_layer(self):
        return self.contract

    @classmethod
    def flops(cls, sizes, batch, segment, memory):
        return 2 * 2 * sizes.d_model * sizes.d_ffn


class Identity(nn.Module):
    """Adds nothing: the block that a search may leave out."""

    needs_memory = False
    period = 1

    def __init__(self, sizes: BlockConfig):
        super().__init__()

    def forward(self, x, memory, positions):
        """Returns a zero that broadcasts over [B, L, D]."""
        return x.new_zeros(())

    @classmethod
    def flops(cls, sizes, batch, segment, memory):
        return 0.0


OPERATIONS = {
    "attention": Attention,
    "sparse_strided": SparseStrided,
    "sparse_fixed": SparseFixed,
    "dense": Dense,
    "identity": Identity,
}
