"""Output layers: full softmax and adaptive softmax (Grave et al. 2017, arXiv 1609.04309).

N tokens, D model width, V vocabulary. Token ids must be ranked by frequency, 0 the most frequent.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class LinearNLLFunction(torch.autograd.Function):
    """linear_nll in one buffer of logits, which the backward pass goes on using.

    With e = exp(logit - largest) and s = sum of e, the gradient of a row's logits is g (e / s - one_hot(target)), g
    the gradient of its nll. So e - s one_hot is kept, and the factor g / s is put on what a row is multiplied with.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets):
        logits, index = (hidden @ weight.t()).add_(bias), targets[:, None]
        largest, target_logit = logits.amax(dim=1, keepdim=True), logits.gather(1, index)
        exponentials = logits.sub_(largest).exp_()
        total = exponentials.sum(dim=1, keepdim=True)
        if any(ctx.needs_input_grad):
            exponentials.scatter_add_(1, index, -total)
            ctx.save_for_backward(hidden, weight, exponentials, total)
        return (total.log() + largest - target_logit).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, difference, total = ctx.saved_tensors
        factor = gradient[:, None] / total
        to_weight = difference.t() @ (hidden * factor)
        return (difference @ weight).mul_(factor), to_weight, (factor.t() @ difference).squeeze(0), None


def linear_nll(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(W h + b)[target]: hidden [N, D], weight [V, D], bias [V], targets [N] -> [N], in nats.

    Equals cross entropy over the logits, with a third of its passes over them. Differentiable once.
    """
    return LinearNLLFunction.apply(hidden, weight, bias, targets)


class FullSoftmax(nn.Module):
    """nll of every target under softmax(W h + b). `weight` [V, D] ties the layer to an embedding."""

    def __init__(self, d_model: int, vocab_size: int, weight: nn.Parameter | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model)) if weight is None else weight
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [N, D], targets [N] -> nll [N], in nats"""
        return linear_nll(hidden, self.weight, self.bias, targets)

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
        # One split, not one slice per cluster: a slice's backward pass allocates a gradient for the whole table.
        tables = list(self.tables or self.weight.split(self.sizes))
        tables[0] = torch.cat([tables[0], self.clusters])
        biases = self.bias.split([self.sizes[0] + len(self.clusters), *self.sizes[1:]])
        return list(zip(tables, biases, strict=True))

    def project(self, hidden: Tensor, index: int) -> Tensor:
        """hidden [N, D] to the width of cluster `index`."""
        projection = self.projections[index]
        return hidden if projection is None else projection(hidden)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [N, D], targets [N] -> nll [N], in nats"""
        head, *tails = self.layers()
        head_targets, found = targets.clamp_max(self.sizes[0] - 1), []
        for i, layer in enumerate(tails, start=1):
            inside = (targets >= self.borders[i]) & (targets < self.borders[i + 1])
            head_targets = head_targets.masked_fill(inside, self.sizes[0] + i - 1)
            rows = inside.nonzero().squeeze(1)
            if rows.numel():
                tail_hidden = self.project(hidden.index_select(0, rows), i)
                found.append((rows, linear_nll(tail_hidden, *layer, targets.index_select(0, rows) - self.borders[i])))
        nll = linear_nll(hidden, *head, head_targets)
        for rows, tail_nll in found:
            nll = nll.index_add(0, rows, tail_nll)
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
