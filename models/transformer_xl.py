"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): embedding, given blocks, output layer, memories.

Shape letters as in models/relative_attention.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.operations import OPERATIONS, BlockConfig
from models.relative_attention import Positions, sinusoidal_encodings
from models.softmax import AdaptiveSoftmax, FullSoftmax

# Of n-grams. Products of both fit into int64. With a small factor, pairs of frequent tokens would meet in few rows.
HASH_FACTOR, HASH_PRIME = 1_812_433_253, 2**31 - 1
# Of a block: its last inputs [B, M, D], the memory of GatedDeltaNet.step(), or None if it has no memory
Memory = Tensor | tuple[Tensor, Tensor] | None


def map_memory(function: Callable, *memories: Memory) -> Memory:
    """A memory with the results of function(one tensor of each memory). The memories belong to one block."""
    if memories[0] is None:
        return None
    return tuple(map(function, *memories)) if isinstance(memories[0], tuple) else function(*memories)


class Memories(NamedTuple):
    """State of a stream between two segments.

    blocks: the memory of each block; offset: positions read; last: the last tokens [B, T], for n-grams.
    """

    blocks: list[Memory]
    offset: int
    last: Tensor | None = None

    def map(self, function: Callable) -> "Memories":
        """The memories with function(tensor) in place of each tensor."""
        blocks = [map_memory(function, memory) for memory in self.blocks]
        return Memories(blocks, self.offset, map_memory(function, self.last))

    def split(self, parts: int) -> list["Memories"]:
        """Split the batch rows into equal parts."""
        return [self.map(lambda x, part=part: x.chunk(parts)[part]) for part in range(parts)]

    @staticmethod
    def join(parts: list["Memories"]) -> "Memories":
        """The inverse of split()."""
        if len(parts) == 1:
            return parts[0]
        memories = zip(*([*part.blocks, part.last] for part in parts), strict=True)
        *blocks, last = [map_memory(lambda *x: torch.cat(x), *memory) for memory in memories]
        return Memories(blocks, parts[0].offset, last)


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

    Each length has a table. N-grams share its rows by a hash. The rows begin as zeros. They cost parameters, but nearly
    no time.
    """

    def __init__(self, rows: Sequence[int], d_model: int):
        super().__init__()
        self.tables = nn.ParameterList(torch.zeros(count, d_model) for count in rows)

    def forward(self, tokens: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
        """tokens [B, L]; last [B, T]: the tokens before them, None: the stream begins.

        Returns the embeddings [B, L, D], and the last T = len(tables) tokens [B, T] for the next segment.
        """
        reach = len(self.tables)
        last = tokens.new_full((len(tokens), reach), -1) if last is None else last
        context, key, total = torch.cat([last, tokens], dim=1), tokens, 0.0  # [B, T + L], [B, L]
        for distance, table in enumerate(self.tables, start=1):
            key = (key * HASH_FACTOR + context[:, reach - distance : -distance]) % HASH_PRIME
            total = total + F.embedding(key % len(table), table)
        return total, context[:, -reach:]


class Block(nn.Module):
    """A block with a fixed operation: x + operation(x)."""

    def __init__(self, operation: nn.Module):
        super().__init__()
        self.operation = operation
        self.reach, self.period, self.stride = operation.reach, operation.period, operation.stride
        self.carries_state = operation.carries_state

    def forward(self, x: Tensor, memory: Memory, positions: Positions, memory_length: int) -> tuple[Tensor, Memory]:
        if self.carries_state:
            branch, state = self.operation.step(x, memory)
            return x + branch, (state if memory_length else None)
        return x + self.operation(x, memory, positions), extend_memory(self.reach, memory, x, memory_length)


def extend_memory(reach: int | None, memory: Tensor | None, x: Tensor, memory_length: int) -> Tensor | None:
    """The last positions of memory [B, M, D] and x [B, L, D], detached: at most memory_length and `reach`, or None."""
    kept = memory_length if reach is None else min(memory_length, reach)
    if kept == 0:
        return None
    x = x.detach()
    if memory is None or x.shape[1] >= kept:
        return x[:, -kept:]
    return torch.cat([memory, x], dim=1)[:, -kept:]


class TransformerXL(nn.Module):
    """A language model that reads a stream in segments, with a memory of each block's earlier inputs.

    Args:
        blocks: each block(x [B, L, D], memory, positions, memory_length) returns [B, L, D] and the
            memory for the next segment.
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
        blocks, offset, last = memories or ([None] * len(self.blocks), 0, None)
        length = tokens.shape[1]
        x, last = self.embed(tokens, offset, last)
        x = self.dropout(x)  # [B, L, D]
        longest = max((memory.shape[1] for memory in blocks if isinstance(memory, Tensor)), default=0)
        positions = self.positions(longest + length, offset)
        extended = Memories([], offset + length, last if memory_length else None)
        for block, memory in zip(self.blocks, blocks, strict=True):
            inputs = x, memory, positions, memory_length
            recompute = self.recompute and torch.is_grad_enabled()
            x, memory = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
            extended.blocks.append(memory)
        hidden = self.dropout(self.final_norm(x))
        return self.head(hidden.flatten(0, 1), targets.flatten()).view(targets.shape), extended

    def positions(self, keys: int, offset: int = 0) -> Positions:
        """Positions of a segment with K = `keys` keys. offset: positions of the stream before it."""
        weight, encodings = self.embedding.weight, None
        if self.relative:
            encodings = sinusoidal_encodings(keys, self.d_model, weight.dtype, weight.device)
        return Positions(encodings, offset % self.stride)

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


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a weight matrix. The attention biases u and v are not, although they are 2-d."""
    return parameter.ndim == 2 and not name.endswith("bias")


def initialise(model: TransformerXL, depth_scaled: bool) -> None:
    """Draw weight matrices, but for those of n-grams, with standard deviation 1 / sqrt(columns).

    That keeps the size of activations.

    depth_scaled: multiply the weights of the last layer of each branch by 1 / sqrt(branches), so that the residual
    stream does not grow with depth: the 1 / sqrt(2N) of arXiv 1904.10509, section 5.2, whose layers have two branches.
    """
    for name, parameter in model.named_parameters():
        if is_matrix(name, parameter) and not name.startswith("ngrams."):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if depth_scaled and name.startswith("blocks.") and name.endswith("output.weight"):
                parameter.data *= len(model.blocks) ** -0.5


def build_pattern(
    pattern: Sequence[tuple[str, dict[str, int]]], config: BlockConfig, vocab_size: int, **options
) -> TransformerXL:
    """Build the Transformer-XL of a fixed layer pattern: the name and the sizes of each block's operation."""
    blocks = [Block(OPERATIONS[name](config, **sizes)) for name, sizes in pattern]
    return TransformerXL(blocks, config, vocab_size, **options)
