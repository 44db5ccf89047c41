"""Draw the next token from the predicted distribution."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nas.core.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. They apply in the order of the arguments.

    Args:
        temperature: divides the log-probabilities; 0: always the most probable token.
        top_k: draw from the k most probable tokens only; None: from all.
        top_p: draw from the fewest most probable tokens whose probabilities sum to at least p (nucleus sampling, arXiv
            1904.09751, section 3.1); None: from all.

    Raises InputError if a value is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature {self.temperature} must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top-k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p} must be above 0 and at most 1")

    def probabilities(self, log_p: Tensor) -> Tensor:
        """The distribution [B, V] from which a token is drawn. log_p: [B, V], as the model predicts it.

        In float64, but for the distribution of the model itself.
        """
        if self == Sampling():
            return log_p.exp()
        log_p = log_p.double()
        if self.temperature == 0:
            return torch.zeros_like(log_p).scatter_(1, log_p.argmax(dim=1, keepdim=True), 1.0)
        below = log_p - log_p.amax(dim=1, keepdim=True)  # at most 0, so that no temperature is too low
        scaled = below / self.temperature
        if self.top_k is None and self.top_p is None:
            return scaled.softmax(dim=1)
        scaled, order = scaled.sort(dim=1, descending=True, stable=True)  # [B, V] each
        p = scaled.softmax(dim=1)
        if self.top_k is not None:
            p[:, self.top_k :] = 0
            p /= p.sum(dim=1, keepdim=True)
        if self.top_p is not None:
            before = p.cumsum(dim=1) - p  # the mass of the more probable tokens
            p[before >= self.top_p] = 0
            p /= p.sum(dim=1, keepdim=True)
        return torch.zeros_like(p).scatter_(1, order, p)

    @torch.inference_mode()
    def draw(self, log_p: Tensor, generator: torch.Generator) -> Tensor:
        """One token [B] for each row of log_p [B, V], by inverse transform sampling on the CPU.

        Raises InputError if a log-probability is NaN.
        """
        log_p = log_p.cpu()
        if log_p.isnan().any():
            raise InputError("the model predicts NaN instead of probabilities; its weights are damaged")
        sums = self.probabilities(log_p).cumsum(dim=1, dtype=torch.float64)  # [B, V]
        total = sums[:, -1:].contiguous()
        wanted = total * torch.rand(total.shape, dtype=torch.float64, generator=generator)
        # The second one is the last possible token, which a rounded product could pass.
        drawn = [torch.searchsorted(sums, wanted, right=True), torch.searchsorted(sums, total)]
        return torch.minimum(*drawn)[:, 0]
