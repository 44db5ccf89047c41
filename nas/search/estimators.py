"""Estimators of the logits' gradient from the loss of batches.

N blocks, O candidate operations, K paths. With search.split=heldout a step of the logits calls only estimate(), on
text that the weights never see. With search.split=shared, begin_shared() runs before the weights train on the same
batch, and end_shared() runs after it.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from models.transformer_xl import Memories
from nas.core.config import SearchOptions
from nas.search.sampling import WeightsSampler, gumbel_like, relax, straight_through
from nas.search.supernet import SuperNet
from nas.training.train_step import Batch, BatchRunner

GROWTH = 0.7  # progress of the logits at which RiskSeeking counts all paths


def leave_one_out_weights(losses: Tensor) -> Tensor:
    """Weights [K] of grad log p(path_k) whose sum is an unbiased estimate of the gradient of the expected loss.

    Mean over k of loss_k - mean of the other losses (Kool, van Hoof, Welling 2019, "Buy 4 REINFORCE samples, get a
    baseline for free"). Raises ValueError if K < 2.
    """
    if len(losses) < 2:
        raise ValueError(f"leave-one-out needs at least 2 paths, got {len(losses)}")
    return (losses - losses.mean()) / (len(losses) - 1)


def risk_seeking_weights(losses: Tensor, fraction: float) -> Tensor:
    """Weights [K] of grad log p(path_k) whose sum estimates the gradient of the mean of the best losses.

    These are the leave-one-out weights of min(loss, quantile) / fraction, so the paths beyond the best `fraction` all
    count the same (Petersen et al. 2019, arXiv 1912.04871, section 3.3, where rewards are maximised). The estimate is
    consistent: its bias vanishes as K grows. With fraction 1 it is leave-one-out.
    """
    return leave_one_out_weights(losses.clamp_max(losses.quantile(fraction))) / fraction


def score_gradient(paths: list, weights: Tensor, operations: int) -> Tensor:
    """Sum over k of weight_k * grad log p(path_k) with respect to the logits, [N, operations].

    paths [K][N]; weights [K] that sum to 0. grad log p(path) is one_hot(path) minus the expected one_hot under p, which
    is pi or pi within a budget. The expected one_hot is the same for all paths, so it cancels.
    """
    one_hot = F.one_hot(torch.as_tensor(paths), operations)  # [K, N, O]
    return (weights[:, None, None] * one_hot).sum(dim=0)


class Estimator:
    """The base class of estimators. Subclasses store their estimate in supernet.logits.grad.

    temperature: of relaxed samples; progress: of the logits' training, from 0 to 1. The caller sets both.
    """

    def __init__(self, supernet: SuperNet, run: BatchRunner, sampler: WeightsSampler, options: SearchOptions):
        self.supernet, self.run, self.sampler, self.options = supernet, run, sampler, options
        self.temperature, self.progress = options.temperature.start, 0.0

    def estimate(self, batch: Batch) -> tuple[Tensor, Memories]:
        """Estimate the gradient of the logits on a batch, without dropout. The weights do not change.

        The SuperNet stays in evaluation mode.
        Returns the mean nll over the samples in nats per token, and the memories for the next batch.
        """
        raise NotImplementedError

    def begin_shared(self, batch: Batch) -> None:
        """Set the SuperNet to the sample with which the weights, and in some estimators the logits, train on this
        batch.
        """
        raise NotImplementedError

    def end_shared(self) -> None:
        """Finish the estimate after the backward pass of the weights."""


class ScoreFunction(Estimator):
    """K sampled paths are evaluated on one batch, forward only. Subclasses weigh them by their losses."""

    def weights(self, losses: Tensor) -> Tensor:
        """The weight of each path's score, from losses [K] in float64."""
        raise NotImplementedError

    @torch.no_grad()
    def estimate(self, batch):
        logits = self.supernet.logits
        self.supernet.eval()
        paths = self.sampler.paths.sample(logits, self.options.paths, self.sampler.generator)
        results = {}
        for path in dict.fromkeys(paths):  # a path that was drawn twice runs once
            self.supernet.set_path(path)
            results[path] = self.run(batch)
        # In float64, because weights cancel if all paths agree in a block. Adam would scale up a rounding error.
        losses = torch.stack([results[path][0] for path in paths]).cpu().double()
        if not losses.isfinite().all():
            raise FloatingPointError("the loss of a sampled path is not finite")
        logits.grad = score_gradient(paths, self.weights(losses), logits.shape[1]).to(logits.dtype)
        # The first path is a fair draw from pi. The last distinct path is more often a rare one.
        return losses.mean(), results[paths[0]][1]

    def begin_shared(self, batch):
        self.estimate(batch)
        self.supernet.train()
        self.sampler.draw(uniform=False, temperature=self.temperature)


class LeaveOneOut(ScoreFunction):
    """Follows the expected loss over pi. The estimate is unbiased and needs no relaxation."""

    def weights(self, losses):
        return leave_one_out_weights(losses)


class RiskSeeking(ScoreFunction):
    """Follows the mean loss of the best paths, because derive.py takes one path, whatever the average over pi is.

    The share of the paths that count as the best grows to 1. Once one path has a larger probability than this share,
    its gradient vanishes, although pi may favour no single path yet. The growing share lets pi converge.
    """

    def weights(self, losses):
        start = self.options.best_fraction
        return risk_seeking_weights(losses, start + (1 - start) * min(1.0, max(0.0, self.progress) / GROWTH))


class Relaxed(Estimator):
    """Soft sampling: all candidates run, weighted by the relaxed sample (arXiv 1611.01144, equation 2)."""

    def draw(self) -> tuple[Tensor, Tensor]:
        """A sample as a function of the logits, and its detached copy, which the SuperNet uses."""
        noise = gumbel_like(self.supernet.logits, self.sampler.generator)
        sample = relax(self.supernet.logits, noise, self.temperature)
        leaf = sample.detach().requires_grad_()
        self.supernet.set_mixture(leaf)
        return sample, leaf

    def estimate(self, batch):
        self.supernet.eval()
        self.begin_shared(batch)
        nll, memories = self.run(batch, partial(torch.Tensor.backward, inputs=[self.leaf]))
        self.end_shared()
        return nll, memories

    def begin_shared(self, batch):
        # Backward passes stop at the copy, because a batch that is read in parts needs several of them.
        self.sample, self.leaf = self.draw()

    def end_shared(self):
        self.sample.backward(self.leaf.grad)


class StraightThrough(Relaxed):
    """One sampled operation per block, with a gate of value 1 whose gradient is that of the relaxed weight.

    The estimate is biased (arXiv 1611.01144, section 2.2).
    """

    def draw(self):
        noise = gumbel_like(self.supernet.logits, self.sampler.generator)
        path, gates = straight_through(self.supernet.logits, noise, self.temperature)
        leaf = gates.detach().requires_grad_()
        self.supernet.set_path(path, leaf)
        return gates, leaf


# CONTRIBUTING.md lists what else a new estimator needs.
HARD_ESTIMATORS = {
    "risk_seeking": RiskSeeking,
    "leave_one_out": LeaveOneOut,
    "straight_through": StraightThrough,
}


def estimator_class(options: SearchOptions) -> type[Estimator]:
    return Relaxed if options.sampling == "soft" else HARD_ESTIMATORS[options.estimator]
