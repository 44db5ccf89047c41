"""Transformer-XL by composition (Dai et al. 2019, arXiv 1901.02860): embedding, blocks, output layer, memories.

The backbone is given its blocks and cannot tell searched ones from fixed ones. Shape letters as in attention.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.attention import Positions, sinusoids
from models.operations import OPERATIONS, BlockConfig, Operation
from models.softmax import AdaptiveSoftmax, FullSoftmax


class Memories(NamedTuple):
    """What a stream leaves for its next segment: of each block the inputs [B, M, D] that it may look back at, or None;
    and how many positions of the stream have been read."""

    blocks: list[Tensor | None]
    offset: int

    def split(self, parts: int) -> list["Memories"]:
        """The rows in so many equal parts."""
        blocks = [[None] * parts if memory is None else memory.chunk(parts) for memory in self.blocks]
        return [Memories([block[part] for block in blocks], self.offset) for part in range(parts)]

    @staticmethod
    def join(parts: list["Memories"]) -> "Memories":
        """split(), backwards."""
        if len(parts) == 1:
            return parts[0]
        blocks = zip(*(part.blocks for part in parts), strict=True)
        return Memories([None if block[0] is None else torch.cat(block) for block in blocks], parts[0].offset)


class EmbeddingFunction(torch.autograd.Function):
    """Rows of a table, and the table itself for a tied output layer: so that the table's two gradients meet here.

    Left to autograd, the embedding's gradient would be a second table, nearly all zeros, to be filled and added. Here
    it is added into the output layer's gradient, which must therefore be that layer's own and nobody else's.
    """

    @staticmethod
    def forward(ctx, table, tokens):
        ctx.save_for_backward(tokens)
        ctx.shape = table.shape
        ctx.set_materialize_grads(False)
        return F.embedding(tokens, table), table.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, to_rows, to_table):
        (tokens,) = ctx.saved_tensors
        if to_rows is None:
            return to_table, None
        if to_table is None:  # no tied output layer
            to_table = to_rows.new_zeros(ctx.shape)
        return to_table.index_add_(0, tokens.flatten(), to_rows.reshape(-1, ctx.shape[1])), None


class Embedding(nn.Module):
    """Token embedding times sqrt(D): a table small enough for a tied output layer then gives inputs of size 1."""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, L] -> [B, L, D], and the table [V, D], for a tied output layer to use in
        place of `weight`, so that their gradients share a buffer."""
        rows, table = EmbeddingFunction.apply(self.weight, tokens)
        return rows * self.weight.shape[1] ** 0.5, table


class GridPositions(nn.Module):
    """Learned embeddings of row, column and channel, for a stream of images of such a grid, one after the other, row
    by row (arXiv 1904.10509, section 5.3). Their sum has the size of a token's embedding."""

    def __init__(self, rows: int, columns: int, channels: int, d_model: int):
        super().__init__()
        self.tables = nn.ParameterList(torch.empty(count, d_model) for count in (rows, columns, channels))

    def forward(self, start: int, length: int) -> Tensor:
        """[L, D] for the positions start, start + 1, ... of the stream, which begins with an image."""
        rows, columns, channels = (len(table) for table in self.tables)
        place = torch.arange(start, start + length, device=self.tables[0].device)
        row, column, channel = place // (columns * channels) % rows, place // channels % columns, place % channels
        total = sum(F.embedding(index, table) for index, table in zip((row, column, channel), self.tables, strict=True))
        return total * (total.shape[1] / len(self.tables)) ** 0.5


class Block(nn.Module):
    """x + operation(x): a block whose operation is fixed."""

    def __init__(self, operation: nn.Module):
        super().__init__()
        self.operation = operation
        self.needs_memory, self.period = operation.needs_memory, operation.period

    def forward(self, x: Tensor, memory: Tensor | None, positions: Positions) -> Tensor:
        return x + self.operation(x, memory, positions)


def extend_memory(memory: Tensor | None, x: Tensor, memory_length: int) -> Tensor | None:
    """The last memory_length positions of memory [B, M, D] and x [B, L, D], without gradient; None for length 0."""
    if memory_length == 0:
        return None
    x = x.detach()
    if memory is None or x.shape[1] >= memory_length:
        return x[:, -memory_length:]
    return torch.cat([memory, x], dim=1)[:, -memory_length:]


