"""Attention to all positions (Transformer-XL, Dai et al. 2019, arXiv 1901.02860), and its cache of keys and values.

Shape letters as in models/relative_attention.py, and G heads of keys and values.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.operations.operation import BareReader, BlockConfig, Operation, Segment, State, last, limit, missing
from models.relative_attention import MASKED, attend, causal_mask, join_heads, split_heads


class RelativeAttention(nn.Module):
    """Multi-head attention of a segment to its memory and itself, optionally with relative positions.

    key_heads: heads of keys and values; groups of heads / key_heads heads share one (arXiv 2305.13245).
    last_sees_all: whether the last query of a context attends to all of its keys.
    """

    last_sees_all = True

    def __init__(self, d_model: int, heads: int, key_heads: int, relative: bool = True):
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, d_model // heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key_value = nn.Linear(d_model, 2 * d_model * key_heads // heads, bias=False)
        self.position = nn.Linear(d_model, d_model, bias=False) if relative else None
        self.output = nn.Linear(d_model, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, d_model // heads)) if relative else None  # u
        self.position_bias = nn.Parameter(torch.zeros(heads, d_model // heads)) if relative else None  # v

    def forward(self, context: Tensor, length: int, segment: Segment) -> Tensor:
        """context [B, K, D]: memory and segment. Its last `length` positions are the queries. Returns [B, L, D]."""
        position = self.project_positions(segment.encodings, slice(-context.shape[1], None))  # [H, K, E]
        key_value = self.project_keys(context).contiguous()
        return self.attend_masked(context[:, -length:], key_value, position, segment)

    def project_keys(self, context: Tensor) -> Tensor:
        """Keys and values [2, G, B, K, E] of a context [B, K, D], a view."""
        return split_heads(self.key_value(context), self.key_heads, 2)

    def repeat_keys(self, key_value: Tensor) -> Tensor:
        """Keys and values of all heads: [2, G, ..] -> [2, H, ..]."""
        times = self.heads // self.key_heads
        return key_value if times == 1 else key_value.repeat_interleave(times, dim=1)

    def attend_masked(self, x: Tensor, key_value: Tensor, position: Tensor | None, segment: Segment) -> Tensor:
        """Dense attention [B, L, D] under mask().

        x [B, L, D]: the queries' inputs; key_value [2, G, B, K, E]: of the positions before x and of x; position
        [H, K, E]: projected encodings of the distances K - 1, ..., 0, or None.
        """
        (query,) = split_heads(self.query(x), self.heads)  # [H, B, L, E]
        length, keys = x.shape[1], key_value.shape[-2]
        mask = self.mask(length, keys, segment.start, x.dtype, x.device)
        if segment.filled is not None:
            mask = mask.masked_fill(F.pad(missing(segment, keys - length), (0, length)), MASKED)
        inputs = query, self.repeat_keys(key_value), position, self.content_bias, self.position_bias, mask
        mixed, _ = attend(*inputs)  # [H, B, L, E]
        return self.output(join_heads(mixed))

    def mask(self, length: int, keys: int, start: int, dtype, device) -> Tensor:
        """Additive mask that broadcasts to [H, B, L, K], for L queries that end a context of K keys."""
        return causal_mask(length, keys, dtype, device)

    def project_positions(self, encodings: Tensor | None, rows) -> Tensor | None:
        """Projected encodings [H, .., E] of the given rows of the table: a slice, or indices [..]."""
        if self.position is None:
            return None
        if isinstance(rows, Tensor) and rows.numel() > len(encodings):  # rows repeat: project each once
            projected = F.embedding(rows, self.position(encodings))  # [.., D]
        else:
            projected = self.position(encodings[rows])  # [.., D]
        return projected.unflatten(-1, (self.heads, -1)).movedim(-2, 0)


class Attention(Operation):
    """Multi-head attention with relative positions (arXiv 1901.02860)."""

    reach, restarts = None, False

    def __init__(self, config: BlockConfig, heads: int, key_heads: int, attention: Callable = RelativeAttention):
        """attention: RelativeAttention or a function of its arguments, which returns a subclass of it."""
        super().__init__(config)
        self.attention = attention(config.d_model, heads, key_heads, config.relative)

    def branch(self, context, length, segment):
        return self.attention(context, length, segment)

    def cached(self, encodings):
        return CachedAttention(self, encodings)


class AttentionReader(BareReader):
    """Keys and values stand in a buffer with room for the next positions, so that they move only when it is full."""

    def __init__(self, cached: "CachedAttention"):
        self.buffer, self.end = None, 0  # [2, B, G, room, E], and the number of filled places
        super().__init__(cached)
        self.attention, self.position = cached.operation.attention, cached.position
        # One product gives the queries of keys and of distances with their biases, scaled, and the new key and value.
        query, key_value = self.attention.query.weight, self.attention.key_value.weight
        scale, biases = self.attention.width**-0.5, (self.attention.content_bias, self.attention.position_bias)
        queries = 1 if self.position is None else 2
        self.weight, self.bias = torch.cat([scale * query] * queries + [key_value]), None  # [D (+ D) + 2GE, D]
        if self.position is not None:
            self.bias = torch.cat([*(scale * bias.flatten() for bias in biases), key_value.new_zeros(len(key_value))])

    @property
    def state(self) -> State:
        keys, values = self.buffer[:, :, :, : self.end].unbind()
        return {"keys": keys, "values": values}

    @state.setter
    def state(self, state: State) -> None:
        if state:
            self.buffer, self.end = torch.stack([state["keys"], state["values"]]), state["keys"].shape[2]

    def branch(self, x, segment):
        """Below, R = H / G is the number of queries that share a key."""
        attention, rows = self.attention, len(x)
        heads, groups, width = attention.heads, attention.key_heads, attention.width
        parts = F.linear(x, self.weight, self.bias).view(rows, -1, width)  # [B, H (+ H) + 2G, E]
        new = parts[:, -2 * groups :].view(rows, groups, 2, 1, width).permute(2, 0, 1, 3, 4)  # [2, B, G, 1, E]
        key, value = self.append(new, limit(segment.memory, self.operation.reach)).flatten(1, 2)  # [BG, K, E] each
        content = parts[:, :heads].reshape(rows * groups, -1, width)  # [BG, R, E]
        if self.position is None:
            scores = torch.bmm(content, key.transpose(1, 2))  # [BG, R, K]
        else:
            position = self.position[:, -key.shape[1] :].transpose(1, 2)  # [H, E, K]
            by_distance = torch.bmm(parts[:, heads : 2 * heads].transpose(0, 1), position)  # [H, B, K]
            by_distance = by_distance.transpose(0, 1).reshape(rows * groups, -1, key.shape[1])  # [BG, R, K]
            scores = torch.baddbmm(by_distance, content, key.transpose(1, 2))
        if not attention.last_sees_all:
            scores = scores + attention.mask(1, key.shape[1], segment.start, x.dtype, x.device)
        mixed = torch.bmm(scores.softmax(dim=-1), value)  # [BG, R, E]
        return F.linear(mixed.view(rows, -1), attention.output.weight)

    def append(self, new: Tensor, seen: int) -> Tensor:
        """Add keys and values [2, B, G, 1, E]. Returns at most `seen` earlier ones and them [2, B, G, K, E], a view."""
        kept = min(self.end, seen)
        if self.end == self.buffer.shape[3]:
            buffer = new.new_empty(*new.shape[:3], 2 * (kept + 1), new.shape[4])
            buffer[:, :, :, :kept] = self.buffer[:, :, :, self.end - kept : self.end]
            self.buffer, self.end = buffer, kept
        self.buffer[:, :, :, self.end : self.end + 1] = new
        self.end += 1
        return self.buffer[:, :, :, self.end - kept - 1 : self.end]


class CachedAttention(nn.Module):
    """An attention in a stream. Its state holds the keys and values [B, G, M, E] of earlier positions, not inputs."""

    Reader = AttentionReader

    def __init__(self, operation: Attention, encodings: Tensor | None):
        super().__init__()
        self.operation, self.restarts = operation, operation.restarts
        position = operation.attention.project_positions(encodings, slice(None))  # the same for each segment
        self.register_buffer("position", position)  # [H, K, E]

    def begin(self, rows: int, room: int = 0) -> State:
        attention = self.operation.attention
        shape = rows, attention.key_heads, limit(room, self.operation.reach), attention.width
        return {name: attention.key_value.weight.new_zeros(shape) for name in ("keys", "values")}

    def forward(self, x, state, segment):
        operation, attention = self.operation, self.operation.attention
        seen, kept = (limit(count, operation.reach) for count in (segment.memory, segment.kept))
        inputs = operation.prepare(x)
        new = attention.project_keys(inputs).transpose(1, 2)  # [2, B, G, L, E]
        # Under autocast, new keys have another type than the empty ones of begin().
        before = torch.stack([last(state[name], seen, dim=2) for name in ("keys", "values")]).to(new.dtype)
        key_value = torch.cat([before, new], dim=3)  # [2, B, G, K, E]
        position = None if self.position is None else self.position[:, -key_value.shape[3] :]
        branch = attention.attend_masked(inputs, key_value.transpose(1, 2), position, segment)
        keys, values = last(key_value, kept, dim=3)
        return operation.finish(x, branch), {"keys": keys, "values": values}
