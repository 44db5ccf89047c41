"""The gated short convolution. Shape letters as in models/relative_attention.py, and T = kernel - 1."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.operations.operation import BareReader, Operation, State, last, limit


def new_kernel(taps: int, channels: int) -> nn.Parameter:
    """A kernel [taps, 1, channels] of convolve(), drawn as nn.Conv1d does. The first entry is of the oldest one."""
    return nn.Parameter(torch.empty(taps, 1, channels).uniform_(-(taps**-0.5), taps**-0.5))


def convolve(x: Tensor, kernel: Tensor, length: int) -> Tensor:
    """The causal convolution of each channel [B, L, C], for the last L = `length` positions of x [B, K, C]."""
    # Positions before x are zeros. Sums of slices are faster than F.conv1d, which needs the channels before positions.
    missing = length + len(kernel) - 1 - x.shape[1]
    if torch.compiler.is_exporting() or missing:
        x = F.pad(x, (0, 0, missing, 0))  # [B, T + L, C]
    mixed = x[:, :length] * kernel[0]
    for tap in range(1, len(kernel)):
        mixed = torch.addcmul(mixed, x[:, tap : tap + length], kernel[tap])
    return mixed


class ShortConvolution(Operation):
    """Gated short convolution (LFM2, arXiv 2511.23404): output(b * convolve(a * value)); a, b, value = project(x)."""

    def __init__(self, config, kernel: int):
        super().__init__(config)
        self.reach = kernel - 1
        self.project = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.kernel = new_kernel(kernel, config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)

    def branch(self, context, length, segment):
        return self.mix(context, length, context[:, :0])[0]

    def mix(self, context: Tensor, length: int, before: Tensor) -> tuple[Tensor, Tensor]:
        """The branch [B, L, D] of the last L = `length` positions, and the products a * value [B, T + K, D].

        context [B, K, D]: positions without `before`; before: products of earlier positions.
        """
        a, b, value = self.project(context).chunk(3, dim=-1)
        products = torch.cat([before, a * value], dim=1)  # [B, T + K, D]
        return self.output(b[:, -length:] * convolve(products, self.kernel, length)), products

    def cached(self, encodings):
        return CachedConvolution(self)


class ConvolutionReader(BareReader):
    def branch(self, x, segment):
        operation = self.operation
        a, b, value = F.linear(x, operation.project.weight).chunk(3, dim=-1)
        products = torch.cat([self.state["products"], (a * value)[:, None]], dim=1)  # [B, T + 1, D]
        self.state = {"products": products[:, 1:]}
        mixed = (products * operation.kernel[:, 0]).sum(dim=1)  # [B, D]
        return F.linear(b * mixed, operation.output.weight)


class CachedConvolution(nn.Module):
    """A convolution in a stream. Its state holds a * value [B, T, D] of the last T positions, instead of inputs."""

    Reader, restarts = ConvolutionReader, True

    def __init__(self, operation: ShortConvolution):
        super().__init__()
        self.operation = operation

    def begin(self, rows: int, room: int = 0) -> State:
        kernel = self.operation.kernel
        return {"products": kernel.new_zeros(rows, len(kernel) - 1, kernel.shape[-1])}

    def forward(self, x, state, segment):
        operation, before = self.operation, state["products"]
        seen = last(before, limit(segment.memory, operation.reach))
        branch, products = operation.mix(operation.prepare(x), x.shape[1], seen)
        after = torch.cat([before, products[:, seen.shape[1] :]], dim=1)
        return operation.finish(x, branch), {"products": last(after, operation.reach)}
