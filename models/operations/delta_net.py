"""Gated DeltaNet, a linear attention with the gated delta rule (Yang et al. 2024, arXiv 2412.06464).

Shape letters as in models/relative_attention.py, and F width of values, C positions per chunk, N chunks, T = TAPS - 1.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.operations.convolution import convolve, new_kernel
from models.operations.operation import Operation, last, missing
from models.relative_attention import autocast_device, join_heads, split_heads

TAPS = 4  # positions that the short convolution reads, the current one included
SLOWEST, FASTEST = 0.001, 0.1  # -log_decay per position of the first and the last head, before training


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunk: int, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv 2412.06464, section 3.3). For each position of a stream:

        state = exp(log_decay) * state
        state = state + key^T (beta * (value - key @ state))     (corrects what the state returns for the key)
        output = query @ state

    The chunkwise form computes the corrections of a chunk's positions together, as the solution of a triangular system
    (WY representation, arXiv 2406.06484). The state goes from chunk to chunk, so the cost grows linearly with L.

    query, key [B, H, L, E], the keys with a norm of at most 1; value [B, H, L, F]; log_decay [B, H, L], at most 0; beta
    [B, H, L], strength of writing, from 0 to 1; chunk: most positions C computed at once, which changes only the
    speed; state [B, H, E, F] after the previous positions. Returns the outputs [B, H, L, F] and the next state.
    """
    length, inputs = query.shape[-2], (query, key, value, log_decay[..., None], beta[..., None])
    if torch.compiler.is_exporting() and not (isinstance(length, int) and length == 1):
        # ONNX has no solver of triangular systems.
        from torch._higher_order_ops.scan import scan  # private, and only the export needs it

        state, outputs = scan(next_position, state, [x.movedim(2, 0) for x in inputs])
        return outputs.movedim(0, 2), state
    if length == 1:
        state, output = next_position(state, [x[:, :, 0] for x in inputs])
        return output[:, :, None], state
    chunk = min(chunk, length)
    if rest := -length % chunk:  # positions without effect: they do not decay the state and add nothing to it
        inputs = [F.pad(x, (0, 0, 0, rest)) for x in inputs]
    prepared = within_chunks(*(x.unflatten(-2, (-1, chunk)) for x in inputs))
    # unbind() makes the gradient of each input in one piece; slices would each make one of the whole length.
    outputs, chunks = [], (x.unbind(2) for x in prepared)
    for fresh, stale, decayed_query, scores, kept, written_key in zip(*chunks, strict=True):
        correction = fresh - stale @ state  # [B, H, C, F]
        outputs.append(decayed_query @ state + scores @ correction)
        state = kept * state + written_key @ correction
    return torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length], state


