"""What operations and models cost: floating-point operations, and milliseconds measured on this device."""

import statistics
import time

import numpy as np
import torch
from torch import Tensor, nn

from models.operations import OPERATIONS, Sizes
from models.softmax import AdaptiveSoftmax
from nas.pattern import interleaved


class FlopCosts:
    """FLOPs per token of a forward pass: of each candidate in a block, and of the output layer that every pattern has.

    They follow from the sizes alone and are the same on every machine. A multiply-add counts as two.
    """

    def __init__(self, sizes: Sizes, batch: int, segment: int, memory: int, head: nn.Module, counts: np.ndarray):
        self.blocks = {name: cls.flops(sizes, batch, segment, memory) for name, cls in OPERATIONS.items()}
        self.output = head.flops(cluster_mass(head, counts)) if isinstance(head, AdaptiveSoftmax) else head.flops()

    def table(self) -> dict:
        """What a search leaves in its folder for derive.py."""
        return {"unit": "FLOPs per token, forward", "output": self.output, "blocks": self.blocks}

    def pattern(self, blocks: list[str]) -> float:
        """FLOPs per token of a whole model with these blocks."""
        return self.output + sum(self.blocks[name] for name in blocks)

    def ratio(self, blocks: list[str]) -> float:
        """The same, over the interleaved pattern of as many blocks."""
        return self.pattern(blocks) / self.pattern(interleaved(len(blocks)))

    def expected_ratio(self, logits: Tensor, operations: list[str]) -> Tensor:
        """Expectation of ratio() over pi, a differentiable scalar; exact, since costs add up over blocks.

        logits [N, O], operations: the names of the O candidates.
        """
        costs = torch.tensor([self.blocks[name] for name in operations], dtype=logits.dtype, device=logits.device)
        total = self.output + (logits.softmax(dim=-1) * costs).sum()
        return total / self.pattern(interleaved(len(logits)))


def cluster_mass(head: AdaptiveSoftmax, counts: np.ndarray) -> list[float]:
    """Share of the training tokens in each cluster of an adaptive softmax, head first. counts [V] by rank."""
    total = max(1, int(counts.sum()))
    return [float(counts[low:high].sum()) / total for low, high in zip(head.borders, head.borders[1:], strict=False)]


@torch.no_grad()
def measure_latency(
    model: nn.Module, counts: np.ndarray, batch: int, segment: int, memory: int, repeats: int = 20
) -> dict:
    """Milliseconds of one forward pass over a segment with a full memory: median and quartiles of `repeats` passes.

    counts [V]: how often the training text has each token.
    model is called as TransformerXL.forward; its mode (train or eval) is restored.
    """
    # An adaptive output layer costs what its tokens cost, so they are as frequent as in the training text.
    frequencies, generator = torch.from_numpy(counts).double(), torch.Generator().manual_seed(0)
    tokens = frequencies.multinomial(batch * (segment + 1), replacement=True, generator=generator).view(batch, -1)
    was_training, memories, times = model.training, None, []
    model.eval()
    for _ in range(-(-memory // segment)):
        _, memories = model(tokens[:, :-1], tokens[:, 1:], memories, memory)
    for index in range(repeats + 3):
        started = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:], memories, memory)
        if index >= 3:
            times.append(1e3 * (time.perf_counter() - started))
    model.train(was_training)
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle, "quartiles_ms": [low, high], "batch_size": batch, "segment": segment, "memory": memory}
