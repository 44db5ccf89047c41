"""The gated delta rule in chunks (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464, section 3.3).

B batch, H heads, L positions, E width of keys, F width of values, C chunk length.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Read a stream with a state of fixed size. Its cost grows linearly with the number of positions.

    For position t, with decay a = exp(log_decay[t]) and rate b:

        state = a * state
        state = state + b * key (value - key @ state)     (the delta rule corrects what the state returns for the key)
        output = query @ state

    Within a chunk, the corrections of all positions are the solution of a triangular system. The state goes from chunk
    to chunk.

    Args:
        query, key: [B, H, L, E]. Keys of length at most 1 keep the state bounded if the rates are at most 1.
        value: [B, H, L, F].
        log_decay: [B, H, L], at most 0.
        rate: [B, H, L], from 0 to 1.
        state: [B, H, E, F] after the previous positions; None: zeros.

    Returns:
        The outputs [B, H, L, F] and the state [B, H, E, F] after the last position.
    """
    length = query.shape[-2]
    rest = -length % chunk
    if rest:  # positions without effect: they do not decay the state and add nothing to it
        query, key, value = (F.pad(x, (0, 0, 0, rest)) for x in (query, key, value))
        log_decay, rate = F.pad(log_decay, (0, rest)), F.pad(rate, (0, rest))
    query, key, value = (x.unflatten(-2, (-1, chunk)) for x in (query, key, value))  # [B, H, N, C, E or F]
    log_decay, rate = (x.unflatten(-1, (-1, chunk)) for x in (log_decay, rate))  # [B, H, N, C]
    if state is None:
        state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])

    total = log_decay.cumsum(dim=-1)[..., None]  # [B, H, N, C, 1]: logarithm of the decay since the chunk's start
    ones = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device)
    # The decay from position j to position i, for j <= i. Later positions are masked before exp() could overflow.
    decay = (total - total.transpose(-2, -1)).masked_fill(~ones.tril(), -torch.inf).exp()  # [B, H, N, C, C]
    rate = rate[..., None]  # [B, H, N, C, 1]
    system = (rate * decay * (key @ key.transpose(-2, -1))).tril(-1)  # the solver takes the diagonal as 1
    decayed_key = total.exp() * key
    known = torch.cat([rate * value, rate * decayed_key], dim=-1)
    solution = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    fresh, stale = solution.split([value.shape[-1], key.shape[-1]], dim=-1)  # corrections = fresh - stale @ state
    scores = decay * (query @ key.transpose(-2, -1))  # [B, H, N, C, C]
    decayed_query = total.exp() * query
    last = total[..., -1:, :]  # [B, H, N, 1, 1]
    written_key = ((last - total).exp() * key).transpose(-2, -1)  # [B, H, N, E, C]
    kept = last.exp()

    outputs = []
    # unbind() makes the gradient of each input in one piece; slices would each make one of the whole length.
    chunks = (x.unbind(2) for x in (fresh, stale, decayed_query, scores, kept, written_key))
    for new, old, reading, weights, left, writing in zip(*chunks, strict=True):
        correction = new - old @ state  # [B, H, C, F]
        outputs.append(reading @ state + weights @ correction)
        state = left * state + writing @ correction
    return torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length], state
