"""Samples from pi = softmax(logits).

Jang et al. 2016 (arXiv 1611.01144), Maddison et al. 2016 (arXiv 1611.00712). N blocks, O candidate operations.
"""

import torch
from torch import Tensor


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
    """Noise of the shape and type of the logits, which are on the CPU."""
    uniform = torch.rand(logits.shape, dtype=torch.float64, generator=generator, device="cpu")
    return gumbel(uniform).to(logits.dtype)


def relax(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """The relaxed sample softmax((log pi + g) / temperature), [N, O] (arXiv 1611.01144, equation 2)."""
    return ((logits.log_softmax(dim=-1) + noise) / temperature).softmax(dim=-1)


def straight_through(logits: Tensor, noise: Tensor, temperature: float) -> tuple[list[int], Tensor]:
    """The sampled path, and gates [N] 1 + w_i - stop_gradient(w_i) of value 1, which pass gradients to the logits."""
    weights = relax(logits, noise, temperature)  # [N, O]
    path = weights.detach().argmax(dim=-1)  # [N]
    chosen = weights.gather(1, path[:, None]).squeeze(1)  # [N]
    return path.tolist(), 1 + (chosen - chosen.detach())
