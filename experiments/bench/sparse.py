"""Dense, strided and fixed attention as sequences get longer: `python experiments/bench/sparse.py [--threads 1]`.

A forward and backward pass of one block (its norm and projections included) over n positions, without memory; one
batch row, d_model 128, 4 heads, the default stride of each n (the power of two nearest to sqrt(n)) and summary 4.

- ms: median over rounds, in which the three take turns.
- MB: the most memory that the process had during one such pass, less what it had before.
- exponent: slope of log(ms) against log(n), by least squares over all n.
- speedup: ms of dense attention over that of the sparse one.

--border instead compares the two ways in which models/sparse.py can go, by rows and under a mask, where there are few
keys: its DENSE_UP_TO is chosen by that. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

NAMES = {"attention": "dense", "sparse_strided": "strided", "sparse_fixed": "fixed"}
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
COMPARED = (4096, 16384)
BORDER = [(1, 64, 64), (32, 64, 64), (1, 128, 128), (8, 128, 128), (1, 192, 192), (8, 192, 192), (1, 256, 256),
          (8, 256, 256), (1, 384, 0), (8, 384, 0), (1, 512, 512), (4, 512, 512)]  # fmt: skip


class Pass:
    """Forward and backward pass of one operation over a segment and its memory."""

    def __init__(self, name: str, batch: int, segment: int, memory: int, way: str | None = None):
        import torch

        from models.attention import Positions, sinusoids
        from models.operations import OPERATIONS, BlockConfig
        from nas.core.config_checks import default_stride

        self.operation = OPERATIONS[name](BlockConfig(128, 4, 512, stride=default_stride(segment + memory)))
        self.x = torch.randn(batch, segment, 128, requires_grad=True)
        self.memory = torch.randn(batch, memory, 128) if memory else None
        self.positions = Positions(sinusoids(segment + memory, 128), memory)
        self.gradient = torch.randn_like(self.x)
        self.way = way  # `masked` or `by_rows`; None: as the rule says

    def __call__(self) -> None:
        from models import sparse

        rule = sparse.DENSE_UP_TO
        sparse.DENSE_UP_TO = {"masked": 10**9, "by_rows": 0, None: rule}[self.way]
        self.operation(self.x, self.memory, self.positions).backward(self.gradient)
        sparse.DENSE_UP_TO = rule


def measure_lengths(lengths: list[int], rounds: int) -> dict:
    from nas.costs.benchmark import peak_memory_mb, timed_rounds

    shown = {length: {} for length in lengths}
    print(f"{'n':>6}" + "".join(f"{f'{short} ms':>12}{'MB':>8}{'speedup':>9}" for short in NAMES.values()))
    for length in lengths:
        works = {name: Pass(name, 1, length, 0) for name in NAMES}
        times = {name: 1e3 * float(np.median(taken)) for name, taken in timed_rounds(works, rounds).items()}
        line = f"{length:>6}"
        for name, work in works.items():
            before = peak_memory_mb(lambda: None)
            used = f"{peak_memory_mb(work) - before:.0f}" if before else ""
            shown[length][name] = times[name]
            line += f"{times[name]:>12.1f}{used:>8}{times['attention'] / times[name]:>9.1f}"
        print(line, flush=True)
    logs = np.log(lengths)
    slopes = {name: np.polyfit(logs, np.log([shown[n][name] for n in lengths]), 1)[0] for name in NAMES}
    sparse = [name for name in NAMES if name != "attention"]
    ratios = {
        str(n): {NAMES[name]: round(shown[n]["attention"] / shown[n][name], 2) for name in sparse}
        for n in COMPARED
        if n in shown
    }
    return {"exponent": {NAMES[name]: round(float(slope), 3) for name, slope in slopes.items()}, "speedup": ratios}


def measure_border(rounds: int) -> dict:
    from nas.costs.benchmark import timed_rounds

    print(f"{'batch':>6}{'segment':>9}{'memory':>8}{'masked over by rows, in time: strided':>40}{'fixed':>8}")
    result = {}
    for batch, segment, memory in BORDER:
        ratios = {}
        for name in ("sparse_strided", "sparse_fixed"):
            works = {way: Pass(name, batch, segment, memory, way) for way in ("masked", "by_rows")}
            times = timed_rounds(works, rounds)
            ratios[NAMES[name]] = round(float(np.median(times["masked"]) / np.median(times["by_rows"])), 2)
        print(f"{batch:>6}{segment:>9}{memory:>8}{ratios['strided']:>40}{ratios['fixed']:>8}", flush=True)
        result[f"{batch}x{segment}+{memory}"] = ratios
    return {"masked_over_by_rows": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after three unmeasured ones")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--border", action="store_true")
    arguments = parser.parse_args()

    from nas.core.config import TrainOptions
    from nas.training.device import set_up_device

    set_up_device(1, TrainOptions(threads=arguments.threads, device="cpu"))
    print(json.dumps(measure_border(arguments.rounds) if arguments.border else
                     measure_lengths(arguments.lengths, arguments.rounds)))  # fmt: skip


if __name__ == "__main__":
    main()
