"""Optimal cutoffs of an adaptive softmax: `python -m nas.cutoffs COUNTS.txt --clusters 3`, and `model.cutoffs: auto`.

N words, most frequent first, are cut into K clusters of consecutive words, so that the summed cost of the clusters is
smallest (arXiv 1609.04309, section 4.2). Imports no torch, unless constants are to be measured.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from models.cutoffs import LayerCost, PlainCost, cluster_table, optimal_cutoffs, total_cost
from nas.core.errors import InputError, run_command


def read_counts(path: Path, clusters: int) -> np.ndarray:
    """Counts [N], descending, from a file with one a line, in any order. Raises InputError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    counts = []
    for number, line in enumerate(lines, start=1):
        try:
            count = float(int(line.replace("_", "x")))  # int() would take 1_000
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
        description="The cutoffs of an adaptive softmax that cost least.",
        epilog="plain counts cluster size times share of the words; layer, which model.cutoffs=auto uses, predicts the "
        "time of the layer as built here, with constants of an Intel Xeon's core, or of this machine (--measure)",
    )
    parser.add_argument(
        "counts", metavar="COUNTS.txt", type=Path, help="how often each word occurs, one count a line, in any order"
    )
    parser.add_argument("--clusters", type=int, default=3, help="clusters, the head among them (default 3)")
    parser.add_argument("--cost", choices=["plain", "layer"], default="plain", help="cost model (default plain)")
    parser.add_argument("--d-model", type=int, default=128, help="layer: width of the hidden states (default 128)")
    parser.add_argument("--div-value", type=int, default=1, help="layer: as model.div_value (default 1)")
    parser.add_argument("--tokens", type=int, default=1024, help="layer: tokens in a batch (default 1024)")
    parser.add_argument("--measure", action="store_true", help="layer: with constants measured now, on one thread")
    arguments = parser.parse_args()
    if arguments.measure and arguments.cost != "layer":
        raise InputError("--measure needs --cost layer: the plain cost has no constants")
    for name in ("clusters", "d_model", "div_value", "tokens"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    counts = read_counts(arguments.counts, arguments.clusters)
    layer = LayerCost(arguments.d_model, arguments.div_value, arguments.tokens)
    cost = layer if arguments.cost == "layer" else PlainCost()
    if arguments.measure:
        from nas.costs.benchmark import measure_output_layer

        cost = replace(cost, **measure_output_layer(arguments.d_model))
        print(
            f"measured: {cost.per_multiply_add:.3f} ns per multiply-add, {cost.per_logit:.2f} per logit, "
            f"{cost.per_row:.0f} per row, {cost.per_product:,.0f} per product"
        )
    started = time.perf_counter()
    cutoffs = optimal_cutoffs(counts, arguments.clusters, cost)
    seconds = time.perf_counter() - started
    print(f"{len(counts):,} words, {counts.sum():,.0f} counted; found in {seconds:.2f} s")
    for index, (size, share) in enumerate(cluster_table(counts, cutoffs)):
        name = "head" if index == 0 else f"tail {index}"
        print(f"{name:>7}: {size:>11,} words, {share:7.2%} of the text")
    least, uncut = total_cost(counts, cutoffs, cost), total_cost(counts, [], cost)
    print(f"cost, {cost.unit}: {least:,.1f}; uncut {uncut:,.1f}" + (", which is cheaper" if uncut < least else ""))
    print(f"cutoffs: {cutoffs}")


if __name__ == "__main__":
    run_command(main)
