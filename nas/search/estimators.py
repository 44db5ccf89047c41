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
from nas.search.sampling import WeightsSampler, gumbel_like, relax, sample_path, straight_through
from nas.search.supernet import SuperNet
from nas.training.train_step import Batch, BatchRunner


def leave_one_out_gradient(logits: Tensor, paths: list, losses: Tensor) -> Tensor:
    """Unbiased estimate [N, O] of the gradient of the expected loss over paths drawn from pi.

    Mean over k of (loss_k - mean of the other losses) * grad log p(path_k) (Kool, van Hoof, Welling 2019, "Buy 4
    REINFORCE samples, get a baseline for free"). logits [N, O], paths [K][N], losses [K]. Raises ValueError if K < 2.
    """
    count = len(paths)
    if count < 2:
        raise ValueError(f"leave-one-out needs at least 2 paths, got {count}")
    # In float64, because advantages cancel if all paths agree in a block. Adam would scale up a rounding error.
    losses = torch.as_tensor(losses, dtype=torch.float64)  # [K]
    advantages = (losses - losses.mean()) * count / (count - 1)  # [K], loss_k - mean of the other losses
    one_hot = F.one_hot(torch.as_tensor(paths), logits.shape[1])  # [K, N, O]
    scores = one_hot - logits.detach().double().softmax(dim=-1)  # [K, N, O], grad log p(path_k)
    return (advantages[:, None, None] * scores).mean(dim=0).to(logits.dtype)


class Estimator:
    """The base class of estimators. Subclasses store their estimate in supernet.logits.grad.

    temperature: of relaxed samples; LeaveOneOut, the default, does not use it.
    """

    def __init__(self, supernet: SuperNet, run: BatchRunner, sampler: WeightsSampler, options: SearchOptions):
        self.supernet, self.run, self.sampler, self.options = supernet, run, sampler, options
        self.temperature = options.temperature.start

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


class LeaveOneOut(Estimator):
    """The score function with a leave-one-out baseline (Kool, van Hoof, Welling 2019).

    K sampled paths are evaluated on one batch, forward only. The estimate is unbiased and needs no relaxation.
    """

    @torch.no_grad()
    def estimate(self, batch):
        logits = self.supernet.logits
        self.supernet.eval()
        paths = [tuple(sample_path(logits, self.sampler.generator)) for _ in range(self.options.paths)]
        results = {}
        for path in dict.fromkeys(paths):  # a path that was drawn twice runs once
            self.supernet.set_path(path)
            results[path] = self.run(batch)
        losses = torch.stack([results[path][0] for path in paths]).cpu()
        if not losses.isfinite().all():
            raise FloatingPointError("the loss of a sampled path is not finite")
        logits.grad = leave_one_out_gradient(logits, paths, losses)
        # Keep the memories of the first path, which is drawn from pi. The last distinct path is not.
        return losses.double().mean(), results[paths[0]][1]

    def begin_shared(self, batch):
        self.estimate(batch)
        self.supernet.train()
        self.sampler.draw(warmup=False, temperature=self.temperature)


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
HARD_ESTIMATORS = {"leave_one_out": LeaveOneOut, "straight_through": StraightThrough}


def estimator_class(options: SearchOptions) -> type[Estimator]:
    return Relaxed if options.sampling == "soft" else HARD_ESTIMATORS[options.estimator]
