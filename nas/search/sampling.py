"""Sampling from pi = softmax(logits), and the temperature.

Jang et al. 2016 (arXiv 1611.01144), Maddison et al. 2016 (arXiv 1611.00712). N blocks, O candidate operations.
"""

import math

import torch
from torch import Tensor

from nas.core.config import SearchOptions
from nas.search.supernet import SuperNet


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u) of float64 draws u in [0, 1]; finite for every u.

    u is clamped to the smallest normal float64 and to the largest below 1, so the noise is in [-6.6, 36.8]. Raises
    ValueError if u is not float64.
    """
    if uniform.dtype != torch.float64:
        raise ValueError(f"gumbel needs float64 draws, got {uniform.dtype}: float32 rounds draws to exactly 0 and 1")
    uniform = uniform.clamp(torch.finfo(torch.float64).tiny, 1 - torch.finfo(torch.float64).eps / 2)
    return -torch.log(-torch.log(uniform))


def gumbel_like(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of the shape and type of the logits. It is drawn on the CPU, so that it is equal on all
    devices and ranks.
    """
    uniform = torch.rand(logits.shape, dtype=torch.float64, generator=generator, device="cpu")
    return gumbel(uniform).to(logits.device, logits.dtype)


def relax(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """The relaxed sample softmax((log pi + g) / temperature), [N, O] (arXiv 1611.01144, equation 2)."""
    return ((logits.log_softmax(dim=-1) + noise) / temperature).softmax(dim=-1)


def sample_path(logits: Tensor, generator: torch.Generator) -> list[int]:
    """One operation per block, argmax(log pi + g), which is distributed as pi (arXiv 1611.01144, equation 1)."""
    return (logits.detach() + gumbel_like(logits, generator)).argmax(dim=-1).tolist()


def straight_through(logits: Tensor, noise: Tensor, temperature: float) -> tuple[list[int], Tensor]:
    """The sampled path, and gates [N] 1 + w_i - stop_gradient(w_i) of value 1, which pass gradients to the logits."""
    weights = relax(logits, noise, temperature)  # [N, O]
    path = weights.detach().argmax(dim=-1)  # [N]
    chosen = weights.gather(1, path[:, None]).squeeze(1)  # [N]
    return path.tolist(), 1 + (chosen - chosen.detach())


def fair_paths(blocks: int, operations: int, generator: torch.Generator) -> list[list[int]]:
    """O paths that together visit each operation of each block exactly once, in an order drawn for each block.

    These are the paths of strict fairness (arXiv 1907.01845, section 3.2). The paper updates the weights once with
    the summed gradients of all O paths; here each path has its own update.
    """
    orders = [torch.randperm(operations, generator=generator).tolist() for _ in range(blocks)]
    return [list(path) for path in zip(*orders, strict=True)]


def temperature_at(progress: float, start: float, end: float, schedule: str) -> float:
    """The temperature at a progress from 0 to 1. It is exactly `start` at 0 and exactly `end` at 1.

    Raises ValueError on an unknown schedule.
    """
    if progress <= 0:
        return start
    if progress >= 1:
        return end
    if schedule == "exponential":
        return start * (end / start) ** progress
    if schedule == "linear":
        return start + (end - start) * progress
    if schedule == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"unknown schedule {schedule!r}")


class WeightsSampler:
    """Sets the SuperNet to samples for steps in which only its weights train; the logits get no gradient."""

    def __init__(self, supernet: SuperNet, options: SearchOptions, generator: torch.Generator):
        self.supernet, self.options, self.generator = supernet, options, generator
        self.fair_queue: list[list[int]] = []  # the unused paths of the last fair_paths()

    def draw(self, warmup: bool, temperature: float) -> None:
        """Set the SuperNet to a sample from pi, or from uniform pi in the warm-up and if weights_paths is uniform."""
        uniform = warmup or self.options.weights_paths == "uniform"
        logits = self.supernet.logits.detach()
        if uniform:
            logits = torch.zeros_like(logits)
        if self.options.sampling == "soft":
            self.supernet.set_mixture(relax(logits, gumbel_like(logits, self.generator), temperature))
        elif uniform and self.options.fair_warmup:
            self.fair_queue = self.fair_queue or fair_paths(*logits.shape, self.generator)
            self.supernet.set_path(self.fair_queue.pop())
        else:
            self.supernet.set_path(sample_path(logits, self.generator))
