"""Output layers: full softmax and adaptive softmax (Grave et al. 2017, arXiv 1609.04309).

N tokens, D model width, V vocabulary. Token ids must be ranked by frequency, 0 the most frequent.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.attention import product_dtype

STATIC_LOGITS = 2**26  # on a GPU, up to so many logits of a batch tails are computed for all tokens: see by_cluster


def nll_in_place(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(nll [N], difference [N, V] in the storage of logits, total [N, 1]) of logits [N, V] and targets [N].

    With e = exp(logit - largest) and total = sum of e, the gradient of a row's logits is g (e / total - one_hot), g
    the gradient of its nll. The difference is e - total * one_hot: gradients() puts the factor g / total elsewhere.
    """
    index, largest = targets[:, None], logits.amax(dim=1, keepdim=True)
    target_logit = logits.gather(1, index)
    exponentials = logits.sub_(largest).exp_()
    total = exponentials.sum(dim=1, keepdim=True)
    nll = (total.log() + (largest - target_logit)).squeeze(1)  # in this order: the two may be large
    return nll, exponentials.scatter_add_(1, index, -total), total


def gradients(
    hidden: Tensor, weight: Tensor, difference: Tensor, total: Tensor, gradient: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden [N, D], weight [V, D] (into `out`, if given) and bias [V], from that of the nll [N].

    Each is new and nobody else's: a tied embedding adds its own gradient into the weight's, in place.
    """
    factor = gradient[:, None] / total
    to_weight = torch.mm(difference.t(), (hidden * factor).to(hidden.dtype), out=out)
    return (difference @ weight).mul_(factor), to_weight, (factor.t().to(difference.dtype) @ difference).squeeze(0)


def layer_nll(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """nll_in_place of W h + b, with a difference of the type of hidden [N, D], for gradients(). A nll needs more digits
    than the 8 bits of a bf16 product, which is therefore summed up in float32."""
    logits = hidden @ weight.t()
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    nll, difference, total = nll_in_place(logits.add_(bias), targets)
    return nll, difference.to(hidden.dtype), total


class LinearNLLFunction(torch.autograd.Function):
    """linear_nll in one buffer of logits, which the backward pass goes on using."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets):
        nll, difference, total = layer_nll(hidden, weight, bias, targets)
        ctx.save_for_backward(hidden, weight, difference, total)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return *gradients(*ctx.saved_tensors, gradient), None


def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(W h + b)[target]: hidden [N, D], weight [V, D], bias [V], targets [N] -> [N], in nats.

    Equals cross entropy over the logits, with a third of its passes over them. Differentiable once.
    """
    dtype = product_dtype(hidden)
    return LinearNLLFunction.apply(hidden.to(dtype), weight.to(dtype), bias, targets)


class Tail(NamedTuple):
    """The tokens of a tail: their positions `rows`, with their labels; or all tokens, with whether each is `inside`,
    and any label for those that are not."""

    rows: Tensor | None
    labels: Tensor
    inside: Tensor | None

    def pick(self, x: Tensor) -> Tensor:
        """Of x [N, ..] what belongs to the tail's labels."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def add(self, nll: Tensor, part: Tensor) -> Tensor:
        """nll [N] and the tail's part of it, which belongs to its labels."""
        if self.rows is None:
            return nll + torch.where(self.inside, part, 0)
        return nll.index_add(0, self.rows, part)


class ClusteredNLLFunction(torch.autograd.Function):
    """clustered_nll; every cluster writes its part of the table's gradient into one buffer."""

    @staticmethod
    def forward(ctx, hidden, weight, clusters, bias, targets, borders):
        tables = weight.split([high - low for low, high in pairwise(borders)])
        head_targets, tails = by_cluster(targets, borders)
        (table, offset), *layers = cluster_layers(tables, clusters, bias)
        nll, difference, total = layer_nll(hidden, table, offset, head_targets)
        saved = [hidden, table, difference, total]
        for (table, offset), tail in zip(layers, tails, strict=True):
            picked = tail.pick(hidden)
            part, difference, total = layer_nll(picked, table, offset, tail.labels)
            nll = tail.add(nll, part)
            saved += [tail.rows, tail.inside, picked, table, difference, total]
        ctx.save_for_backward(*saved)
        ctx.borders = borders
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        saved, borders = ctx.saved_tensors, ctx.borders
        head, tails = saved[:4], [saved[start : start + 6] for start in range(4, len(saved), 6)]
        to_weight, to_bias = head[0].new_empty(borders[-1], head[0].shape[1]), []
        to_hidden, to_head, offset = gradients(*head, gradient)
        to_weight[: borders[1]] = to_head[: borders[1]]
        to_bias.append(offset)
        for (rows, inside, *layer), (low, high) in zip(tails, pairwise(borders[1:]), strict=True):
            to_part = gradient * inside if rows is None else gradient.index_select(0, rows)
            to_picked, _, offset = gradients(*layer, to_part, out=to_weight[low:high])
            to_hidden = to_hidden.add_(to_picked) if rows is None else to_hidden.index_add_(0, rows, to_picked)
            to_bias.append(offset)
        return to_hidden, to_weight, to_head[borders[1] :], torch.cat(to_bias), None, None


def cluster_layers(tables: Sequence[Tensor], clusters: Tensor, bias: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of the head, which has an entry for each tail too, then of each tail."""
    head, *tails = tables
    weights = [torch.cat([head, clusters]), *tails]
    return list(zip(weights, bias.split([len(weight) for weight in weights]), strict=True))


def is_static(targets: Tensor, vocab_size: int) -> bool:
    """Whether tails are better computed for all tokens: on a GPU, where that is little work. To find a tail's tokens
    the processor would have to wait for the GPU, and a CUDA graph needs the same shapes at each replay."""
    return targets.is_cuda and len(targets) * vocab_size <= STATIC_LOGITS


def by_cluster(targets: Tensor, borders: list[int]) -> tuple[Tensor, list[Tail]]:
    """Targets [N] as labels of the head [N], in which cluster i has the label borders[1] + i - 1, and the tails."""
    head_targets, tails, static = targets, [], is_static(targets, borders[-1])
    for i in range(1, len(borders) - 1):
        inside = (targets >= borders[i]) & (targets < borders[i + 1])
        head_targets = head_targets.masked_fill(inside, borders[1] + i - 1)
        if static:
            tails.append(Tail(None, torch.where(inside, targets - borders[i], 0), inside))
        else:
            rows = inside.nonzero().squeeze(1)
            tails.append(Tail(rows, targets.index_select(0, rows) - borders[i], None))
    return head_targets, tails


def clustered_nll(
    hidden: Tensor, weight: Tensor, clusters: Tensor, bias: Tensor, targets: Tensor, borders: list[int]
) -> Tensor:
    """nll [N] under an adaptive softmax whose K clusters, borders 0 to V, are consecutive rows of one table.

    hidden [N, D], weight [V, D], clusters [K-1, D] (the head's entries for the tails), bias [V + K - 1] (the head's
    with those entries, then each tail's), targets [N]. Differentiable once.
    """
    inputs = [x.to(product_dtype(hidden)) for x in (hidden, weight, clusters)]
    return ClusteredNLLFunction.apply(*inputs, bias, targets, borders)


class FullSoftmax(nn.Module):
    """nll of every target under softmax(W h + b). `weight` [V, D] ties the layer to an embedding."""

    def __init__(self, d_model: int, vocab_size: int, weight: nn.Parameter | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model)) if weight is None else weight
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor, targets: Tensor, table: Tensor | None = None) -> Tensor:
        """hidden [N, D], targets [N] -> nll [N], in nats; `table`, where given, stands in for `weight`."""
        return linear_nll(hidden, self.weight if table is None else table, self.bias, targets)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> log-probabilities of every token [N, V]"""
        return F.linear(hidden, self.weight, self.bias).log_softmax(dim=-1)

    def flops(self) -> float:
        """Floating-point operations per token, forward; a multiply-add counts as two."""
        return 2.0 * self.weight.numel()


class AdaptiveSoftmax(nn.Module):
    """Frequent tokens and one entry per tail cluster form the head; a tail is computed only for the tokens in it.

    p(token) = p_head(token) for tokens below cutoffs[0], else p_head(cluster) * p_tail(token | cluster).
    Tail i projects to d_model // division**i first (arXiv 1609.04309, section 4.3); division 1 means no projection,
    and only then can `weight` [V, D] tie the layer to an embedding.
    Raises ValueError where the cutoffs do not increase within (0, V), or a tied layer has a division.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        cutoffs: list[int],
        division: int = 1,
        weight: nn.Parameter | None = None,
    ):
        super().__init__()
        borders = [0, *cutoffs, vocab_size]
        if not cutoffs or any(low >= high for low, high in pairwise(borders)):
            raise ValueError(
                f"cutoffs={list(cutoffs)} must increase strictly between 0 and the vocabulary size {vocab_size}"
            )
        if weight is not None and division != 1:
            raise ValueError(f"division={division} must be 1 where the output layer is tied to the embedding")
        self.borders = borders
        self.sizes = [high - low for low, high in pairwise(borders)]
        self.clusters = nn.Parameter(torch.empty(len(cutoffs), d_model))
        self.bias = nn.Parameter(torch.zeros(vocab_size + len(cutoffs)))
        if division == 1:
            self.weight = nn.Parameter(torch.empty(vocab_size, d_model)) if weight is None else weight
            self.tables, self.projections = None, [None] * len(self.sizes)
        else:
            widths = [max(1, d_model // division**i) for i in range(len(self.sizes))]
            shapes = zip(self.sizes, widths, strict=True)
            self.tables = nn.ParameterList(nn.Parameter(torch.empty(size, width)) for size, width in shapes)
            self.projections = nn.ModuleList(
                [nn.Identity(), *(nn.Linear(d_model, width, bias=False) for width in widths[1:])]
            )

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, bias) of the head, then of each tail."""
        return cluster_layers(self.tables or self.weight.split(self.sizes), self.clusters, self.bias)

    def project(self, hidden: Tensor, index: int) -> Tensor:
        """hidden [N, D] to the width of cluster `index`."""
        projection = self.projections[index]
        return hidden if projection is None else projection(hidden)

    def forward(self, hidden: Tensor, targets: Tensor, table: Tensor | None = None) -> Tensor:
        """hidden [N, D], targets [N] -> nll [N], in nats; `table`, where given, stands in for `weight`."""
        if self.tables is None:  # one table: its clusters write their gradients into one buffer
            weight = self.weight if table is None else table
            return clustered_nll(hidden, weight, self.clusters, self.bias, targets, self.borders)
        (head_targets, tails), (head, *layers) = by_cluster(targets, self.borders), self.layers()
        nll = linear_nll(hidden, *head, head_targets)
        for i, (layer, tail) in enumerate(zip(layers, tails, strict=True), start=1):
            # A tail without tokens has a gradient too, of zeros: all ranks of a run must have the same gradients.
            nll = tail.add(nll, linear_nll(self.project(tail.pick(hidden), i), *layer, tail.labels))
        return nll

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> log-probabilities of every token [N, V]"""
        head, *tails = self.layers()
        head_log = F.linear(hidden, *head).log_softmax(dim=-1)
        parts = [head_log[:, : self.sizes[0]]]
        for i, layer in enumerate(tails, start=1):
            cluster = head_log[:, self.sizes[0] + i - 1, None]
            parts.append(cluster + F.linear(self.project(hidden, i), *layer).log_softmax(dim=-1))
        return torch.cat(parts, dim=-1)

    def flops(self, mass: list[float] | None = None) -> float:
        """Expected floating-point operations per token, forward; a multiply-add counts as two. mass: the share of the
        tokens in each cluster, head first; without it every token of the vocabulary counts as equally likely."""
        mass = mass or [size / sum(self.sizes) for size in self.sizes]
        head, *tails = self.layers()
        tail_cost = [weight.numel() for weight, _ in tails]
        for i, projection in enumerate(self.projections[1:]):
            tail_cost[i] += 0 if projection is None else projection.weight.numel()
        return 2.0 * (head[0].numel() + sum(m * cost for m, cost in zip(mass[1:], tail_cost, strict=True)))
