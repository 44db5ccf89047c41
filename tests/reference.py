"""Slow, simple reference implementations in float64, for comparison with the fast ones."""

import itertools
import math
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.relative_attention import sinusoidal_encodings


def relative_attention(query, key, value, position, content_bias, position_bias, sees=None) -> Tensor:
    """A^rel of arXiv 1901.02860, section 3.3, one score at a time. Shapes as in models/, but B before H.

    sees(head, query, key): whether a query attends to a key that is not in its future. Both are places in the context.
    By default every query attends to all such keys. A query without any key gets zeros. Without position, scores are
    query . key alone.
    """
    batch, heads, length, width = query.shape
    keys = key.shape[2]
    memory = keys - length
    result = torch.zeros_like(query)
    for b, h, i in itertools.product(range(batch), range(heads), range(length)):
        scores, seen = [], []
        for j in range(memory + i + 1):  # the whole memory, and the segment up to the query itself
            if sees and not sees(h, memory + i, j):
                continue
            score = query[b, h, i] @ key[b, h, j]  # (a)
            if position is not None:
                encoding = position[h, keys - 1 - (memory + i - j)]  # row 0 holds the largest distance
                position_term = query[b, h, i] @ encoding  # (b)
                global_content = content_bias[h] @ key[b, h, j]  # (c)
                global_position = position_bias[h] @ encoding  # (d)
                score = score + position_term + global_content + global_position
            scores.append(score / math.sqrt(width))
            seen.append(j)
        if scores:
            weights = torch.stack(scores).softmax(dim=0)
            result[b, h, i] = sum(weight * value[b, h, j] for weight, j in zip(weights, seen, strict=True))
    return result


