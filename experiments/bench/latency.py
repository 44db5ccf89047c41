"""Does the latency table predict whole models? `python experiments/bench/latency.py --threads 1`.

Random patterns of 12 blocks are measured, and predicted by the sum over the table of nas/latency.py, which is measured
right before. The last line is JSON: the mean and the worst relative error of prediction against measurement.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch is imported, as in nas/errors.py

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.core.config import Config
from nas.core.config_checks import settle_sparse
from nas.core.pattern import abbreviate, interleaved
from nas.costs.flops import batch_shape
from nas.costs.latency import measure_costs, measure_models
from nas.training.device import set_up_device

BLOCKS, PATTERNS, VOCABULARY = 12, 20, 8000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--timing", choices=["inference", "training"], default="inference", help="what is timed")
    parser.add_argument("--seed", type=int, default=0, help="of the random patterns (default 0)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    config = Config()
    config.model.blocks, config.model.cutoffs = BLOCKS, [250, 2500]
    config.search.latency.timing = arguments.timing
    settle_sparse(config)
    config.train.threads, config.train.device = arguments.threads, "cpu"
    context = set_up_device(config.seed, config.train)
    counts = (1e6 / np.arange(1, VOCABULARY + 1)).astype(np.int64)  # Zipf's law
    source = np.random.default_rng(arguments.seed)
    names = config.search.operations
    patterns = [[names[i] for i in source.integers(len(names), size=BLOCKS)] for _ in range(PATTERNS)]

    table = measure_costs(config, counts, context)
    measured = measure_models([(pattern, config) for pattern in [interleaved(BLOCKS), *patterns]], counts, context)
    usual, *measured = (about["median_ms"] for about in measured)
    batch, segment, memory = batch_shape(config)
    print(f"{arguments.timing}, batch {batch}, segment {segment}, memory {memory}, {arguments.threads} threads, ms")
    print("  ".join(f"{name} {cost:.3f}" for name, cost in {"overhead": table.overhead, **table.blocks}.items()))
    print(f"{'pattern':<14}{'predicted':>10}{'measured':>10}{'error':>8}{'ratio predicted':>17}{'measured':>10}")
    errors = []
    for pattern, seen in zip(patterns, measured, strict=True):
        predicted = table.cost(pattern)
        errors.append(predicted / seen - 1)
        print(
            f"{abbreviate(pattern):<14}{predicted:>10.2f}{seen:>10.2f}{errors[-1]:>+8.1%}"
            f"{table.ratio(pattern):>17.3f}{seen / usual:>10.3f}"
        )
    sizes = np.abs(errors)
    print(
        json.dumps(
            {"patterns": PATTERNS, "mean_absolute_error": round(sizes.mean(), 4), "worst": round(sizes.max(), 4)}
        )
    )


if __name__ == "__main__":
    main()
