"""Are patterns with dense before the first attention hard to train? `python experiments/ranking/trainability.py`.

A SuperNet evaluates such patterns as better than they become alone. This script trains pairs of patterns that have the
same blocks in another order, with several settings. If the difference within a pair shrinks with a setting, training is
what held the second pattern back. Every finished job is a JSON file in OUT and is not repeated.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.jobs import Jobs
from experiments.ranking.run import print_row, train_alone
from nas.core.errors import run_command
from nas.core.pattern import expand

PAIRS = [("aaaidd", "iddaaa"), ("iaidad", "daiaid")]  # attention first, dense first
SETTINGS = {
    "plain": [],
    "low-lr": ["train.lr=0.003"],
    "long-warmup": ["train.warmup_steps=800"],
    "depth-scaled": ["model.init=depth_scaled"],
    "three-times-as-long": ["train.steps=9600"],
}  # on top of ranking.yaml with 3,200 steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as data.source=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/trainability"), help="folder of the results")
    parser.add_argument("--only", default="*", help="jobs to do: names with wildcards, such as 'low-lr-*'")
    arguments = parser.parse_intermixed_args()
    jobs, differences = Jobs(arguments.out, arguments.overrides, arguments.only), {}
    print_row("setting", *(name for pair in PAIRS for name in (*pair, "difference")), header=True)
    for setting, options in SETTINGS.items():
        options = [*arguments.overrides, "train.steps=3200", *options]
        losses = [[train(jobs, setting, short, options) for short in pair] for pair in PAIRS]
        if all(nll is not None for pair in losses for nll in pair):
            differences[setting] = [round(second - first, 4) for first, second in losses]
            print_row(setting, *(cell for a, b in losses for cell in (f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}")))
    print(json.dumps({"differences": differences}))


def train(jobs: Jobs, setting: str, short: str, overrides: list[str]) -> float | None:
    """nll per token of a pattern trained alone, on the first tokens of valid; None if it is not trained yet."""
    result = jobs.do(f"{setting}-{short}", lambda: train_alone(expand(short), overrides))
    return result and result["nll"]


if __name__ == "__main__":
    run_command(main)
