"""What operations and models cost: floating-point operations, and milliseconds measured on this device."""

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from models.operations import OPERATIONS, Sizes
from models.softmax import AdaptiveSoftmax, linear_nll
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


def times_of(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` turns of a piece of work, after three unmeasured ones."""
    times = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times[3:]


def seconds_of(work: Callable[[], object]) -> float:
    """Median seconds of a piece of work."""
    return statistics.median(times_of(work, repeats=15))


def measure_output_layer(d_model: int) -> dict[str, float]:
    """The constants of nas.cutoffs.LayerCost on this machine, in ns, measured for some seconds on one thread.

    A product of n tokens, width d and v logits, forward and backward, is taken to last
    per_product + n v (d per_multiply_add + per_logit); least squares of the relative errors.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    equations = []
    for tokens, size, width in itertools.product((32, 128, 512), (256, 2048, 8192), (max(8, d_model // 4), d_model)):
        inputs = leaf(tokens, width), leaf(size, width), leaf(size)
        targets, gradient = torch.randint(size, (tokens,)), torch.ones(tokens)
        taken = 1e9 * seconds_of(lambda: linear_nll(*inputs, targets).backward(gradient))  # noqa: B023
        equations.append(np.array([tokens * size * width, tokens * size, 1.0]) / taken)
    per_multiply_add, per_logit, per_product = np.linalg.lstsq(np.array(equations), np.ones(len(equations)))[0]

    hidden, nll = leaf(1024, d_model), torch.zeros(1024)
    picked = {}
    for count in (64, 512):  # what a tail does with its tokens, beside its product
        rows, gradient = torch.randperm(1024)[:count], torch.ones(count, d_model)
        picked[count] = seconds_of(
            lambda: (hidden.index_select(0, rows).backward(gradient), nll.index_add(0, rows, gradient[:, 0]))  # noqa: B023
        )
    torch.set_num_threads(threads)
    constants = {
        "per_multiply_add": per_multiply_add,
        "per_logit": per_logit,
        "per_row": 1e9 * (picked[512] - picked[64]) / (512 - 64),
        "per_product": per_product,
    }
    return {name: max(0.0, float(value)) for name, value in constants.items()}


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
    was_training, memories = model.training, None
    model.eval()
    for _ in range(-(-memory // segment)):
        _, memories = model(tokens[:, :-1], tokens[:, 1:], memories, memory)
    seconds = times_of(lambda: model(tokens[:, :-1], tokens[:, 1:], memories, memory), repeats)
    model.train(was_training)
    low, middle, high = (1e3 * quartile for quartile in statistics.quantiles(seconds, n=4))
    return {"median_ms": middle, "quartiles_ms": [low, high], "batch_size": batch, "segment": segment, "memory": memory}
