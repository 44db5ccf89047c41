"""Muon: the optimizer of matrices that makes each update close to orthogonal.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; arXiv 2502.16982.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial of Jordan et al.; singular values end in [0.68, 1.13]
ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Replace the singular values of each matrix [n, rows, columns] by values near 1, by Newton-Schulz iterations.

    The products run in bf16 on a GPU, as in Jordan et al., and in the matrices' own type on a CPU.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the Gram matrix of the shorter side is smaller
        x = x.mT
    a, b, c = COEFFICIENTS
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)  # singular values are then at most 1
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised. Matrices of one shape are orthogonalised together.

    An update is multiplied by sqrt(max(1, rows / columns)), so that one learning rate suits all widths. Weight decay is
    decoupled, as in AdamW. Matrices without a gradient keep their value and their momentum.
    """

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, finite: Tensor | None = None) -> None:
        """Update the matrices.

        finite: a boolean 0-d tensor. If it is false, the matrices keep their values. It may be on a GPU; this method
        does not wait for it.
        """
        for group in self.param_groups:
            by_shape = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            for matrices in by_shape.values():
                self.update(matrices, group, finite)

    def update(self, matrices: list[Tensor], group: dict, finite: Tensor | None) -> None:
        """Update matrices of one shape."""
        momenta = [self.state[m].setdefault("momentum", torch.zeros_like(m)) for m in matrices]
        gradients, lr = [m.grad for m in matrices], group["lr"]
        if finite is not None:
            gradients = [torch.where(finite, gradient, 0.0) for gradient in gradients]
            lr = lr * finite
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = orthogonalise(torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"])))
        rows, columns = matrices[0].shape
        directions *= lr * max(1, rows / columns) ** 0.5
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(matrices, list(directions.unbind()))
