"""Optimal cutoffs of an adaptive softmax: `python -m nas.cutoffs COUNTS.txt --clusters 3`."""

import argparse
import time
from pathlib import Path

import numpy as np

from nas.core.errors import InputError, run_command
from nas.data.cutoffs import LayerCost, PlainCost, cluster_table, optimal_cutoffs, total_cost


def read_counts(path: Path, clusters: int) -> np.ndarray:
    """Read counts from a file with one count per line, in any order. Returns them descending [N].

    Raises InputError with the line number if a line is not a count.
    """
    try:
        lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    counts = []
    for number, line in enumerate(lines, start=1):
        try:
            count = float(int(line.replace("_", "x")))  # int() accepts 1_000
        except (ValueError, OverflowError):
            shown = repr(line) if line.strip() else "empty"
            raise InputError(f"{path}, line {number} is {shown}: a count is a whole number, 0 or more") from None
        if count < 0:
            raise InputError(f"{path}, line {number} is {line.strip()}: a count must not be negative")
        counts.append(count)
    if len(counts) < clusters:
        raise InputError(f"{path} ends at line {len(counts)}: {clusters} clusters need at least {clusters} counts")
    if not any(counts):
        raise InputError(f"{path} holds no count above 0")
    return np.sort(np.array(counts, dtype=np.float64))[::-1]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nas.cutoffs",
        description="Compute the cutoffs of an adaptive softmax with the lowest cost.",
        epilog="The plain cost is cluster size times share of the words. The layer cost predicts the training time of "
        "this project's layer, with constants of an Intel Xeon core; model.cutoffs=auto uses it.",
    )
    parser.add_argument(
        "counts", metavar="COUNTS.txt", type=Path, help="occurrences of each word, one count per line, in any order"
    )
    parser.add_argument("--clusters", type=int, default=3, help="number of clusters, including the head (default 3)")
    parser.add_argument("--cost", choices=["plain", "layer"], default="plain", help="cost model (default plain)")
    parser.add_argument("--d-model", type=int, default=128, help="layer: width of the hidden states (default 128)")
    parser.add_argument("--div-value", type=int, default=1, help="layer: as model.div_value (default 1)")
    parser.add_argument("--tokens", type=int, default=1024, help="layer: tokens in a batch (default 1024)")
    arguments = parser.parse_args()
    for name in ("clusters", "d_model", "div_value", "tokens"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    counts = read_counts(arguments.counts, arguments.clusters)
    layer = LayerCost(arguments.d_model, arguments.div_value, arguments.tokens)
    cost = layer if arguments.cost == "layer" else PlainCost()
    started = time.perf_counter()
    cutoffs = optimal_cutoffs(counts, arguments.clusters, cost)
    seconds = time.perf_counter() - started
    print(f"{len(counts):,} words, {counts.sum():,.0f} counted; found in {seconds:.2f} s")
    for index, (size, share) in enumerate(cluster_table(counts, cutoffs)):
        name = "head" if index == 0 else f"tail {index}"
        print(f"{name:>7}: {size:>11,} words, {share:7.2%} of the text")
    least, uncut = total_cost(counts, cutoffs, cost), total_cost(counts, [], cost)
    print(f"cost, {cost.unit}: {least:,.1f}; uncut {uncut:,.1f}" + (", which is lower" if uncut < least else ""))
    print(f"cutoffs: {cutoffs}")


if __name__ == "__main__":
    run_command(main)
