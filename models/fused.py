"""models.fused."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def relative_shift(scores: Tensor, step: int = 1) -> Tensor:
    """Turn scores by distance into scores by key, [..., L, K] -> [..., L, K] with contiguous matrices, a view of the
    same storage (arXiv 1901.02860, appendix B). step: by how many columns the keys move on from a query to the next.

    With step 1, column c of the input belongs to the distance K-1-c. In the output, column j of row i holds the score
    of the distance M+i-j between that query and that key, which is column j+L-1-i of the input: a step down a row is
    K-1 entries further, not K. Entries with j > M+i (the future) hold other rows' values and must be masked.
    In general column j of row i comes from column j + step * (L-1-i): the last row stays as it is.
    """
    length, keys = scores.shape[-2:]
    strides = (*scores.stride()[:-2], keys - step, 1)
    return scores.flatten(-2)[..., step * (length - 1) :].as_strided(scores.shape, strides)


class FusedAttention(torch.autograd.Function):
    """attend() with a backward pass by hand.

    What autograd would do step by step costs three times the memory traffic: here the scores are made, shifted, masked
    and normalised in one buffer, and neither direction of the shift moves data. The batch shares its positions, so that
    the position products are one product per head.
    """

    @staticmethod
    def forward(ctx, query, key_value, position, content_bias, position_bias, mask, step, with_lse):
        lead, (length, width), keys = query.shape[:-2], query.shape[-2:], key_value.shape[-2]
        rows, scale = lead.numel(), width**-0.5
        key, value = key_value.reshape(2, rows, keys, width)
        scores, position_query = query.new_empty(*lead, length, keys), None
        if position is None:
            content_query = query.reshape(rows, length, width)
            scores.copy_(mask)
        else:
            ctx.heads = position.shape[:-2]
            position = position.reshape(-1, keys, width)
            content_query = add_bias(query, content_bias).view(rows, length, width)
            position_query = add_bias(query, position_bias).view(len(position), -1, width)
            by_distance = torch.bmm(position_query, position.transpose(1, 2)).view(scores.shape)
            torch.add(mask, relative_shift(by_distance, step), alpha=scale, out=scores)
        flat = scores.view(rows, length, keys)
        torch.baddbmm(flat, content_query, key.transpose(1, 2), alpha=scale, out=flat)
        highest = flat.amax(dim=-1, keepdim=True) if with_lse else None
        weights = torch.softmax(flat, dim=-1, out=flat)
        # log-sum-exp, from the largest score and the weight that it got
        lse = (highest - weights.amax(dim=-1, keepdim=True).log()).view(*lead, length, 1) if with_lse else None
        mixed = torch.bmm(weights, value)
        ctx.save_for_backward(content_query, position_query, key, value, position, weights, mixed)
        ctx.lead, ctx.step = lead, step
        ctx.set_materialize_grads(False)
        return mixed.view(*lead, length, width), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, to_lse):
        content_query, position_query, key, value, position, weights, mixed = ctx.saved_tensors
        (rows, keys, width), length, step = key.shape, mixed.shape[1], ctx.step
        if gradient is None:
            gradient = torch.zeros_like(mixed)
        gradient = gradient.reshape(rows, length, width)

        # With g = gradient @ value^T, a softmax's gradient is weights * (g - expected g under the weights), and that
        # expectation is gradient . mixed. Of the log-sum-exp, the weights themselves are the gradient. The scale of the
        # scores comes along.
        expected, scale = (gradient * mixed).sum(dim=-1, keepdim=True), width**-0.5
        if to_lse is not None:
            expected -= to_lse.reshape(expected.shape)
        centred = torch.baddbmm(
            expected.expand(rows, length, keys), gradient, value.transpose(1, 2), beta=-scale, alpha=scale
        )
        # Written behind L * step zeros, so that the same storage read in rows of K + step, less their first `step`
        # columns, is the gradient by distance: the shift backwards. (What it reads across a row's end is future, and so
        # is zero, since a query that sees no key at all has no gradient from its caller either.)
        zeros = 0 if position is None else length * step
        storage = gradient.new_empty(rows, zeros + length * keys)
        storage[:, :zeros] = 0
        by_key = storage[:, zeros:].view(rows, length, keys)
        torch.mul(centred, weights, out=by_key)

        to_key_value = gradient.new_empty(2, rows, keys, width)
        torch.bmm(by_key.transpose(1, 2), content_query, out=to_key_value[0])
        torch.bmm(weights.transpose(1, 2), gradient, out=to_key_value[1])
        to_key_value = to_key_value.view(2, *ctx.lead, keys, width)
        to_query = torch.bmm(by_key, key)
        if position is None:
            return to_query.view(*ctx.lead, length, width), to_key_value, *[None] * 6
        heads = len(position)
        by_distance = storage.view(heads, -1, keys + step)[:, :, step:]
        from_position = torch.bmm(by_distance, position)
        to_position = torch.bmm(by_distance.transpose(1, 2), position_query).view(*ctx.heads, keys, width)
        to_content_bias = to_query.view(heads, -1, width).sum(dim=1).view(*ctx.heads, width)
        to_position_bias = from_position.sum(dim=1).view(*ctx.heads, width)
        to_query = (to_query + from_position.view_as(to_query)).view(*ctx.lead, length, width)
        return to_query, to_key_value, to_position, to_content_bias, to_position_bias, None, None, None


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which matrix products of x are made: autocast's where that is on, for functions with a backward pass
    by hand have to cast for themselves."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def add_bias(query: Tensor, bias: Tensor) -> Tensor:
    """query [*heads, *batch, L, E], in whatever layout, and a bias [*heads, E], added into a contiguous result."""
    bias = bias.view(*bias.shape[:-1], *[1] * (query.ndim - bias.ndim), bias.shape[-1])
    return torch.add(query, bias, out=query.new_empty(query.shape))


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


class FusedLinearNLL(torch.autograd.Function):
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


class FusedClusteredNLL(torch.autograd.Function):
    """clustered_nll; every cluster writes its part of the table's gradient into one buffer."""

    @staticmethod
    def forward(ctx, hidden, weight, clusters, bias, targets, cluster_bounds):
        tables = weight.split([high - low for low, high in pairwise(cluster_bounds)])
        head_targets, tails = by_cluster(targets, cluster_bounds)
        (table, offset), *layers = cluster_layers(tables, clusters, bias)
        nll, difference, total = layer_nll(hidden, table, offset, head_targets)
        saved = [hidden, table, difference, total]
        for (table, offset), tail in zip(layers, tails, strict=True):
            picked = tail.pick(hidden)
            part, difference, total = layer_nll(picked, table, offset, tail.labels)
            nll = tail.add(nll, part)
            saved += [tail.rows, tail.inside, picked, table, difference, total]
        ctx.save_for_backward(*saved)
        ctx.cluster_bounds = cluster_bounds
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        saved, cluster_bounds = ctx.saved_tensors, ctx.cluster_bounds
        head, tails = saved[:4], [saved[start : start + 6] for start in range(4, len(saved), 6)]
        to_weight, to_bias = head[0].new_empty(cluster_bounds[-1], head[0].shape[1]), []
        to_hidden, to_head, offset = gradients(*head, gradient)
        to_weight[: cluster_bounds[1]] = to_head[: cluster_bounds[1]]
        to_bias.append(offset)
        for (rows, inside, *layer), (low, high) in zip(tails, pairwise(cluster_bounds[1:]), strict=True):
            to_part = gradient * inside if rows is None else gradient.index_select(0, rows)
            to_picked, _, offset = gradients(*layer, to_part, out=to_weight[low:high])
            to_hidden = to_hidden.add_(to_picked) if rows is None else to_hidden.index_add_(0, rows, to_picked)
            to_bias.append(offset)
        return to_hidden, to_weight, to_head[cluster_bounds[1] :], torch.cat(to_bias), None, None


