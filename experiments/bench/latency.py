"""Does the latency table predict whole models? `python experiments/bench/latency.py --threads 1`.

Regime: random patterns with the operations and sizes below, width 128 and 8,000 words. Each is measured, and predicted
as a sum over a table of nas/costs/measurement.py that is measured right before. The last line is JSON: the mean and the
worst relative error of the predictions, and the mean error of the ratios to interleaved. The clock drifts between the
two measurements, which changes milliseconds more than ratios.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # must be set before torch is imported, as in nas/core/errors.py

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.core.config import Config
from nas.core.pattern import abbreviate, interleaved
from nas.costs.flops import batch_shape
from nas.costs.measurement import ROUNDS, SECONDS, measure_tables, new_work, timed_rounds
from nas.training.device import set_up_device

VOCABULARY = 8000
OPERATIONS = [
    "attention",
    "attention heads=2",
    "attention key_heads=1",
    "window 16",
    "conv",
    "conv 8",
    "dense",
    "dense 8x",
    "dense 16x",
    "identity",
]


def make_config(timing: str, threads: int, blocks: int, source: str) -> Config:
    config = Config()
    config.model.blocks, config.model.cutoffs, config.model.ngram_rows = blocks, [250, 2500], []
    config.search.latency.timing, config.search.operations = timing, OPERATIONS
    config.search.latency.source = source
    config.resolve_defaults()
    config.train.threads, config.train.device = threads, "cpu"
    config.model.dropout, config.train.weight_decay = 0.0, 0.02
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument(
        "--timing", choices=["inference", "training", "generation"], default="inference", help="what is timed"
    )
    parser.add_argument("--source", choices=["measured", "onnx"], default="measured", help="PyTorch or ONNX Runtime")
    parser.add_argument("--blocks", type=int, default=12, help="of each pattern (default 12)")
    parser.add_argument("--patterns", type=int, default=20, help="number of random patterns (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random patterns (default 0)")
    arguments = parser.parse_args()
    if arguments.source == "onnx" and arguments.timing != "generation":
        parser.error("--source onnx needs --timing generation")
    blocks = arguments.blocks
    config = make_config(arguments.timing, arguments.threads, blocks, arguments.source)
    runtime = set_up_device(config.seed, config.train)
    counts = (1e6 / np.arange(1, VOCABULARY + 1)).astype(np.int64)  # Zipf's law
    source, names = np.random.default_rng(arguments.seed), config.search.operations
    patterns = [[names[i] for i in source.integers(len(names), size=blocks)] for _ in range(arguments.patterns)]

    (table,) = measure_tables({(VOCABULARY, config.model.d_model): config}, {VOCABULARY: counts}, runtime).values()
    works = [new_work(pattern, config, counts, runtime) for pattern in (interleaved(blocks), *patterns)]
    times = timed_rounds(dict(enumerate(works)), ROUNDS, SECONDS)
    baseline_ms, *measured_ms = (1e3 * float(np.median(taken)) for taken in times.values())
    batch, segment, memory = batch_shape(config)
    print(f"{arguments.timing}, batch {batch}, segment {segment}, memory {memory}, {arguments.threads} threads, ms")
    print("  ".join(f"{name} {cost:.3f}" for name, cost in {"overhead": table.overhead, **table.blocks}.items()))
    print(f"{'pattern':<52}{'predicted':>10}{'measured':>10}{'error':>8}{'ratio predicted':>17}{'measured':>10}")
    errors = []
    for pattern, measured in zip(patterns, measured_ms, strict=True):
        predicted = table.cost(pattern)
        errors.append(predicted / measured - 1)
        costs = f"{predicted:>10.2f}{measured:>10.2f}{errors[-1]:>+8.1%}"
        print(f"{abbreviate(pattern):<52}{costs}{table.ratio(pattern):>17.3f}{measured / baseline_ms:>10.3f}")
    ratios = [table.ratio(p) * baseline_ms / ms - 1 for p, ms in zip(patterns, measured_ms, strict=True)]
    sizes = np.abs(errors)
    summary = {"mean_absolute_error": round(sizes.mean(), 4), "worst": round(sizes.max(), 4)}
    summary["mean_absolute_error_of_ratios"] = round(np.abs(ratios).mean(), 4)
    print(json.dumps({"patterns": arguments.patterns, **summary}))


if __name__ == "__main__":
    main()
