"""Time and memory of all operations that read a sequence, over its length: `python experiments/bench/sequence.py`.

Regime: a forward and backward pass of one block (with its norm and projections) over n positions, without memory; one
batch row, d_model 128, 4 heads, the default stride for n (the power of two nearest to sqrt(n)), summary 4, a window of
--window positions, chunks of 64.

- ms: median over rounds. In each round the operations take turns.
- MB: the highest memory of the process during one pass, minus its memory before the pass.
- exponent: slope of log(ms) over log(n), by least squares over all measured n.
- speedup: ms of full attention divided by ms of the operation.
- crossover: the length from which on the operation is faster than full attention, between two measured lengths; the
  shortest length if it is faster there already, null if it is not faster at the longest one.

The program allows 100 n^2 bytes for full attention: 1.7 GB at n = 4,096, 6.7 GB at 8,192, 27 GB at 16,384. Full
attention is measured up to the longest n for which this is at most half of the machine's memory. --full-up-to sets
another length. Beyond it, ms and MB are estimated from those at the longest measured n, as quadratic in n. `~` marks
estimates, and the speedups that follow from them; `full_estimated_at` lists their lengths.

--border instead compares the two implementations in models/operations/sparse.py, with a dense mask and blocked, for
few keys. Its DENSE_UP_TO is chosen by this comparison. The last line is JSON.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

NAMES = {
    "attention": "full",
    "sparse_strided": "strided",
    "sparse_fixed": "fixed",
    "window": "window",
    "linear": "linear",
}
OTHERS = tuple(NAMES)[1:]
SPARSE = ("sparse_strided", "sparse_fixed")
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
FULL_BYTES = 100  # memory per pair of positions, an upper bound with 4 heads
WINDOW = 256
REPORTED = (4096, 16384)  # the last line has the speedups at these lengths
# (batch, segment, memory)
FEW_KEYS = [(1, 64, 64), (32, 64, 64), (1, 128, 128), (8, 128, 128), (1, 192, 192), (8, 192, 192), (1, 256, 256),
            (8, 256, 256), (1, 384, 0), (8, 384, 0), (1, 512, 512), (4, 512, 512)]  # fmt: skip
MASK_LIMITS = {"mask": 10**9, "blocked": 0}  # values of DENSE_UP_TO that select an implementation


class Pass:
    """A forward and backward pass of one operation over a segment and its memory."""

    def __init__(
        self, name: str, batch: int, segment: int, memory: int, implementation: str | None = None, window: int = WINDOW
    ):
        """implementation: a key of MASK_LIMITS; None keeps the rule of models/operations/sparse.py."""
        import torch

        from experiments.helpers import sized_blocks
        from models.operations.operation import BlockConfig, Segment
        from models.operations.registry import build_operation
        from models.relative_attention import sinusoidal_encodings

        block = f"window {min(window, segment + memory)}" if name == "window" else name
        ((_, sizes),) = sized_blocks([block], 128, segment + memory)
        self.operation = build_operation(name, BlockConfig(128), **sizes)
        self.x = torch.randn(batch, segment, 128, requires_grad=True)
        self.segment = Segment(sinusoidal_encodings(segment + memory, 128), memory, memory, memory)
        self.state = self.operation.remember(torch.randn(batch, memory, 128), self.segment)
        self.grad_output = torch.randn_like(self.x)
        self.implementation = implementation

    def __call__(self) -> None:
        from models.operations import sparse

        default = sparse.DENSE_UP_TO
        sparse.DENSE_UP_TO = MASK_LIMITS.get(self.implementation, default)
        branch, _ = self.operation(self.x, self.state, self.segment)
        branch.backward(self.grad_output)
        sparse.DENSE_UP_TO = default


def longest_full() -> int:
    """The longest of LENGTHS at which full attention needs at most half of this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max((n for n in LENGTHS if FULL_BYTES * n**2 <= memory / 2), default=LENGTHS[0])


def measure_length(length: int, rounds: int, names: list[str], window: int) -> dict[str, dict]:
    """{name: {"ms", "mb"}} of passes over `length` positions; "mb" (MiB) is None if the system is not Linux."""
    from experiments.helpers import peak_memory_mb
    from nas.costs.measurement import timed_rounds

    passes = {name: Pass(name, 1, length, 0, window=window) for name in names}
    figures = {name: {"ms": 1e3 * float(np.median(times))} for name, times in timed_rounds(passes, rounds).items()}
    for name, one_pass in passes.items():
        before = peak_memory_mb(lambda: None)
        figures[name]["mb"] = peak_memory_mb(one_pass) - before if before else None
    return figures


