"""Read a stream token by token.

A single position passes through functions of the bare weights, because calls of modules take longer than its products.

Shape letters as in models/relative_attention.py.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from models.operations import Attention, Identity, Operation
from models.stream import StreamModel
from models.transformer_xl import TransformerXL


class KeyValueCache:
    """The keys and values of the last positions that an attention has read.

    They stand in a buffer with room for the next positions, so that they move only when it is full.

    position [H, K, E]: the projected encodings of the distances context - 1, ..., 0, or None. context: as in
    StreamModel.
    """

    def __init__(self, operation: Attention, position: Tensor | None, context: int):
        self.operation, self.attention, self.context, self.position = operation, operation.attention, context, position
        # One product gives the queries of keys and of distances with their biases, scaled, and the new key and value.
        query, key_value = self.attention.query.weight, self.attention.key_value.weight
        scale, biases = self.attention.width**-0.5, (self.attention.content_bias, self.attention.position_bias)
        queries = 1 if position is None else 2
        self.weight = torch.cat([scale * query] * queries + [key_value])  # [D (+ D) + 2GE, D]
        self.bias = None
        if position is not None:
            self.bias = torch.cat([*(scale * bias.flatten() for bias in biases), key_value.new_zeros(len(key_value))])
        self.buffer, self.end = None, 0  # [2, G, B, room, E], and the number of filled places

    def load(self, memory: Tensor) -> None:
        """Replace the contents by keys and values [2, G, B, K, E]."""
        self.buffer, self.end = memory, memory.shape[3]  # full, so they move when the next ones come

    def contents(self) -> Tensor:
        """The filled places [2, G, B, K, E], a view."""
        return self.buffer[:, :, :, : self.end]

    def read_one(self, x: Tensor, start: int) -> Tensor:
        """The branch [B, D] of the next position, whose normalised input is x [B, D].

        Below, R = H / G is the number of queries that share a key.
        """
        attention, rows = self.attention, len(x)
        heads, groups, width = attention.heads, attention.key_heads, attention.width
        parts = F.linear(x, self.weight, self.bias).view(rows, -1, width)  # [B, H (+ H) + 2G, E]
        new = parts[:, -2 * groups :].view(rows, groups, 2, 1, width).permute(2, 1, 0, 3, 4)  # [2, G, B, 1, E]
        key, value = self.append(new).flatten(1, 2).unbind()  # [GB, K, E] each
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

    def append(self, new: Tensor) -> Tensor:
        """Add keys and values [2, G, B, 1, E]. Returns all that the new position may see [2, G, B, K, E], a view."""
        reach = self.operation.reach
        kept = min(self.end, self.context - 1, self.context if reach is None else reach)
        if self.end == self.buffer.shape[3]:
            buffer = new.new_empty(*new.shape[:3], 2 * (kept + 1), new.shape[4])
            buffer[:, :, :, :kept] = self.buffer[:, :, :, self.end - kept : self.end]
            self.load(buffer)
            self.end = kept
        self.buffer[:, :, :, self.end : self.end + 1] = new
        self.end += 1
        return self.buffer[:, :, :, self.end - kept - 1 : self.end]


class Decoder:
    """Reads a stream with a model of fixed blocks, and predicts the next token.

    It computes what StreamModel computes, keeps the state itself, and reads a single position in fewer calls.
    context: as in StreamModel.
    """

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int):
        self.model, self.context, self.network = model, context, StreamModel(model, context)
        self.offset, self.state = 0, None  # positions read so far; the state of the stream, without keys and values
        self.caches: dict[str, KeyValueCache] = {}  # by the name in the state
        for index, block in enumerate(model.blocks):
            if block.operation.has_keys:
                position = getattr(self.network, f"position_{index}")
                self.caches[f"memory_{index}"] = KeyValueCache(block.operation, position, context)
        self.steps = [self.step_of(index, block.operation) for index, block in enumerate(model.blocks)]

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        """Read the next tokens [B, L]. Returns the log-probabilities of the token after them [B, V].

        Raises ValueError unless L is from 1 to `context`.
        """
        rows, length = tokens.shape
        if not 1 <= length <= self.context:
            raise ValueError(f"a piece of {length} tokens must have 1 to {self.context}")
        if self.state is None:
            self.set_state(self.network.start(rows) | self.memories())
        if length == 1:
            x, last = self.model.embed(tokens, self.offset, self.state.get("last"))
            x, start = x[:, 0], self.offset % self.model.stride  # [B, D]
            if "last" in self.state:
                self.state["last"] = last
            for step in self.steps:
                x = step(x, start)
            x = self.model.final_norm(x)
        else:
            x, state = self.network.read(tokens, self.state | self.memories() | {"start": self.offset})
            x = x[:, -1]
            self.set_state(state)
        self.offset += length
        return self.model.head.log_probabilities(x)

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a state of StreamModel."""
        for name, cache in self.caches.items():
            cache.load(state[name])
        self.state = {name: value for name, value in state.items() if name not in {"start", *self.caches}}

    def memories(self) -> dict[str, Tensor]:
        """The keys and values in the form of StreamModel."""
        return {name: cache.contents() for name, cache in self.caches.items() if cache.buffer is not None}

    def step_of(self, index: int, operation: Operation) -> Callable[[Tensor, int], Tensor]:
        """A function of x [B, D] and start -> [B, D], which reads one position with a block."""
        name = f"memory_{index}"
        if cache := self.caches.get(name):
            return residual(operation, cache.read_one)
        if operation.one:
            return residual(operation, partial(self.branch_one, name, operation.one))
        if isinstance(operation, Identity):
            return lambda x, start: x
        return partial(self.read_block, index)

    def branch_one(self, name: str, one: Callable, x: Tensor, start: int) -> Tensor:
        """The branch [B, D] of a block for one position x [B, D]. one: as Operation.one()."""
        branch, state = one(x, self.state.get(name))
        if state is not None:
            self.state[name] = state
        return branch

    def read_block(self, index: int, x: Tensor, start: int) -> Tensor:
        """The block's results [B, D] for one position x [B, D]."""
        x, after = self.network.read_block(index, x[:, None], self.state, start)
        self.state |= after
        return x[:, 0]

    def forget_states(self) -> None:
        """Start linear attention, convolutions and n-grams anew, as at the start of a stream."""
        self.state = None

    def repeat(self, count: int) -> None:
        """Repeat the stream of one row in `count` rows, which may then go on differently."""
        for cache in self.caches.values():
            cache.load(cache.contents().expand(-1, -1, count, -1, -1))
        if self.state:
            self.state = {name: value.expand(count, *value.shape[1:]) for name, value in self.state.items()}


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
