"""The base class of operations. An operation computes the residual branch of a block: block(x) = x + operation(x).

A search weighs only the branch, because the term x is common to all candidates. Shape letters as in
models/relative_attention.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

State = dict[str, Tensor]  # what an operation knows of earlier positions; the rows are the first dimension of each


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


class Segment(NamedTuple):
    """What an operation may know of a segment, besides its inputs.

    encodings [>= K, D]: encodings of the distances ..., 2, 1, 0, in this order; None for attention without positions.
    start: number of positions before the segment, modulo the stride of sparse attention, so that masks can be cached.
    memory: the most earlier positions that a memory of inputs shows. kept: the most that it keeps for the next segment.
    tokens [B, L]: None where no operation reads them. filled: how many of the earlier positions in a state of fixed
    size exist; None: all of them.
    """

    encodings: Tensor | None
    start: int = 0
    memory: int = 0
    kept: int = 0
    tokens: Tensor | None = None
    filled: Tensor | None = None


def missing(segment: Segment, count: int) -> Tensor:
    """Which of the last `count` positions before a segment do not exist [count], the oldest first."""
    return torch.arange(count, 0, -1, device=segment.filled.device) > segment.filled


def last(x: Tensor, count: int, dim: int = 1) -> Tensor:
    """At most the last `count` entries of a dimension, a view. count may be a symbol of an export."""
    first = torch.sym_max(0, x.shape[dim] - count)
    return x.narrow(dim, first, x.shape[dim] - first)


def extend(memory: Tensor, x: Tensor, kept: int) -> Tensor:
    """At most the last `kept` positions of memory [B, M, ..] and x [B, L, ..], detached."""
    x = x.detach()
    if not torch.compiler.is_exporting() and x.shape[1] >= kept:
        return last(x, kept)
    return last(torch.cat([memory, x], dim=1), kept)


def as_memory(x: Tensor, tokens: Tensor | None, reads_tokens: bool) -> State:
    """A memory of inputs, and of their tokens if an operation reads them."""
    return {"memory": x, "tokens": tokens} if reads_tokens else {"memory": x}


def limit(count: int, reach: int | None) -> int:
    """At most `reach`; None: any number."""
    return count if reach is None else torch.sym_min(count, reach)


class TokenReader:
    """Reads a stream position by position with the cached form of an operation. state: after the last position."""

    def __init__(self, operation: nn.Module):
        self.operation, self.state = operation, {}

    def __call__(self, x: Tensor, segment: Segment) -> Tensor:
        """What a block makes of the next position x [B, D]. segment: of one position."""
        branch, self.state = self.operation(x[:, None], self.state, segment)
        return x + branch[:, 0]


class Operation(nn.Module):
    """A residual branch with its own normalisation and dropout: (x, state) -> (branch, state).

    A subclass has one of two forms:

    - branch(): a function of the last inputs. Their number before the segment is `reach`. The state is a memory of
      inputs, which this class keeps.
    - begin() and forward(): a state of its own, after which no earlier input is needed. It must be detached. If it
      depends on the whole stream, carries_state is true.

    Its last linear layer is called `output`.

    reach: the number of positions before the segment that branch() reads at most; 0: none; None: all.
    period: the result does not change if the whole stream is shifted by this number of positions.
    stride: positions of a row; masks of sparse attention depend on the place of a segment in its row.
    reads_tokens: whether branch() needs segment.tokens, which are then those of the context [B, M + L].
    restarts: whether generation without memory begins the state anew with each segment, as training does.
    """

    reach: int | None = 0
    period = stride = 1
    carries_state = reads_tokens = False
    restarts, Reader = True, TokenReader

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.post_norm = config.norm == "post"
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def begin(self, rows: int, room: int = 0) -> State:
        """The state of `rows` streams that begin. Sizes of 0 grow with the stream, all in the same way.

        room: cached forms and begin() of subclasses may have a state with places for so many positions, which does not
        grow; then forward() heeds segment.filled.
        """
        if self.reach == 0:
            return {}
        weight = self.norm.weight
        tokens = weight.new_zeros(rows, 0, dtype=torch.int64)
        return as_memory(weight.new_zeros(rows, 0, len(weight)), tokens, self.reads_tokens)

    def forward(self, x: Tensor, state: State, segment: Segment) -> tuple[Tensor, State]:
        """x [B, L, D], and the state of the positions before it -> the branch [B, L, D], and the next state."""
        if self.reach == 0:
            return self.finish(x, self.branch(self.prepare(x), x.shape[1], segment)), {}
        inputs = as_memory(x, segment.tokens, self.reads_tokens)
        seen, kept = limit(segment.memory, self.reach), limit(segment.kept, self.reach)
        contexts = {name: torch.cat([last(state[name], seen), new], dim=1) for name, new in inputs.items()}
        if self.reads_tokens:
            segment = segment._replace(tokens=contexts["tokens"])
        branch = self.branch(self.prepare(contexts["memory"]), x.shape[1], segment)
        return self.finish(x, branch), {name: extend(state[name], new, kept) for name, new in inputs.items()}

    def branch(self, context: Tensor, length: int, segment: Segment) -> Tensor:
        """The branch [B, L, D] of the last L = `length` positions of a context of normalised inputs [B, M + L, D]."""
        raise NotImplementedError

    def prepare(self, context: Tensor) -> Tensor:
        return context if self.post_norm else self.norm(context)

    def finish(self, x: Tensor, branch: Tensor) -> Tensor:
        """The change of x that a branch makes."""
        return self.norm(x + self.dropout(branch)) - x if self.post_norm else self.dropout(branch)

    @property
    def has_own_state(self) -> bool:
        return type(self).begin is not Operation.begin

    @torch.no_grad()
    def remember(self, inputs: Tensor, segment: Segment) -> State:
        """The state after inputs [B, M, D], with which a stream begins. segment: theirs."""
        if self.reach == 0:
            return {}
        if not self.has_own_state:
            return as_memory(inputs, segment.tokens, self.reads_tokens)
        state = self.begin(len(inputs))
        return self(inputs, state, segment)[1] if inputs.shape[1] else state

    def cached(self, encodings: Tensor | None) -> nn.Module:
        """The same function with fixed weights; it has begin(), forward(), Reader, restarts. encodings: of Segment."""
        return self

    def initialise(self, scale: float) -> None:
        """Draw the weights of linear layers with standard deviation 1 / sqrt(inputs), which keeps the size of
        activations; of the last layer, times `scale`. Other parameters keep what the constructor gave them.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if name.endswith("output"):
                    module.weight.data *= scale

    def missing_piece(self) -> str:
        """What the class lacks, as text; "" if it is complete."""
        own_forward = type(self).forward is not Operation.forward
        if not own_forward and type(self).branch is Operation.branch:
            return "needs branch(), or begin() and forward()"
        if self.reach != 0 and own_forward != self.has_own_state:
            return "has one of begin() and forward(); it needs both, or branch()"
        if self.carries_state and not self.has_own_state:
            return "carries a state, so it needs begin() and forward()"
        if any(len(part) != 2 for part in self.begin(2).values()):
            return "has a state without the rows as its first dimension"
        if list(self.parameters()) and not any(name.endswith("output") for name, _ in self.named_modules()):
            return "needs a last layer that is called output"
        return ""


class BareReader(TokenReader):
    """Uses functions of the bare weights, because calls of modules take longer than the products of one position."""

    def __init__(self, cached: nn.Module):
        operation = getattr(cached, "operation", cached)
        super().__init__(operation)
        norm, self.post_norm = operation.norm, operation.post_norm
        self.options = norm.normalized_shape, norm.weight, norm.bias, norm.eps

    def __call__(self, x: Tensor, segment: Segment) -> Tensor:
        if self.post_norm:
            return torch.layer_norm(x + self.branch(x, segment), *self.options)
        return x + self.branch(torch.layer_norm(x, *self.options), segment)

    def branch(self, x: Tensor, segment: Segment) -> Tensor:
        """The branch [B, D] of the next position, whose normalised input is x [B, D]."""
        raise NotImplementedError
