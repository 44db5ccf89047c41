"""The optimizer of the weights: AdamW, or Muon and AdamW, with warm-up, a schedule and clipping."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.operations.operation import Operation
from nas.core.config import TrainOptions

LINEAR_END = 0.25  # ratio of the last learning rate to the peak
MOMENTUM = 0.9  # of Muon
NEWTON_SCHULZ_STEPS = 5


def lr_ratio(step: int, total: int, warmup: int, schedule: str) -> float:
    """The learning rate over its peak: it rises linearly to step `warmup`, and falls to 0 or LINEAR_END at `total`."""
    if step < warmup:
        return step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return LINEAR_END + (1 - LINEAR_END) * (1 - progress)


def orthogonalise(matrices: Tensor, in_bf16: bool = False) -> Tensor:
    """Replace the singular values of each matrix [n, rows, columns] by values near 1, by Newton-Schulz iterations."""
    x = matrices.bfloat16() if in_bf16 else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the Gram matrix of the shorter side is smaller
        x = x.mT
    a, b, c = 3.4445, -4.7750, 2.0315  # the polynomial of Jordan et al.; singular values end in [0.68, 1.13]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)  # singular values are then at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; arXiv 2502.16982).

    It replaces the singular values of the Nesterov momentum by values near 1. An update is multiplied by
    sqrt(max(1, rows / columns)), so that one learning rate suits all widths. Weight decay is decoupled, as in AdamW.
    Matrices without a gradient keep their value and their momentum.

    Unlike torch.optim.Muon, it updates all matrices of one shape in one product, can work in fp32, and can skip an
    update without waiting for the GPU (experiments/bench/LOG.md has the times). in_bf16: of orthogonalise().
    """

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float, weight_decay: float, in_bf16: bool = False):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.in_bf16 = in_bf16

    @torch.no_grad()
    def step(self, scale: Tensor, finite: Tensor) -> None:
        """Update the matrices, if `finite`, by gradients / scale. Both are 0-d tensors, which may be on a GPU."""
        (group,), by_shape = self.param_groups, {}
        lr = group["lr"] * finite.double()  # a scalar; matrices keep their type
        for matrix in group["params"]:
            if matrix.grad is not None:
                by_shape.setdefault(matrix.shape, []).append(matrix)
                if not self.state[matrix]:
                    self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        for (rows, columns), matrices in by_shape.items():
            momenta = [self.state[matrix]["momentum"] for matrix in matrices]
            gradients = torch.where(finite, torch.stack([matrix.grad for matrix in matrices]) / scale, 0.0).unbind()
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            nesterov = torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"]))
            directions = orthogonalise(nesterov, self.in_bf16) * (lr * max(1, rows / columns) ** 0.5)
            torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
            torch._foreach_sub_(matrices, list(directions.unbind()))


def parameters_within(network: nn.Module, kind: type[nn.Module]) -> list[nn.Parameter]:
    return [p for module in network.modules() if isinstance(module, kind) for p in module.parameters()]


class WeightsOptimizer:
    """AdamW (arXiv 1711.05101), or Muon for the weights of linear layers in operations and AdamW for the rest. These
    weights, and the matrices outside of operations, decay.
    """

    def __init__(self, network: nn.Module, options: TrainOptions, total_steps: int, muon_bf16: bool = False):
        self.parameters, self.options, self.total_steps = list(network.parameters()), options, total_steps
        orthogonal, decayed, others = [], [], []
        within = {id(parameter) for parameter in parameters_within(network, Operation)}
        linear = {id(parameter) for parameter in parameters_within(network, nn.Linear) if parameter.ndim == 2}
        for parameter in self.parameters:
            if id(parameter) in within - linear or parameter.ndim != 2:
                others.append(parameter)
            elif options.optimizer == "muon" and id(parameter) in within:
                orthogonal.append(parameter)
            else:
                decayed.append(parameter)
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, options.beta2), fused=True)
        muon_options = options.muon_lr, MOMENTUM, options.weight_decay, muon_bf16
        self.muon = Muon(orthogonal, *muon_options) if orthogonal else None
        self.optimizers = {"adam": self.adam} | ({"muon": self.muon} if self.muon else {})
        self.lr = options.lr
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")  # graphs come later
        self.place_rates()

    def place_rates(self) -> None:
        """On a GPU make the learning rates tensors, because a CUDA graph keeps the value of a number."""
        device = self.parameters[0].device
        for group in (group for optimizer in self.optimizers.values() for group in optimizer.param_groups):
            on_gpu, lr = device.type == "cuda", float(group["lr"])
            group["lr"], group["capturable"] = torch.tensor(lr, device=device) if on_gpu else lr, on_gpu

    def set_lr(self, step: int) -> None:
        options = self.options
        ratio = lr_ratio(step, self.total_steps, options.warmup_steps, options.schedule)
        self.lr = ratio * options.lr
        for optimizer, peak in (self.adam, options.lr), (self.muon, options.muon_lr):
            for group in optimizer.param_groups if optimizer else ():
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(ratio * peak)
                else:
                    group["lr"] = ratio * peak

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> Tensor:
        """Update the weights, if the norm of the gradients is finite, and return it, without waiting for a GPU."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        finite, clip = norm.isfinite(), self.options.clip
        scale = (norm / clip).clamp_min(1.0) if clip else torch.ones_like(norm)
        # The fused kernel divides the gradients by grad_scale, and skips the update if found_inf is 1.
        self.adam.grad_scale, self.adam.found_inf = scale, (~finite).float()
        self.adam.step()
        if self.muon:
            self.muon.step(scale, finite)
        return norm

    def state_dict(self) -> dict:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
        self.place_rates()


class TailAverage:
    """The mean of the weights over the last steps of a training (arXiv 1803.05407, arXiv 2209.14981).

    It has less noise than the weights of one step, so the learning rate need not decay to zero.
    share: share of the steps, up to the last, over which the weights are averaged.
    """

    def __init__(self, parameters: list[Tensor], share: float, total_steps: int):
        self.parameters, self.last_step_before = parameters, (1 - share) * total_steps
        self.count, self.mean = 0, None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step `step`, from 1."""
        if step <= self.last_step_before:
            return
        self.count += 1
        if self.mean is None:
            self.mean = [parameter.detach().clone() for parameter in self.parameters]
        else:
            torch._foreach_lerp_(self.mean, self.parameters, 1 / self.count)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the mean in place of the weights, if there is a mean."""
        if self.mean is None:
            yield
            return
        own = [parameter.detach().clone() for parameter in self.parameters]
        self.set_weights(self.mean)
        try:
            yield
        finally:
            self.set_weights(own)

    def replace_weights(self) -> None:
        """Replace the weights by their mean, if there is a mean."""
        if self.mean is not None:
            self.set_weights(self.mean)
            self.mean = None

    @torch.no_grad()
    def set_weights(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self.parameters, values)

    def state_dict(self) -> dict:
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict) -> None:
        self.count, mean = state["count"], state["mean"]
        self.mean = mean and [one.to(own.device) for one, own in zip(mean, self.parameters, strict=True)]
