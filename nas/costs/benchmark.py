"""Time and peak memory of functions, measured in rounds so that results can be compared."""

import ctypes
import gc
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np

WARM_UP = 3  # unmeasured rounds


def timed_rounds(
    works: dict[Hashable, Callable[[], object]], rounds: int, seconds: float = 0.0
) -> dict[Hashable, np.ndarray]:
    """Seconds of each piece of work in each round [R], after three unmeasured rounds.

    A round does each piece once, in an order that is drawn anew: so a drift of the clock, and what a piece leaves in
    the caches, hit all alike, and differences within a round mean something. Rounds go on for so many seconds, but
    there are at least `rounds` and at most ten times as many.
    """
    times, pieces = {name: [] for name in works}, list(works.items())
    order, begun, done = np.random.default_rng(0), time.perf_counter(), -WARM_UP
    while done < rounds or (done < 10 * rounds and time.perf_counter() - begun < seconds):
        for index in order.permutation(len(pieces)):
            name, work = pieces[index]
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
        done += 1
    return {name: np.array(taken[WARM_UP:]) for name, taken in times.items()}


def peak_memory_mb(work: Callable[[], object]) -> float | None:
    """Highest resident memory of this process while it does a piece of work, in MB; None where Linux is not."""
    try:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free goes back, so that it does not count
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew (proc(5))
    except (OSError, AttributeError):
        return None
    work()
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