class TransformerXL(nn.Module):
    """A language model that reads a stream segment by segment, with a memory of each block's earlier inputs.

    embedding(tokens) -> inputs [B, L, D] and its table [V, D]; block(x, memory, positions) -> x;
    head(hidden [N, D], targets [N], table or None) -> nll [N]; grid(start, L) -> [L, D], what is added to embeddings
    where attention does not look at distances. recompute: keep no block's inner values for the backward pass, but its
    input, and run it once more there (arXiv 1604.06174; arXiv 1904.10509, section 5.4). depth_scaled: see initialise.
    """

    def __init__(
        self,
        embedding: nn.Module,
        blocks: Sequence[nn.Module],
        head: nn.Module,
        sizes: BlockConfig,
        grid: nn.Module | None = None,
        recompute: bool = False,
        depth_scaled: bool = False,
    ):
        super().__init__()
        self.d_model, self.relative, self.stride = sizes.d_model, sizes.relative, sizes.stride
        self.recompute = recompute
        self.embedding = embedding
        self.grid = grid
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.LayerNorm(sizes.d_model) if sizes.norm == "pre" else nn.Identity()
        self.head = head
        self.tied = getattr(head, "weight", None) is embedding.weight
        self.dropout = nn.Dropout(sizes.dropout)
        initialise(self, depth_scaled)

    def forward(
        self, tokens: Tensor, targets: Tensor, memories: Memories | None, memory_length: int
    ) -> tuple[Tensor, Memories]:
        """tokens, targets [B, L]; memories: those that the segment before returned, or None for a fresh stream.

        Returns the nll of each target in nats, [B, L], and the memories for the next segment, each at most
        memory_length long; a block that never looks back gets None.
        """
        blocks, offset = memories or ([None] * len(self.blocks), 0)
        length = tokens.shape[1]
        embedded, table = self.embedding(tokens)
        x = self.dropout(embedded if self.grid is None else embedded + self.grid(offset, length))
        encodings = None
        if self.relative:
            longest = max((memory.shape[1] for memory in blocks if memory is not None), default=0)
            encodings = sinusoids(longest + length, self.d_model, x.dtype, x.device)
        positions = Positions(encodings, offset % self.stride)
        extended = Memories([], offset + length)
        for block, memory in zip(self.blocks, blocks, strict=True):
            extended.blocks.append(extend_memory(memory, x, memory_length) if block.needs_memory else None)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, memory, positions, use_reentrant=False)
            else:
                x = block(x, memory, positions)
        hidden = self.dropout(self.final_norm(x))
        nll = self.head(hidden.flatten(0, 1), targets.flatten(), table if self.tied else None)
        return nll.view(targets.shape), extended


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter multiplies: neither a norm's gain nor a bias, of which u and v have two dimensions too."""
    return parameter.ndim == 2 and not name.endswith("bias")


def initialise(model: TransformerXL, depth_scaled: bool) -> None:
    """Normal weights of standard deviation 1 / sqrt(inputs): an input of size 1 stays so. Biases stay zero.

    depth_scaled: the last layer of each branch is scaled by 1 / sqrt(branches), so that the residual stream does not grow
    with depth: the 1 / sqrt(2N) of arXiv 1904.10509, section 5.2, whose N layers have two branches each; a block has one.
    """
    for name, parameter in model.named_parameters():
        if is_matrix(name, parameter):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    if depth_scaled:
        for operation in filter(lambda module: isinstance(module, Operation), model.modules()):
            operation.output_layer().weight.data *= len(model.blocks) ** -0.5


def build_output(d_model: int, vocab_size: int, cutoffs: list[int], div_value: int, weight: nn.Parameter | None):
    """Adaptive softmax where there are cutoffs, full softmax otherwise; tied where a weight is given."""
    if cutoffs:
        return AdaptiveSoftmax(d_model, vocab_size, cutoffs, div_value, weight)
    return FullSoftmax(d_model, vocab_size, weight)


def build_backbone(
    blocks: Sequence[nn.Module],
    sizes: BlockConfig,
    vocab_size: int,
    cutoffs: Sequence[int] = (),
    tie_embeddings: bool = True,
    div_value: int = 1,
    grid: Sequence[int] = (),
    recompute: bool = False,
    depth_scaled: bool = False,
) -> TransformerXL:
    """Compose a TransformerXL around the given blocks. grid: rows, columns and channels of images, where their
    embeddings take the place of relative positions. Raises ValueError where sizes.relative says otherwise."""
    if bool(grid) == sizes.relative:
        raise ValueError(f"relative={sizes.relative} with grid={list(grid)}: attention needs distances or a grid")
    embedding = Embedding(vocab_size, sizes.d_model)
    tied = embedding.weight if tie_embeddings else None
    head = build_output(sizes.d_model, vocab_size, list(cutoffs), div_value, tied)
    positions = GridPositions(*grid, sizes.d_model) if grid else None
    return TransformerXL(embedding, blocks, head, sizes, positions, recompute, depth_scaled)


def build_pattern(pattern: Sequence[str], sizes: BlockConfig, vocab_size: int, **options) -> TransformerXL:
    """The ordinary Transformer-XL of a fixed layer pattern, a list of operation names."""
    return build_backbone([Block(OPERATIONS[name](sizes)) for name in pattern], sizes, vocab_size, **options)
