"""Output layers: full softmax and adaptive softmax (Grave et al. 2017, arXiv 1609.04309).

N tokens, D model width, V vocabulary. Token ids must be ranked by frequency, 0 the most frequent.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.fused import FusedClusteredNLL, FusedLinearNLL, by_cluster, cluster_layers, product_dtype


def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(W h + b)[target]: hidden [N, D], weight [V, D], bias [V], targets [N] -> [N], in nats.

    Equals cross entropy over the logits, with a third of its passes over them. Differentiable once.
    """
    dtype = product_dtype(hidden)
    return FusedLinearNLL.apply(hidden.to(dtype), weight.to(dtype), bias, targets)


def clustered_nll(
    hidden: Tensor, weight: Tensor, clusters: Tensor, bias: Tensor, targets: Tensor, cluster_bounds: list[int]
) -> Tensor:
    """nll [N] under an adaptive softmax whose K clusters, borders 0 to V, are consecutive rows of one table.

    hidden [N, D], weight [V, D], clusters [K-1, D] (the head's entries for the tails), bias [V + K - 1] (the head's
    with those entries, then each tail's), targets [N]. Differentiable once.
    """
    inputs = [x.to(product_dtype(hidden)) for x in (hidden, weight, clusters)]
    return FusedClusteredNLL.apply(*inputs, bias, targets, cluster_bounds)


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
    Tail i projects to d_model // div_value**i first (arXiv 1609.04309, section 4.3); div_value 1 means no projection,
    and only then can `weight` [V, D] tie the layer to an embedding.
    Raises ValueError where the cutoffs do not increase within (0, V), or a tied layer has a div_value.
    """

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        cutoffs: list[int],
        div_value: int = 1,
        weight: nn.Parameter | None = None,
    ):
        super().__init__()
        cluster_bounds = [0, *cutoffs, vocab_size]
        if not cutoffs or any(low >= high for low, high in pairwise(cluster_bounds)):
            raise ValueError(
                f"cutoffs={list(cutoffs)} must increase strictly between 0 and the vocabulary size {vocab_size}"
            )
        if weight is not None and div_value != 1:
            raise ValueError(f"div_value={div_value} must be 1 where the output layer is tied to the embedding")
        self.cluster_bounds = cluster_bounds
        self.sizes = [high - low for low, high in pairwise(cluster_bounds)]
        self.clusters = nn.Parameter(torch.empty(len(cutoffs), d_model))
        self.bias = nn.Parameter(torch.zeros(vocab_size + len(cutoffs)))
        if div_value == 1:
            self.weight = nn.Parameter(torch.empty(vocab_size, d_model)) if weight is None else weight
            self.tables, self.projections = None, [None] * len(self.sizes)
        else:
            widths = [max(1, d_model // div_value**i) for i in range(len(self.sizes))]
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
            return clustered_nll(hidden, weight, self.clusters, self.bias, targets, self.cluster_bounds)
        (head_targets, tails), (head, *layers) = by_cluster(targets, self.cluster_bounds), self.layers()
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
