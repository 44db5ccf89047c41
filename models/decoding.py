"""Read a stream piece by piece with kept keys, values and states, so that a new position costs one position.

Shape letters as in models/attention.py.
"""

import torch
from torch import Tensor

from models.attention import Positions
from models.operations import Operation
from models.transformer_xl import Memory, TransformerXL, map_memory


class KeyValueCache:
    """The keys and values of the last positions that an attention has read.

    They stand in a buffer with room for the next positions, so that they move only when it is full.

    positions: encodings of the distances context - 1, ..., 0. context: as in Decoder.
    """

    def __init__(self, operation: Operation, positions: Positions, context: int):
        self.operation, self.attention, self.context = operation, operation.attention, context
        self.position = self.attention.project_positions(positions, slice(None))  # [H, K, E]
        self.buffer, self.end = None, 0  # [2, G, B, room, E], and the number of filled places

    def read(self, x: Tensor, start: int) -> Tensor:
        """The operation's result [B, L, D] for the next positions x [B, L, D]. start: as in attend_masked()."""
        inputs = self.operation.prepare(x)
        key_value = self.extend(self.attention.project_keys(inputs))
        position = None if self.position is None else self.position[:, -key_value.shape[3] :]
        attend = self.attention.attend_last if x.shape[1] == 1 else self.attention.attend_masked
        return self.operation.finish(x, attend(inputs, key_value, position, start))

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
    position to keys and values only once. context: the most positions that attention sees.
    """

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int):
        self.model, self.context = model.eval(), context
        self.offset, self.last = 0, None  # positions read so far, and the last tokens for n-grams
        positions = model.positions(context)
        self.caches: list[KeyValueCache | None] = []  # of the blocks that attend to keys
        for block in model.blocks:
            cached = block.reach != 0 and block.operation.step is None
            self.caches.append(KeyValueCache(block.operation, positions, context) if cached else None)
        self.states: list[Memory] = [None] * len(self.caches)  # of linear attention and convolutions

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Read the next tokens [B, L]. Returns the log-probabilities of the token after them [B, V].

        Raises ValueError unless L is from 1 to `context`.
        """
        model, length = self.model, tokens.shape[1]
        if not 1 <= length <= self.context:
            raise ValueError(f"a piece of {length} tokens must have 1 to {self.context}")
        x, self.last = model.embed(tokens, self.offset, self.last)  # [B, L, D]
        for index, (block, cache) in enumerate(zip(model.blocks, self.caches, strict=True)):
            if cache:
                x = x + cache.read(x, self.offset % model.stride)
            elif block.operation.step:
                branch, self.states[index] = block.operation.step(x, self.states[index])
                x = x + branch
            else:
                x, _ = block(x, None, None, 0)
        self.offset += length
        return model.head.log_probabilities(model.final_norm(x[:, -1]))

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
