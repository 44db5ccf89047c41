"""Output layers: full softmax and adaptive softmax (Grave et al. 2017, arXiv 1609.04309).

N tokens, D model width, V vocabulary. Token ids must be ranked by frequency; 0 is the most frequent token.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STATIC_LOGITS = 2**26  # see has_few_logits()


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """W h + b: hidden [N, D], weight [V, D], bias [V] -> [N, V]."""
    if torch.is_autocast_enabled(hidden.device.type):  # bf16 has too few digits for the sum of a logit and its bias
        return F.linear(hidden, weight).float() + bias
    return F.linear(hidden, weight, bias)


def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(W h + b)[target]: hidden [N, D], weight [V, D], bias [V], targets [N] -> [N], in nats."""
    return F.cross_entropy(linear_logits(hidden, weight, bias), targets, reduction="none")


def has_few_logits(tokens: int, vocab_size: int) -> bool:
    """Whether a GPU should compute each tail for all tokens."""
    return tokens * vocab_size <= STATIC_LOGITS


def is_static(targets: Tensor, vocab_size: int) -> bool:
    """Whether to compute each tail for all tokens. On a GPU, shapes that depend on the targets would make it wait."""
    return targets.is_cuda and has_few_logits(len(targets), vocab_size)


def tail_nll(
    project: nn.Module, layer: tuple[Tensor, Tensor], hidden: Tensor, labels: Tensor, inside: Tensor, static: bool
) -> Tensor:
    """The nll [N] of the tokens `inside` [N] of a tail, and 0 for the others, whose labels [N] are arbitrary.

    static: see is_static(). A tail without tokens gets gradients of zeros, so that all ranks have the same ones.
    """
    if static:
        nll = linear_nll(project(hidden), *layer, torch.where(inside, labels, 0))
        return torch.where(inside, nll, 0)
    rows = inside.nonzero().squeeze(1)
    nll = linear_nll(project(hidden.index_select(0, rows)), *layer, labels.index_select(0, rows))
    return nll.new_zeros(len(inside)).index_add(0, rows, nll)


class FullSoftmax(nn.Module):
    """nll of each target under softmax(W h + b). `weight` [V, D] ties the layer to an embedding."""

    def __init__(self, d_model: int, vocab_size: int, weight: nn.Parameter | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model)) if weight is None else weight
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [N, D], targets [N] -> nll [N], in nats"""
        return linear_nll(hidden, self.weight, self.bias, targets)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> log-probabilities of all tokens [N, V]"""
        return linear_logits(hidden, self.weight, self.bias).log_softmax(dim=-1)

    def flops(self, mass: list[float]) -> float:
        """As AdaptiveSoftmax.flops()."""
        return 2.0 * self.weight.numel()


class AdaptiveSoftmax(nn.Module):
    """Softmax in clusters: a tail is computed only for the tokens in it.

    The head holds the frequent tokens and one entry per tail. p(token) = p_head(token) for tokens below cutoffs[0],
    else p_head(tail) * p_tail(token | tail). Tail i projects to d_model // div_value**i first (arXiv 1609.04309,
    section 4.3); with div_value 1 there is no projection. `weight` [V, D] ties the layer to an embedding.

    Raises ValueError if the cutoffs do not increase strictly within (0, V), or if a tied layer has div_value > 1.
    """

    def __init__(
        self, d_model: int, vocab_size: int, cutoffs: list[int], div_value: int = 1, weight: nn.Parameter | None = None
    ):
        super().__init__()
        cluster_bounds = [0, *cutoffs, vocab_size]
        if not cutoffs or any(low >= high for low, high in pairwise(cluster_bounds)):
            raise ValueError(f"cutoffs={cutoffs} must increase strictly between 0 and the vocabulary size {vocab_size}")
        if weight is not None and div_value != 1:
            raise ValueError(f"div_value={div_value} must be 1 if the output layer is tied to the embedding")
        self.cluster_bounds = cluster_bounds
        self.cluster_sizes = [high - low for low, high in pairwise(cluster_bounds)]
        self.clusters = nn.Parameter(torch.empty(len(cutoffs), d_model))  # the head's entries for the tails
        self.bias = nn.Parameter(torch.zeros(vocab_size + len(cutoffs)))  # of head, its tail entries, and tails
        if div_value == 1:
            self.weight = nn.Parameter(torch.empty(vocab_size, d_model)) if weight is None else weight
            self.tables, self.projections = None, nn.ModuleList(nn.Identity() for _ in self.cluster_sizes)
        else:
            widths = [max(1, d_model // div_value**i) for i in range(len(self.cluster_sizes))]
            shapes = zip(self.cluster_sizes, widths, strict=True)
            self.tables = nn.ParameterList(nn.Parameter(torch.empty(size, width)) for size, width in shapes)
            projections = (nn.Linear(d_model, width, bias=False) for width in widths[1:])
            self.projections = nn.ModuleList([nn.Identity(), *projections])

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, bias) of the head, then of each tail."""
        head, *tails = self.tables or self.weight.split(self.cluster_sizes)
        weights = [torch.cat([head, self.clusters]), *tails]
        return list(zip(weights, self.bias.split([len(weight) for weight in weights]), strict=True))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [N, D], targets [N] -> nll [N], in nats"""
        (head, *tails), bounds = self.layers(), pairwise(self.cluster_bounds[1:])
        static, labels, nll = is_static(targets, self.cluster_bounds[-1]), targets, 0.0
        for i, (layer, (low, high)) in enumerate(zip(tails, bounds, strict=True), start=1):
            inside = (targets >= low) & (targets < high)  # [N]
            labels = labels.masked_fill(inside, self.cluster_sizes[0] + i - 1)  # the head's entry for the tail
            nll = nll + tail_nll(self.projections[i], layer, hidden, targets - low, inside, static)
        return nll + linear_nll(hidden, *head, labels)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """hidden [N, D] -> log-probabilities of all tokens [N, V]"""
        head, *tails = self.layers()
        head_log = linear_logits(hidden, *head).log_softmax(dim=-1)
        parts = [head_log[:, : self.cluster_sizes[0]]]
        for i, layer in enumerate(tails, start=1):
            tail_log = head_log[:, self.cluster_sizes[0] + i - 1, None]  # [N, 1]
            parts.append(tail_log + linear_logits(self.projections[i](hidden), *layer).log_softmax(dim=-1))
        return torch.cat(parts, dim=-1)

    def flops(self, mass: list[float]) -> float:
        """Expected FLOPs of a forward pass per token. mass: share of the tokens in each cluster, head first."""
        (head, _), *tails = self.layers()
        before = [sum(parameter.numel() for parameter in one.parameters()) for one in self.projections[1:]]
        costs = [weight.numel() + more for (weight, _), more in zip(tails, before, strict=True)]
        return 2.0 * (head.numel() + sum(m * cost for m, cost in zip(mass[1:], costs, strict=True)))