def cluster_layers(tables: Sequence[Tensor], clusters: Tensor, bias: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of the head, which has an entry for each tail too, then of each tail."""
    head, *tails = tables
    weights = [torch.cat([head, clusters]), *tails]
    return list(zip(weights, bias.split([len(weight) for weight in weights]), strict=True))


def is_static(targets: Tensor, vocab_size: int) -> bool:
    """Whether tails are better computed for all tokens: on a GPU, where that is little work. To find a tail's tokens
    the processor would have to wait for the GPU, and a CUDA graph needs the same shapes at each replay."""
    return targets.is_cuda and len(targets) * vocab_size <= STATIC_LOGITS


def by_cluster(targets: Tensor, cluster_bounds: list[int]) -> tuple[Tensor, list[Tail]]:
    """Targets [N] as labels of the head [N], in which cluster i has the label borders[1] + i - 1, and the tails."""
    head_targets, tails, static = targets, [], is_static(targets, cluster_bounds[-1])
    for i in range(1, len(cluster_bounds) - 1):
        inside = (targets >= cluster_bounds[i]) & (targets < cluster_bounds[i + 1])
        head_targets = head_targets.masked_fill(inside, cluster_bounds[1] + i - 1)
        if static:
            tails.append(Tail(None, torch.where(inside, targets - cluster_bounds[i], 0), inside))
        else:
            rows = inside.nonzero().squeeze(1)
            tails.append(Tail(rows, targets.index_select(0, rows) - cluster_bounds[i], None))
    return head_targets, tails
