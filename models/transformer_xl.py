"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): embedding, given blocks, output layer, memories.

Shape letters as in models/relative_attention.py.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.operations.operation import BlockConfig, Operation, Segment, State
from models.operations.registry import build_operation
from models.relative_attention import sinusoidal_encodings
from models.softmax import AdaptiveSoftmax, FullSoftmax

# Of n-grams. Products of both fit into int64. With a small factor, pairs of frequent tokens would meet in few rows.
HASH_FACTOR, HASH_PRIME = 1_812_433_253, 2**31 - 1


class Memories(NamedTuple):
    """State of a stream between two segments.

    blocks: the state of each one, {} if it begins; offset: positions read; last: the last tokens [B, T], for n-grams.
    """

    blocks: list[State]
    offset: int
    last: Tensor | None = None

    def map(self, function: Callable) -> "Memories":
        """The memories with function(tensor) in place of each tensor."""
        blocks = [{name: function(value) for name, value in state.items()} for state in self.blocks]
        return Memories(blocks, self.offset, None if self.last is None else function(self.last))

    @staticmethod
    def join(parts: list["Memories"]) -> "Memories":
        """The memories of all rows, from those of parts of a batch."""
        if len(parts) == 1:
            return parts[0]
        others = [iter(part.tensors()) for part in parts[1:]]
        return parts[0].map(lambda x: torch.cat([x, *map(next, others)]))

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of map()."""
        found = []
        self.map(found.append)
        return found


class GridPositions(nn.Module):
    """Learned embeddings of row, column and channel for a stream of images (arXiv 1904.10509, section 5.3).

    Their sum is scaled to the standard deviation of a token embedding.
    """

    def __init__(self, rows: int, columns: int, channels: int, d_model: int):
        super().__init__()
        self.tables = nn.ParameterList(torch.empty(count, d_model) for count in (rows, columns, channels))

    def forward(self, start: int, length: int) -> Tensor:
        """Embeddings [L, D] of L = `length` positions from `start` on. The stream must begin with a whole image."""
        rows, columns, channels = (len(table) for table in self.tables)
        place = torch.arange(length, device=self.tables[0].device) + start  # [L]
        row, column, channel = place // (columns * channels) % rows, place // channels % columns, place % channels
        total = sum(F.embedding(index, table) for index, table in zip((row, column, channel), self.tables, strict=True))
        return total * (total.shape[1] / len(self.tables)) ** 0.5


class NGramEmbedding(nn.Module):
    """Embeddings of the last 2, 3, ... tokens together (Huang et al. 2025, arXiv 2501.16975: over-encoding).

    Each length has a table. N-grams share its rows, which begin as zeros, by a hash. They cost nearly no time.
    """

    def __init__(self, rows: Sequence[int], d_model: int):
        super().__init__()
        self.tables = nn.ParameterList(torch.zeros(count, d_model) for count in rows)

    def begin(self, rows: int) -> Tensor:
        """The last tokens [B, T] of a stream that begins."""
        return torch.full((rows, len(self.tables)), -1, device=self.tables[0].device)

    def forward(self, tokens: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
        """tokens [B, L]; last [B, T]: the tokens before them, None: the stream begins.

        Returns the embeddings [B, L, D], and the last T = len(tables) tokens [B, T] for the next segment.
        """
        reach = len(self.tables)
        last = self.begin(len(tokens)) if last is None else last
        context, key, total = torch.cat([last, tokens], dim=1), tokens, 0.0  # [B, T + L], [B, L]
        for distance, table in enumerate(self.tables, start=1):
            key = (key * HASH_FACTOR + context[:, reach - distance : -distance]) % HASH_PRIME
            total = total + F.embedding(key % len(table), table)
        return total, context[:, -reach:]


class Block(nn.Module):
    """A block with a fixed operation: x + operation(x)."""

    def __init__(self, operation: Operation):
        super().__init__()
        self.operation = operation
        self.reach, self.period, self.stride = operation.reach, operation.period, operation.stride
        self.carries_state = operation.carries_state

    def begin(self, rows: int) -> State:
        return self.operation.begin(rows)

    def forward(self, x: Tensor, state: State, segment: Segment) -> tuple[Tensor, State]:
        branch, state = self.operation(x, state, segment)
        return x + branch, state


class TransformerXL(nn.Module):
    """A language model that reads a stream in segments, with a memory of each block's earlier inputs.

    Args:
        blocks: each block(x [B, L, D], state, segment) returns [B, L, D] and the next state, and block.begin(rows) the
            first one.
        cutoffs, div_value: see AdaptiveSoftmax. tie_embeddings: whether the output layer has the embedding's weights.
        ngram_rows: rows of the tables of NGramEmbedding; empty: no embeddings of n-grams.
        grid: rows, columns and channels of the images, if grid embeddings replace relative positions.
        recompute: save only the blocks' inputs, and recompute the rest in the backward pass (arXiv 1604.06174;
            arXiv 1904.10509, section 5.4).
        depth_scaled: see initialise().

    Raises ValueError unless exactly one of grid and config.relative is set.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        config: BlockConfig,
        vocab_size: int,
        cutoffs: Sequence[int] = (),
        tie_embeddings: bool = True,
        div_value: int = 1,
        ngram_rows: Sequence[int] = (),
        grid: Sequence[int] = (),
        recompute: bool = False,
        depth_scaled: bool = False,
    ):
        super().__init__()
        if bool(grid) == config.relative:
            raise ValueError(f"relative={config.relative} with grid={list(grid)}: attention needs distances or a grid")
        self.d_model, self.relative = config.d_model, config.relative
        self.stride = math.lcm(*(block.stride for block in blocks))
        self.recompute = recompute
        self.embedding = nn.Embedding.from_pretrained(torch.empty(vocab_size, config.d_model), freeze=False)
        self.ngrams = NGramEmbedding(ngram_rows, config.d_model) if ngram_rows else None
        self.grid = GridPositions(*grid, config.d_model) if grid else None
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        tied = self.embedding.weight if tie_embeddings else None
        if cutoffs:
            self.head = AdaptiveSoftmax(config.d_model, vocab_size, list(cutoffs), div_value, tied)
        else:
            self.head = FullSoftmax(config.d_model, vocab_size, tied)
        self.dropout = nn.Dropout(config.dropout)
        initialise(self, depth_scaled)

    def forward(
        self, tokens: Tensor, targets: Tensor, memories: Memories | None, memory_length: int
    ) -> tuple[Tensor, Memories]:
        """tokens, targets [B, L]; memories: those that the previous segment returned, or None for a new stream.

        Returns the nll of each target [B, L] in nats, and the memories for the next segment, of at most memory_length
        positions. If it is 0, nothing is remembered.
        """
        hidden, memories = self.read(tokens, memories, memory_length)
        return self.head(hidden.flatten(0, 1), targets.flatten()).view(targets.shape), memories

    def read(self, tokens: Tensor, memories: Memories | None, memory_length: int) -> tuple[Tensor, Memories]:
        """As forward(), but returns the inputs of the output layer [B, L, D] instead of the nll."""
        states, offset, last = memories or ([{}] * len(self.blocks), 0, None)
        rows, length = tokens.shape
        x, last = self.embed(tokens, offset, last)
        x = self.dropout(x)  # [B, L, D]
        memory = max((state["memory"].shape[1] for state in states if "memory" in state), default=0)
        segment = Segment(self.encodings(memory + length), offset % self.stride, memory, memory_length, tokens)
        extended = Memories([], offset + length, last if memory_length else None)
        for block, state in zip(self.blocks, states, strict=True):
            inputs = x, state or block.begin(rows), segment
            recompute = self.recompute and torch.is_grad_enabled()
            x, state = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
            extended.blocks.append(state if memory_length else {})
        return self.dropout(self.final_norm(x)), extended

    def encodings(self, count: int) -> Tensor | None:
        """Encodings [count, D] of the distances count - 1, ..., 0; None without relative positions."""
        if not self.relative:
            return None
        return sinusoidal_encodings(count, self.d_model, self.embedding.weight.dtype, self.embedding.weight.device)

    def embed(self, tokens: Tensor, offset: int, last: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Embeddings [B, L, D] of tokens [B, L], and the last tokens for the next call.

        offset: positions of the stream before them; last: what the previous call returned, None: the stream begins.
        Weights have standard deviation 1 / sqrt(D), which a tied output layer needs. The factor sqrt(D) makes it 1.
        """
        x = self.embedding(tokens) * self.d_model**0.5
        if self.ngrams is not None:
            ngrams, last = self.ngrams(tokens, last)
            x = x + ngrams
        return (x if self.grid is None else x + self.grid(offset, tokens.shape[1])), last


def initialise(model: TransformerXL, depth_scaled: bool) -> None:
    """Draw the weights of operations by Operation.initialise(), and other matrices, but for those of n-grams, with
    standard deviation 1 / sqrt(columns).

    depth_scaled: multiply the weights of the last layer of each branch by 1 / sqrt(branches), so that the residual
    stream does not grow with depth: the 1 / sqrt(2N) of arXiv 1904.10509, section 5.2, whose layers have two branches.
    """

    def draw(parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    draw([model.embedding.weight, *(model.grid.tables if model.grid else [])])
    for module in model.blocks.modules():
        if isinstance(module, Operation):
            module.initialise(len(model.blocks) ** -0.5 if depth_scaled else 1.0)
    draw(parameter for parameter in model.head.parameters() if parameter is not model.embedding.weight)


def build_pattern(
    pattern: Sequence[tuple[str, dict[str, int]]], config: BlockConfig, vocab_size: int, **options
) -> TransformerXL:
    """Build the Transformer-XL of a fixed layer pattern: the name and the sizes of each block's operation."""
    blocks = [Block(build_operation(name, config, **sizes)) for name, sizes in pattern]
    return TransformerXL(blocks, config, vocab_size, **options)
