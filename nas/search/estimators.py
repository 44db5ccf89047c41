"""Sampling from pi = softmax(logits), and the temperature (Jang et al. 2016, arXiv 1611.01144; Maddison et al. 2016,
arXiv 1611.00712). N blocks, O candidate operations.
"""

import torch
from torch import Tensor


def leave_one_out_gradient(logits: Tensor, paths: list[list[int]], losses: Tensor) -> Tensor:
    """Unbiased estimate [N, O] of the gradient of the expected loss over paths drawn from pi.

    Mean over k of (loss_k - mean of the other losses) * grad log p(path_k): the score function with a leave-one-out
    baseline (Kool, van Hoof, Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free").
    """
    count = len(paths)
    if count < 2:
        raise ValueError(f"leave-one-out needs at least 2 paths, got {count}")
    # In float64: where all paths agree in a block, advantages cancel, and Adam would make steps of what rounding left.
    losses = torch.as_tensor(losses, dtype=torch.float64, device=logits.device)
    advantages = (losses - losses.mean()) * count / (count - 1)  # = loss_k - mean of the other losses
    one_hot = torch.nn.functional.one_hot(torch.as_tensor(paths, device=logits.device), logits.shape[1])
    scores = one_hot - logits.detach().double().softmax(dim=-1)  # [K, N, O]
    return (advantages[:, None, None] * scores).mean(dim=0).to(logits.dtype)
