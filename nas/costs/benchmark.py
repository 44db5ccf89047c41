"""Benchmarking of functions: time in interleaved rounds, and peak memory."""

import ctypes
import gc
import itertools
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.softmax import linear_nll

WARM_UP = 3  # unmeasured rounds


def timed_rounds(
    functions: dict[Hashable, Callable[[], object]], rounds: int, seconds: float = 0.0
) -> dict[Hashable, np.ndarray]:
    """Seconds that each function takes in each round [R], after three unmeasured rounds.

    A round calls each function once, in a new random order. A drift of the clock speed and the state of the caches
    therefore affect all functions alike, and differences within a round are meaningful. Rounds continue for `seconds`,
    but there are at least `rounds` and at most ten times as many.
    """
    times, items = {name: [] for name in functions}, list(functions.items())
    generator, start, done = np.random.default_rng(0), time.perf_counter(), -WARM_UP
    while done < rounds or (done < 10 * rounds and time.perf_counter() - start < seconds):
        for index in generator.permutation(len(items)):
            name, function = items[index]
            called = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - called)
        done += 1
    return {name: np.array(taken[WARM_UP:]) for name, taken in times.items()}


def seconds_of(work: Callable[[], object]) -> float:
    """Median seconds of a piece of work."""
    return float(np.median(timed_rounds({0: work}, rounds=15)[0]))


def peak_memory_mb(function: Callable[[], object]) -> float | None:
    """Peak resident memory of this process during a call, in MB; None on systems other than Linux."""
    try:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # return free memory, so that it does not count
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM (proc(5))
    except (OSError, AttributeError):
        return None
    function()
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024


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
