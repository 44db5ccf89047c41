"""Read a stream piece by piece with kept keys, values and states, so that a new position costs one position.

A single position passes functions of the bare weights, because calls of modules would take longer than its products.

Shape letters as in models/attention.py.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from models.attention import Positions
from models.operations import Attention, Identity, Operation
from models.transformer_xl import Block, Memory, TransformerXL, map_memory


class KeyValueCache:
    """The keys and values of the last positions that an attention has read.

    They stand in a buffer with room for the next positions, so that they move only when it is full.

    positions: encodings of the distances context - 1, ..., 0. context: as in Decoder.
    """

    def __init__(self, operation: Attention, positions: Positions, context: int):
        self.operation, self.attention, self.context = operation, operation.attention, context
        self.position = self.attention.project_positions(positions, slice(None))  # [H, K, E]
        # One product gives the queries of keys and of distances with their biases, scaled, and the new key and value.
        query, key_value = self.attention.query.weight, self.attention.key_value.weight
        scale, biases = self.attention.width**-0.5, (self.attention.content_bias, self.attention.position_bias)
        queries = 1 if self.position is None else 2
        self.weight = torch.cat([scale * query] * queries + [key_value])  # [D (+ D) + 2GE, D]
        self.bias = None
        if self.position is not None:
            self.bias = torch.cat([*(scale * bias.flatten() for bias in biases), key_value.new_zeros(len(key_value))])
        self.buffer, self.end = None, 0  # [2, G, B, room, E], and the number of filled places

    def read(self, x: Tensor, start: int) -> Tensor:
        """The operation's result [B, L, D] for the next positions x [B, L, D]. start: as in attend_masked()."""
        inputs = self.operation.prepare(x)
        key_value = self.extend(self.attention.project_keys(inputs))
        position = None if self.position is None else self.position[:, -key_value.shape[3] :]
        return self.operation.finish(x, self.attention.attend_masked(inputs, key_value, position, start))

    def read_one(self, x: Tensor, start: int) -> Tensor:
        """The branch [B, D] of the next position, whose normalised input is x [B, D].

        Below, R = H / G is the number of queries that share a key.
        """
        attention, rows = self.attention, len(x)
        heads, groups, width = attention.heads, attention.key_heads, attention.width
        parts = F.linear(x, self.weight, self.bias).view(rows, -1, width)  # [B, H (+ H) + 2G, E]
        new = parts[:, -2 * groups :].view(rows, groups, 2, 1, width).permute(2, 1, 0, 3, 4)  # [2, G, B, 1, E]
        key, value = self.extend(new).flatten(1, 2).unbind()  # [GB, K, E] each
        queries = parts.transpose(0, 1)  # [.., B, E]

        content = by_group(queries[:heads], groups)
        if self.position is None:
            scores = torch.bmm(content, key.transpose(1, 2))  # [GB, R, K]
        else:
            position = self.position[:, -key.shape[1] :].transpose(1, 2)  # [H, E, K]
            by_distance = torch.bmm(queries[heads : 2 * heads], position)  # [H, B, K]
            scores = torch.baddbmm(by_group(by_distance, groups), content, key.transpose(1, 2))
        if not attention.last_sees_all:
            scores = scores + attention.mask(1, key.shape[1], start, x.dtype, x.device)
        mixed = torch.bmm(scores.softmax(dim=-1), value)  # [GB, R, E]
        return F.linear(mixed.view(groups, rows, -1).transpose(0, 1).reshape(rows, -1), attention.output.weight)

    def extend(self, new: Tensor) -> Tensor:
        """Add keys and values [2, G, B, L, E]. Returns all that the new positions may see [2, G, B, K, E], a view."""
        length, reach = new.shape[3], self.operation.reach
        kept = min(self.end, self.context - length, self.context if reach is None else reach)
        if self.buffer is None or self.end + length > self.buffer.shape[3]:
            buffer = new.new_empty(*new.shape[:3], 2 * (kept + length), new.shape[4])
            if kept:
                buffer[:, :, :, :kept] = self.buffer[:, :, :, self.end - kept : self.end]
            self.buffer, self.end = buffer, kept
        self.end += length
        self.buffer[:, :, :, self.end - length : self.end] = new
        return self.buffer[:, :, :, self.end - kept - length : self.end]

    def repeat(self, count: int) -> None:
        """As Decoder.repeat()."""
        self.buffer = self.buffer[:, :, :, : self.end].expand(-1, -1, count, -1, -1)  # full, so it moves at once


