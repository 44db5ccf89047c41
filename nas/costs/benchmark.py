"""Benchmarks of functions: time in interleaved rounds, and peak memory."""

import ctypes
import gc
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np

WARM_UP = 3  # unmeasured rounds


def timed_rounds(
    functions: dict[Hashable, Callable[[], object]], rounds: int, seconds: float = 0.0
) -> dict[Hashable, np.ndarray]:
    """Seconds that each function takes in each round [R], after three unmeasured rounds.

    A round calls each function once, in a new random order. Therefore a drift of the clock speed
    and the state of the caches affect all functions equally, and differences within a round are meaningful. Rounds
    continue for `seconds`, but their number is at least `rounds` and at most ten times that.
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


def peak_memory_mb(function: Callable[[], object]) -> float | None:
    """Peak resident memory of this process during a call, in MiB (2^20 bytes); None on systems other than Linux."""
    try:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # return free memory, so that it does not count
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM (proc(5))
    except (OSError, AttributeError):
        return None
    function()
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
