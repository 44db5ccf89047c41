"""The optimizer of the weights: AdamW, or Muon and AdamW, with warm-up, a schedule and clipping."""

import math

import torch
from torch import Tensor, nn

from models.transformer_xl import is_matrix
from nas.core.config import TrainOptions
from nas.training.muon import Muon


def cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    return 1 - progress


def trapezoid(progress: float, decay: float = 0.4) -> float:
    """Constant, and then linear in the last steps (arXiv 2405.18392)."""
    return min(1.0, (1 - progress) / decay)


SCHEDULES = {"cosine": cosine, "linear": linear, "trapezoid": trapezoid}


def learning_rate(step: int, total: int, peak: float, warmup: int, min_ratio: float, schedule=cosine) -> float:
    """Linear warm-up to `peak` at step `warmup`, then the schedule down to min_ratio * peak at step `total`."""
    if step < warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (min_ratio + (1 - min_ratio) * schedule(progress))


class WeightsOptimizer:
    """AdamW (arXiv 1711.05101), or Muon for the matrices of blocks and AdamW for the rest.

    Biases and norms do not decay.
    """

    def __init__(self, network: nn.Module, options: TrainOptions, total_steps: int, on_gpu: bool = False):
        """on_gpu: whether the weights are on a GPU, in which case step() does not wait for it."""
        self.parameters, self.options, self.total_steps = list(network.parameters()), options, total_steps
        self.on_gpu = on_gpu
        orthogonal, decayed, others = [], [], []
        for name, parameter in network.named_parameters():
            if not is_matrix(name, parameter):
                others.append(parameter)
            elif options.optimizer == "muon" and name.startswith("blocks."):
                orthogonal.append(parameter)
            else:
                decayed.append(parameter)
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, options.beta2), fused=True)
        self.muon = None
        if orthogonal:
            self.muon = Muon(orthogonal, options.muon_lr, options.momentum, options.weight_decay)
        self.optimizers = {"adam": self.adam} | ({"muon": self.muon} if self.muon else {})

    @property
    def lr(self) -> float:
        return self.adam.param_groups[0]["lr"]

    def set_lr(self, step: int) -> None:
        options = self.options
        schedule = SCHEDULES[options.schedule]
        ratio = learning_rate(step, self.total_steps, 1.0, options.warmup_steps, options.min_lr_ratio, schedule)
        for group in self.adam.param_groups:
            group["lr"] = ratio * options.lr
        if self.muon:
            self.muon.param_groups[0]["lr"] = ratio * options.muon_lr

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> Tensor:
        """Update the weights and return the norm of the gradients. If it is not finite, keep the weights."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        finite, clip = norm.isfinite(), self.options.clip
        if self.on_gpu:
            if clip:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, norm)
            self.adam.found_inf = (~finite).float()  # the fused kernel skips the update if it is 1
            self.adam.step()
            if self.muon:
                self.muon.step(finite)
        elif finite:
            if clip and norm > clip:  # clipping reads every gradient once more, so skip it if it has no effect
                torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, norm)
            self.adam.step()
            if self.muon:
                self.muon.step()
        return norm

    def parameter_sums(self) -> Tensor:
        """The sum of each parameter's entries [parameters], in float64."""
        return torch.stack([parameter.detach().double().sum() for parameter in self.parameters])

    def state_dict(self) -> dict:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