def measure_lengths(lengths: list[int], rounds: int, full_up_to: int, window: int) -> dict:
    longest = max([n for n in lengths if n <= full_up_to], default=min(lengths))
    needs = f"{FULL_BYTES * longest**2 / 1e9:.1f} GB at n = {longest:,}"
    print(f"full attention gets up to {needs}; for longer sequences it is estimated")
    columns = (f"{f'{short} ms':>13}{'MB':>9}{'speedup' if short != 'full' else '':>9}" for short in NAMES.values())
    print(f"{'n':>6}" + "".join(columns))
    results = {}
    for length in sorted(lengths):
        measured = [name for name in NAMES if name != "attention" or length <= longest]
        results[length] = measure_length(length, rounds, measured, window)
        if length > longest:
            results[length]["attention"] = quadratic(results[longest]["attention"], length / longest)
        print(format_line(length, results[length]), flush=True)
    estimated = [length for length in results if length > longest]
    return summary(results, estimated) | {"full_estimated_at": estimated}


def summary(results: dict[int, dict], estimated: list[int]) -> dict:
    """Fitted exponents, speedups at some lengths, and crossovers with full attention."""
    exponents = {}
    for name, short in NAMES.items():
        lengths = [n for n in results if name != "attention" or n not in estimated]
        times = [results[n][name]["ms"] for n in lengths]
        exponents[short] = round(float(np.polyfit(np.log(lengths), np.log(times), 1)[0]), 3)
    speedups = {
        str(n): {NAMES[name]: round(results[n]["attention"]["ms"] / results[n][name]["ms"], 2) for name in OTHERS}
        for n in REPORTED
        if n in results
    }
    crossovers = {
        NAMES[name]: crossover({n: row[name]["ms"] / row["attention"]["ms"] for n, row in results.items()})
        for name in OTHERS
    }
    return {"exponent": exponents, "speedup": speedups, "crossover": crossovers}


def crossover(ratios: dict[int, float]) -> int | None:
    """The length at which the ratio of times falls below 1 for good, linearly in the logarithms; None if it never does.

    ratios: {length: ms of the operation / ms of full attention}, lengths increasing.
    """
    lengths = list(ratios)
    slower = [n for n in lengths if ratios[n] >= 1]
    if not slower:
        return lengths[0]
    if slower[-1] == lengths[-1]:
        return None
    low, high = slower[-1], lengths[lengths.index(slower[-1]) + 1]
    share = math.log(ratios[low]) / math.log(ratios[low] / ratios[high])
    return round(low * (high / low) ** share)


def quadratic(figures: dict, ratio: float) -> dict:
    """Estimated figures of full attention at `ratio` times the length of the measured ones."""
    mb = None if figures["mb"] is None else figures["mb"] * ratio**2
    return {"ms": figures["ms"] * ratio**2, "mb": mb, "estimated": True}


def format_line(length: int, row: dict) -> str:
    full, line = row["attention"], f"{length:>6}"
    estimated = "~" if full.get("estimated") else ""
    for name in NAMES:
        mark = estimated if name == "attention" else ""
        speedup = f"{estimated}{full['ms'] / row[name]['ms']:.1f}" if name != "attention" else ""
        mb = "" if row[name]["mb"] is None else f"{mark}{row[name]['mb']:,.0f}"
        ms = f"{mark}{row[name]['ms']:,.1f}"
        line += f"{ms:>13}{mb:>9}{speedup:>9}"
    return line


def compare_implementations(rounds: int) -> dict:
    """Time with a dense mask over time blocked, for few keys."""
    from nas.costs.measurement import timed_rounds

    print(f"{'batch':>6}{'segment':>9}{'memory':>8}{'time with a mask / blocked: strided':>40}{'fixed':>8}")
    result = {}
    for batch, segment, memory in FEW_KEYS:
        ratios = {}
        for name in SPARSE:
            passes = {way: Pass(name, batch, segment, memory, way) for way in MASK_LIMITS}
            times = timed_rounds(passes, rounds)
            ratios[NAMES[name]] = round(float(np.median(times["mask"]) / np.median(times["blocked"])), 2)
        print(f"{batch:>6}{segment:>9}{memory:>8}{ratios['strided']:>40}{ratios['fixed']:>8}", flush=True)
        result[f"{batch}x{segment}+{memory}"] = ratios
    return {"mask_over_blocked": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after three warm-up rounds")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--full-up-to", type=int, default=longest_full(), metavar="N", help="default %(default)s")
    parser.add_argument("--window", type=int, default=WINDOW, help="default %(default)s, for all lengths")
    parser.add_argument("--border", action="store_true", help="compare the two implementations for few keys")
    arguments = parser.parse_args()

    from nas.core.config import TrainOptions
    from nas.training.device import set_up_device

    set_up_device(1, TrainOptions(threads=arguments.threads, device="cpu"))
    if arguments.border:
        result = compare_implementations(arguments.rounds)
    else:
        result = measure_lengths(arguments.lengths, arguments.rounds, arguments.full_up_to, arguments.window)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
