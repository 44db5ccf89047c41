"""nas.search.sampling."""

import math

import torch
from torch import Tensor


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u) of float64 draws u in [0, 1]; finite for every u.

    In float64 the ends are clamped to the smallest normal number and to the largest below 1: noise in [-6.6, 36.8].
    """
    if uniform.dtype != torch.float64:
        raise ValueError(f"gumbel needs float64 draws, got {uniform.dtype}: float32 rounds draws to exactly 0 and 1")
    uniform = uniform.clamp(torch.finfo(torch.float64).tiny, 1 - torch.finfo(torch.float64).eps / 2)
    return -torch.log(-torch.log(uniform))


def gumbel_like(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of the logits' shape and type. Drawn on the CPU, so that every device and rank sees the same."""
    uniform = torch.rand(logits.shape, dtype=torch.float64, generator=generator, device="cpu")
    return gumbel(uniform).to(logits.device, logits.dtype)


def relax(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """The relaxed sample softmax((log pi + g) / temperature), [N, O] (arXiv 1611.01144, equation 2)."""
    return ((logits.log_softmax(dim=-1) + noise) / temperature).softmax(dim=-1)


def sample_path(logits: Tensor, generator: torch.Generator) -> list[int]:
    """One operation per block, argmax(log pi + g), which is distributed as pi (arXiv 1611.01144, equation 1)."""
    return (logits.detach() + gumbel_like(logits, generator)).argmax(dim=-1).tolist()


def fair_paths(blocks: int, operations: int, generator: torch.Generator) -> list[list[int]]:
    """As many paths as operations, which together visit each operation of each block exactly once; in each block the
    order is drawn by itself. The paths are those of strict fairness (arXiv 1907.01845, section 3.2); its single update
    from their summed gradients is not made here: weights step after each path, as after any other."""
    orders = [torch.randperm(operations, generator=generator).tolist() for _ in range(blocks)]
    return [list(path) for path in zip(*orders, strict=True)]


def straight_through(logits: Tensor, noise: Tensor, temperature: float) -> tuple[list[int], Tensor]:
    """The sampled path and gates [N] of value 1, 1 + w_i - stop_gradient(w_i), through which logits learn."""
    weights = relax(logits, noise, temperature)
    path = weights.detach().argmax(dim=-1)
    chosen = weights.gather(1, path[:, None]).squeeze(1)
    return path.tolist(), 1 + (chosen - chosen.detach())


def log_probability(logits: Tensor, path: list[int]) -> Tensor:
    """log p(path) = sum over blocks of log pi, a scalar."""
    chosen = torch.as_tensor(path, device=logits.device)
    return logits.log_softmax(dim=-1).gather(1, chosen[:, None]).sum()


def temperature_at(progress: float, start: float, end: float, schedule: str) -> float:
    """The temperature at progress 0 ... 1: exactly `start` at 0 and exactly `end` at 1.

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