class Decoder:
    """Reads a stream with a model of fixed blocks, and predicts the next token.

    It computes what the model computes for the same pieces with memories of context - L positions, but projects each
    position to keys and values only once. context: the most positions that attention sees. The weights must not change.
    """

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int):
        self.model, self.context = model.eval(), context
        self.offset, self.last = 0, None  # positions read so far, and the last tokens for n-grams
        positions = model.positions(context)
        self.caches: list[KeyValueCache | None] = []  # of the blocks that attend to keys
        for block in model.blocks:
            keys = block.operation.has_keys
            self.caches.append(KeyValueCache(block.operation, positions, context) if keys else None)
        self.states: list[Memory] = [None] * len(self.caches)  # of linear attention and convolutions
        self.steps = [self.step_of(index, block) for index, block in enumerate(model.blocks)]

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        """Read the next tokens [B, L]. Returns the log-probabilities of the token after them [B, V].

        Raises ValueError unless L is from 1 to `context`.
        """
        model, length = self.model, tokens.shape[1]
        if not 1 <= length <= self.context:
            raise ValueError(f"a piece of {length} tokens must have 1 to {self.context}")
        x, self.last = model.embed(tokens, self.offset, self.last)  # [B, L, D]
        start = self.offset % model.stride
        if length == 1:
            x = x[:, 0]
            for step in self.steps:
                x = step(x, start)
        else:
            for index in range(len(model.blocks)):
                x = self.read_block(index, x, start)
            x = x[:, -1]
        self.offset += length
        return model.head.log_probabilities(model.final_norm(x))

    def read_block(self, index: int, x: Tensor, start: int) -> Tensor:
        """The block's results [B, L, D] for the next positions x [B, L, D]."""
        block, cache = self.model.blocks[index], self.caches[index]
        if cache:
            return x + cache.read(x, start)
        if block.operation.step:
            branch, self.states[index] = block.operation.step(x, self.states[index])
            return x + branch
        return block(x, None, None, 0)[0]

    def step_of(self, index: int, block: Block) -> Callable[[Tensor, int], Tensor]:
        """A function of x [B, D] and start -> [B, D], which reads one position with a block."""
        operation, cache = block.operation, self.caches[index]
        if cache:
            return residual(operation, cache.read_one)
        if operation.one:
            return residual(operation, partial(self.branch_one, index, operation.one))
        if isinstance(operation, Identity):
            return lambda x, start: x
        return lambda x, start: self.read_block(index, x[:, None], start)[:, 0]

    def branch_one(self, index: int, one: Callable, x: Tensor, start: int) -> Tensor:
        """The branch [B, D] of a block for one position x [B, D]. one: as Operation.one()."""
        branch, self.states[index] = one(x, self.states[index])
        return branch

    def forget_states(self) -> None:
        """Start linear attention, convolutions and n-grams anew, as at the start of a stream."""
        self.last = None
        self.states = [None] * len(self.states)

    def repeat(self, count: int) -> None:
        """Repeat the stream of one row in `count` rows, which may then go on differently."""
        for cache in filter(None, self.caches):
            cache.repeat(count)
        self.last = map_memory(lambda x: x.expand(count, -1), self.last)
        self.states = [map_memory(lambda x: x.expand(count, *x.shape[1:]), state) for state in self.states]


def by_group(x: Tensor, groups: int) -> Tensor:
    """Queries that share a key together: [H, B, N] -> [GB, R, N] with R = H / G."""
    return x.view(groups, -1, *x.shape[1:]).transpose(1, 2).reshape(groups * x.shape[1], -1, x.shape[2])


def residual(operation: Operation, branch: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """A block's function of x [B, D] and start, from that of its branch, which gets normalised inputs."""
    norm = operation.norm
    options = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    if operation.post_norm:
        return lambda x, start: torch.layer_norm(x + branch(x, start), *options)
    return lambda x, start: x + branch(torch.layer_norm(x, *options), start)