def next_position(state: Tensor, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The next state [B, H, E, F] and the output [B, H, F] of gated_delta(). inputs: those of one position."""
    query, key, value, log_decay, beta = inputs  # [B, H, E, F or 1]
    state = log_decay.exp()[..., None] * state
    correction = beta * (value - (key[..., None] * state).sum(dim=-2))  # [B, H, F]
    state = state + key[..., None] * correction[..., None, :]
    return state, (query[..., None] * state).sum(dim=-2)


def within_chunks(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """What gated_delta() needs of each chunk and can compute without the state.

    query, key [B, H, N, C, E], value [B, H, N, C, F], log_decay, beta [B, H, N, C, 1].

    Returns:
        fresh [B, H, N, C, F], stale [B, H, N, C, E]: the corrections are fresh - stale @ state.
        decayed_query [B, H, N, C, E]: queries that read the state before the chunk.
        scores [B, H, N, C, C]: weights of the corrections in the outputs.
        kept [B, H, N, 1, 1]: the decay over the chunk.
        written_key [B, H, N, E, C]: keys that write the corrections to the state after the chunk.
    """
    total = log_decay.cumsum(dim=-2)  # [B, H, N, C, 1]: logarithm of the decay since the chunk's start
    ones = torch.ones(key.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    # The decay from position j to position i, for j <= i. Later positions are masked before exp() could overflow.
    decay = (total - total.transpose(-2, -1)).masked_fill(~ones.tril(), -torch.inf).exp()  # [B, H, N, C, C]
    system = (beta * decay * (key @ key.transpose(-2, -1))).tril(-1)  # the solver takes the diagonal as 1
    right_side = torch.cat([beta * value, beta * total.exp() * key], dim=-1)
    solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    fresh, stale = solution.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = decay * (query @ key.transpose(-2, -1))  # [B, H, N, C, C]
    decayed_query = total.exp() * query
    last = total[..., -1:, :]  # [B, H, N, 1, 1]
    written_key = ((last - total).exp() * key).transpose(-2, -1)  # [B, H, N, E, C]
    return fresh, stale, decayed_query, scores, last.exp(), written_key


class LinearAttention(nn.Module):
    """Heads with a state of fixed size instead of keys and values, and without positions (section 3.4 of the paper)."""

    def __init__(self, d_model: int, heads: int, chunk: int):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.kernel = new_kernel(TAPS, 3 * d_model)
        self.gates = nn.Linear(d_model, 2 * heads)  # of the decay, and of the strength of writing
        decays = torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), heads)
        with torch.no_grad():
            self.gates.bias.copy_(torch.cat([decays.expm1().log(), torch.zeros(heads)]))  # the inverse of softplus
        self.norm = nn.RMSNorm(d_model // heads)
        self.output_gate = nn.Linear(d_model, d_model, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)

    def forward(self, context: Tensor, length: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The results [B, L, D] of the last L = `length` positions of a context [B, K, D], and the state after them.

        state: [B, H, E, E] before these positions. Only the convolution reads the others, at most T, again.
        """
        new = context[:, -length:]
        mixed = convolve(self.query_key_value(context), self.kernel, length)  # [B, L, 3D]
        mixed = split_heads(F.silu(mixed), self.heads, 3).transpose(1, 2)  # [3, B, H, L, E]
        with torch.autocast(autocast_device(new), enabled=False):  # small errors of the state add up over a stream
            mixed, gated = (x.float() if x.itemsize < 4 else x for x in (mixed, new))
            gates = F.linear(gated, *(own.to(gated.dtype) for own in (self.gates.weight, self.gates.bias)))
            decay, beta = gates.transpose(1, 2).chunk(2, dim=1)  # [B, H, L] each
            (query, key), value = F.normalize(mixed[:2], dim=-1), mixed[2]
            state = state.to(value.dtype)
            read, state = gated_delta(query, key, value, -F.softplus(decay), beta.sigmoid(), self.chunk, state)
        read = F.rms_norm(read, self.norm.normalized_shape, self.norm.weight.to(read.dtype), self.norm.eps)
        read = join_heads(read.transpose(0, 1)).to(new.dtype)  # [B, L, D]
        return self.output(read * F.silu(self.output_gate(new))), state


class GatedDeltaNet(Operation):
    """LinearAttention as an operation. Its state has the matrices [B, H, E, E], and the last inputs [B, <= T, D]."""

    reach, carries_state = None, True

    def __init__(self, config, heads: int, chunk: int):
        super().__init__(config)
        self.attention = LinearAttention(config.d_model, heads, chunk)

    def begin(self, rows, room=0):
        d_model, heads, weight = len(self.norm.weight), self.attention.heads, self.norm.weight
        matrices = weight.new_zeros(rows, heads, d_model // heads, d_model // heads)
        return {"matrices": matrices, "inputs": weight.new_zeros(rows, min(room, TAPS - 1), d_model)}

    def forward(self, x, state, segment):
        context = torch.cat([state["inputs"], x], dim=1)  # [B, T + L, D]
        prepared, before = self.prepare(context), state["inputs"].shape[1]
        if segment.filled is not None:
            prepared = prepared.masked_fill(F.pad(missing(segment, before), (0, x.shape[1]))[:, None], 0)
        branch, matrices = self.attention(prepared, x.shape[1], state["matrices"])
        inputs = last(context, TAPS - 1).detach()
        return self.finish(x, branch), {"matrices": matrices.detach(), "inputs": inputs}