def sparse_sets(kind: str, stride: int, summary: int, i: int) -> tuple[set[int], set[int]]:
    """The key sets of a query at place i of a stream: A^(1) and A^(2) of arXiv 1904.10509, section 4.3; or a window."""
    if kind == "window":
        return set(range(max(0, i - stride), i + 1)), set()
    if kind == "strided":
        return set(range(max(0, i - stride), i + 1)), {j for j in range(i + 1) if (i - j) % stride == 0}
    own_row = {j for j in range(i + 1) if j // stride == i // stride}
    return own_row, {j for j in range(i + 1) if j % stride in range(stride - summary, stride)}


def attention(operation, context: Tensor, length: int, start: int, kind: str = "full") -> Tensor:
    """Attention to the reference's key sets. kind: of sparse_sets(), or full. The others as of BRANCHES."""
    module, keys = operation.attention, context.shape[1]
    heads, key_heads, width = module.heads, module.key_heads, module.width
    near, *far = [(one.stride, getattr(one, "step", 0)) for one in getattr(module, "key_sets", [])] or [(0, 0)]
    first = start + length - keys  # the place of the first key in the stream

    def sees(head, query, key):
        sets = [] if kind == "full" else sparse_sets(kind, near[0], far[0][1] if far else 0, first + query)
        return kind == "full" or first + key in set.union(*sets)

    query = module.query(context[:, -length:]).view(len(context), length, heads, width)
    key, value = module.key_value(context).view(len(context), keys, key_heads, 2, width).unbind(dim=3)
    shared = [head * key_heads // heads for head in range(heads)]
    key, value = key[:, :, shared], value[:, :, shared]
    position = None
    if module.position is not None:
        encodings = sinusoidal_encodings(keys, context.shape[2], context.dtype)
        position = module.position(encodings).view(keys, heads, width).transpose(0, 1)
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    mixed = relative_attention(*heads_first, position, module.content_bias, module.position_bias, sees)
    return module.output(mixed.transpose(1, 2).flatten(2))


def relative_shift(scores: Tensor, step: int = 1) -> tuple[Tensor, Tensor]:
    """Move each score to the column of its key. Entry (i, j) comes from the column of the distance between query i and
    key j.

    Queries are `step` keys apart. Returns a mask [L, K] of the keys that are not in the query's future, and the shifted
    scores [L, K], which are zero outside of the mask.
    """
    length, keys = scores.shape[-2:]
    defined, result = torch.zeros(length, keys, dtype=torch.bool), torch.zeros_like(scores)
    for i, j in itertools.product(range(length), range(keys)):
        distance = (keys - 1) - step * (length - 1 - i) - j
        if distance >= 0:
            defined[i, j] = True
            result[..., i, j] = scores[..., i, keys - 1 - distance]
    return defined, result


def adaptive_probabilities(hidden: Tensor, layer) -> Tensor:
    """p(token) of an adaptive softmax, one token at a time from its parameters: hidden [N, D] -> [N, V]."""
    cluster_bounds, sizes = layer.cluster_bounds, layer.cluster_sizes
    columns = []
    for token in range(cluster_bounds[-1]):
        cluster = next(i for i in range(len(sizes)) if token < cluster_bounds[i + 1])
        tables = layer.tables
        if tables is None:
            tables = [layer.weight[a:b] for a, b in itertools.pairwise(cluster_bounds)]
        head_bias = layer.bias[: sizes[0] + len(sizes) - 1]
        head_scores = torch.cat([hidden @ tables[0].T, hidden @ layer.clusters.T], dim=1) + head_bias
        head = head_scores.exp() / head_scores.exp().sum(dim=1, keepdim=True)
        if cluster == 0:
            columns.append(head[:, token])
            continue
        projection = layer.projections[cluster]
        projected = hidden if layer.tables is None else hidden @ projection.weight.T
        start = cluster_bounds[cluster] + len(sizes) - 1
        tail_scores = projected @ tables[cluster].T + layer.bias[start : start + sizes[cluster]]
        tail = tail_scores.exp() / tail_scores.exp().sum(dim=1, keepdim=True)
        columns.append(head[:, sizes[0] + cluster - 1] * tail[:, token - cluster_bounds[cluster]])
    return torch.stack(columns, dim=1)


def expected_loss(logits: Tensor, loss_of_path) -> Tensor:
    """sum over all paths of p(path) * loss(path); differentiable in logits [N, O]."""
    pi = logits.softmax(dim=-1)
    total = logits.new_zeros(())
    for path in itertools.product(range(logits.shape[1]), repeat=logits.shape[0]):
        probability = math.prod(pi[block, choice] for block, choice in enumerate(path))
        total = total + probability * loss_of_path(list(path))
    return total


def cheapest_cutoffs(counts, clusters: int, cost) -> float:
    """The lowest cost of any cutoffs. Tries all cutoffs. counts [N], descending."""
    words, total = len(counts), counts.sum() or 1.0
    cumulative = np.concatenate([[0.0], counts.cumsum()])
    best = np.array([math.inf] + [float(cost.head(j, clusters)) for j in range(1, words + 1)])
    for index in range(1, clusters):
        longer = np.full(words + 1, math.inf)
        for j in range(index + 1, words + 1):
            starts = np.arange(index, j)
            tails = cost.tail(index, j - starts, (cumulative[j] - cumulative[starts]) / total)
            longer[j] = (best[starts] + tails).min()
        best = longer
    return float(best[words])


def gated_delta(query, key, value, log_decay, beta, state) -> tuple[Tensor, Tensor]:
    """The recurrence of arXiv 2412.06464, equation 10, one position at a time. Shapes as in its fast form."""
    outputs = []
    for t in range(query.shape[2]):
        decayed = log_decay[:, :, t, None, None].exp() * state
        k, v = key[:, :, t, :, None], value[:, :, t, None, :]  # [B, H, E, 1], [B, H, 1, F]
        state = decayed + beta[:, :, t, None, None] * k * (v - k.transpose(-2, -1) @ decayed)
        outputs.append((query[:, :, t, None, :] @ state)[:, :, 0])
    return torch.stack(outputs, dim=2), state


def linear_attention(module, x: Tensor) -> Tensor:
    """Gated DeltaNet (arXiv 2412.06464, figure 1), one position at a time: x [B, L, D] -> [B, L, D].

    module: gives the parameters, a LinearAttention.
    """
    batch, length, d_model = x.shape
    heads, results, eps = module.heads, [], torch.finfo(x.dtype).eps  # eps: of nn.RMSNorm
    width, taps = d_model // heads, module.kernel[:, 0].T  # [3D, T]
    states = torch.zeros(batch, heads, width, width, dtype=x.dtype)
    projected = module.query_key_value(x)
    for t in range(length):
        mixed = sum(taps[:, -1 - back] * projected[:, t - back] for back in range(min(t + 1, taps.shape[1])))
        mixed = mixed * mixed.sigmoid()
        query, key, value = mixed.view(batch, heads, 3, width).unbind(dim=2)  # [B, H, E] each
        query, key = (y / y.norm(dim=-1, keepdim=True) for y in (query, key))
        decay, beta = module.gates(x[:, t]).view(batch, 2, heads).unbind(dim=1)  # [B, H] each
        log_decay = -(1 + decay.exp()).log()
        read, states = gated_delta(
            *(y[:, :, None] for y in (query, key, value, log_decay, beta.sigmoid())), states
        )  # [B, H, 1, E]
        read = read[:, :, 0] / (read[:, :, 0].square().mean(dim=-1, keepdim=True) + eps).sqrt() * module.norm.weight
        gate = module.output_gate(x[:, t])
        results.append(module.output(read.flatten(1) * gate * gate.sigmoid()))
    return torch.stack(results, dim=1)


def short_convolution(module, context: Tensor, length: int) -> Tensor:
    """The gated short convolution (arXiv 2511.23404), one position and one tap at a time.

    context [B, K, D]: normalised inputs -> [B, L, D] of the last L = `length` positions. module: gives the parameters.
    """
    first, second, third = module.project.weight.chunk(3)
    results, taps, keys = [], len(module.kernel), context.shape[1]
    for t in range(keys - length, keys):
        mixed = torch.zeros_like(context[:, 0])
        for back in range(min(taps, t + 1)):
            x = context[:, t - back]
            mixed = mixed + module.kernel[taps - 1 - back, 0] * (x @ first.T) * (x @ third.T)
        results.append((context[:, t] @ second.T * mixed) @ module.output.weight.T)
    return torch.stack(results, dim=1)


# Of each operation: the branch [B, L, D] of the last L positions of a stream, one position at a time: a function of
# the operation, its normalised inputs [B, K, D] from the start of the stream or of the memory on, L, and the number of
# positions before these L.
BRANCHES = {
    "attention": attention,
    "sparse_strided": partial(attention, kind="strided"),
    "sparse_fixed": partial(attention, kind="fixed"),
    "window": partial(attention, kind="window"),
    "linear": lambda one, context, length, start: linear_attention(one.attention, context)[:, -length:],
    "conv": lambda one, context, length, start: short_convolution(one, context, length),
    "dense": lambda one, context, length, start: one.output(F.relu(one.expand(context[:, -length:]))),
    "identity": lambda one, context, length, start: torch.zeros_like(context[:, -length:]),
}
