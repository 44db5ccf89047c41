"""Which dropout and weight decay for how many passes over a text? `python experiments/passes/run.py`.

It trains the interleaved pattern with 6 blocks for several numbers of passes and settings, and evaluates valid 20 times
during each training. Every finished training is a JSON file in OUT and is not repeated. Several processes may share OUT
if --only divides the trainings between them.
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import Training, open_experiment, print_row
from experiments.jobs import Jobs, job_parser
from nas.core.errors import run_command
from nas.core.pattern import expand

PATTERN = "adadad"
PASSES = (1.75, 3.5, 7, 14, 28)
COLUMNS = {
    "none": ["model.dropout=0", "train.weight_decay=0.02"],
    "dropout 0.1": ["model.dropout=0.1", "train.weight_decay=0.02"],
    "dropout 0.2, decay 0.1": ["model.dropout=0.2", "train.weight_decay=0.1"],
    "dropout 0.2, decay 0.5": ["model.dropout=0.2", "train.weight_decay=0.5"],
}
EVALUATIONS = 20


def main() -> None:
    arguments = job_parser(__doc__, "runs/passes", "dropout-0.1-*").parse_intermixed_args()
    jobs = Jobs(arguments.out, arguments.overrides, arguments.only)

    def result(name: str, passes: float, options: list[str]) -> dict | None:
        job = f"{name}-{passes:g}".replace(", ", "-").replace(" ", "-")
        return jobs.do(job, lambda: train([*arguments.overrides, f"train.epochs={passes:g}", *options]))

    print_row("passes", *COLUMNS, header=True)
    best = {}
    for passes in PASSES:
        row = {f"{name}, {passes:g} passes": result(name, passes, options) for name, options in COLUMNS.items()}
        best |= {name: found["best"] for name, found in row.items() if found}
        print_row(
            f"{passes:g}", *(found and f"{found['best']:.4f} ({found['nlls'][-1]:.4f})" for found in row.values())
        )
    print(json.dumps({"best_valid_nll": {name: round(nll, 4) for name, nll in best.items()}}))


def train(overrides: list[str]) -> dict:
    """nll per token on valid: at each evaluation (`nlls`), and the lowest (`best`)."""
    (config, corpus, runtime), nlls = open_experiment(Path(__file__).with_name("passes.yaml"), overrides), []

    def evaluate(step, phase):
        if step in {math.ceil(count * phase.total_steps / EVALUATIONS) for count in range(1, EVALUATIONS + 1)}:
            nlls.append(phase.metrics(phase.train_weights.average)["nll_per_token"])

    training = Training(expand(PATTERN), config, corpus, runtime, evaluate)
    training.end()
    return {"best": min(nlls), "nlls": nlls}


if __name__ == "__main__":
    run_command(main)
