"""Compute the cutoffs of an adaptive softmax with the lowest predicted training time, as model.cutoffs=auto does."""

import math
import time
from argparse import ArgumentParser
from pathlib import Path

import numpy as np

from nas.core.errors import InputError, run_command
from nas.core.files import read_input
from nas.data.optimal_cutoffs import LayerCost, optimal_cutoffs, total_cost


def read_counts(path: Path, clusters: int) -> np.ndarray:
    """Read counts from a file with one count per line, in any order. Returns them descending [N].

    Raises InputError with the line number if a line is not a count.
    """
    lines = read_input(path).decode("utf-8", errors="replace").rstrip().splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip().isdecimal() or math.isinf(float(line)):
            raise InputError(f"{path}, line {number} is {line!r}: a count is a whole number, 0 or more")
    if len(lines) < clusters:
        raise InputError(f"{path} ends at line {len(lines)}: {clusters} clusters need at least {clusters} counts")
    if not any(map(float, lines)):
        raise InputError(f"{path} holds no count above 0")
    return np.sort([float(line) for line in lines])[::-1]


def main() -> None:
    parser = ArgumentParser("python -m nas.cutoffs", description=__doc__)
    parser.add_argument("counts", metavar="COUNTS.txt", type=Path, help="one count of a word per line, in any order")
    parser.add_argument("--clusters", type=int, default=3, help="number of clusters, including the head (default 3)")
    parser.add_argument("--d-model", type=int, default=128, help="width of the hidden states (default 128)")
    parser.add_argument("--div-value", type=int, default=1, help="as model.div_value (default 1)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens in a batch (default 1024)")
    arguments = parser.parse_args()
    for name in ("clusters", "d_model", "div_value", "tokens"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    counts = read_counts(arguments.counts, arguments.clusters)
    cost = LayerCost(arguments.d_model, arguments.div_value, arguments.tokens)
    started = time.perf_counter()
    cutoffs = optimal_cutoffs(counts, arguments.clusters, cost)
    print(f"{len(counts):,} words, {counts.sum():,.0f} counted; found in {time.perf_counter() - started:.2f} s")
    least, uncut = total_cost(counts, cutoffs, cost), total_cost(counts, [], cost)
    print(f"cost, ns per token: {least:,.1f}; uncut {uncut:,.1f}" + (", which is lower" if uncut < least else ""))
    print(f"cutoffs: {cutoffs}")


if __name__ == "__main__":
    run_command(main, only_prints=True)
