"""nas.training.optimizer."""

import math

import torch
from torch import Tensor, nn

from models.transformer_xl import is_matrix
from nas.core.config import TrainOptions


def learning_rate(step: int, total: int, peak: float, warmup: int, final: float) -> float:
    """Linear warm-up to `peak` at step `warmup`, then a cosine to final * peak at step `total`."""
    if step < warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


class WeightsOptimizer:
    """AdamW (arXiv 1711.05101) with warm-up, cosine and clipping; decays matrices alone, not biases and norms."""

    def __init__(self, model: nn.Module, options: TrainOptions, total_steps: int, on_gpu: bool = False):
        """on_gpu: clip, and leave out updates that are not finite, without waiting for any number of the GPU's."""
        self.parameters, self.options, self.total_steps = list(model.parameters()), options, total_steps
        self.on_gpu = on_gpu
        decayed, others = [], []
        for name, parameter in model.named_parameters():
            (decayed if is_matrix(name, parameter) else others).append(parameter)
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        lr = torch.tensor(options.lr, device=decayed[0].device) if on_gpu else options.lr
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, options.beta2), fused=True, capturable=on_gpu)

    @property
    def lr(self) -> float:
        return float(self.adam.param_groups[0]["lr"])

    def sums(self) -> Tensor:
        """Of each parameter's entries."""
        return torch.stack([parameter.detach().double().sum() for parameter in self.parameters])

    def clear(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def set_lr(self, step: int) -> None:
        options = self.options
        lr = learning_rate(step, self.total_steps, options.lr, options.warmup_steps, options.min_lr_ratio)
        for group in self.adam.param_groups:
            if self.on_gpu:
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def apply(self) -> Tensor | float:
        """One update from the gradients at hand, at the rate set last. Returns 0.

        Where they are not finite raises FloatingPointError; on_gpu, changes nothing and returns NaN.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.on_gpu:  # what a gradient scaler sets: the fused kernel divides by the one, and heeds the other
            if self.options.clip:
                self.adam.grad_scale = (norm / self.options.clip).clamp_min(1.0)
            self.adam.found_inf = (~norm.isfinite()).float()
            self.adam.step()
            return norm * 0.0
        size = norm.item()
        if not math.isfinite(size):
            raise FloatingPointError(f"the gradient's norm is {size}")
        if self.options.clip and size > self.options.clip:  # else it would be a pass over all gradients
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.options.clip, norm)
        self.adam.step()
        return 0.0

    def state_dict(self) -> dict:
        """The same on every device."""
        state = self.adam.state_dict()
        groups = [{**group, "lr": self.lr, "capturable": False} for group in state["param_groups"]]
        return state | {"param_groups": groups}

    def load_state_dict(self, state: dict) -> None:
        rates = [group["lr"] for group in self.adam.param_groups]
        self.adam.load_state_dict(state)
        for group, rate in zip(self.adam.param_groups, rates, strict=True):
            value = float(group["lr"])
            group |= {"lr": rate.fill_(value) if self.on_gpu else value, "capturable": self.on_gpu}
