"""Is a pattern with dense before the first attention hard to train? `python experiments/ranking/trainability.py`.

A SuperNet evaluates such a pattern as better than it becomes alone. This script trains two patterns that have the same
blocks in another order, with several settings. If the difference shrinks with a setting, training is what held the
second pattern back. Every finished job is a JSON file in OUT and is not repeated.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row
from experiments.jobs import Jobs, job_parser
from experiments.ranking.run import train_alone
from nas.core.errors import run_command
from nas.core.pattern import expand

FIRST, SECOND = "aaaidd", "iddaaa"  # attention first, dense first
SETTINGS = {
    "plain": [],
    "low-lr": ["train.lr=0.003"],
    "long-warmup": ["train.warmup_steps=400"],
    "depth-scaled": ["model.init=depth_scaled"],
    "half-as-long": ["train.steps=800"],
    "twice-as-long": ["train.steps=3200"],
}  # on top of ranking.yaml with 1,600 steps


def main() -> None:
    arguments = job_parser(__doc__, "runs/trainability", "low-lr-*").parse_intermixed_args()
    jobs, differences = Jobs(arguments.out, arguments.overrides, arguments.only), {}
    print_row("setting", FIRST, SECOND, "difference", header=True)
    for setting, options in SETTINGS.items():
        options = [*arguments.overrides, "train.steps=1600", *options]
        losses = [train(jobs, setting, short, options) for short in (FIRST, SECOND)]
        if None not in losses:
            differences[setting] = round(losses[1] - losses[0], 4)
            print_row(setting, *(f"{nll:.4f}" for nll in losses), f"{differences[setting]:+.4f}")
    print(json.dumps({"differences": differences}))


def train(jobs: Jobs, setting: str, short: str, overrides: list[str]) -> float | None:
    """nll per token of a pattern trained alone, on the first tokens of valid; None if it is not trained yet."""
    result = jobs.do(f"{setting}-{short}", lambda: train_alone(expand(short), overrides))
    return result and result["nll"]


if __name__ == "__main__":
    run_command(main)
