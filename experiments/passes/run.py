"""How many passes over a small text pay, and with which dropout? `python experiments/passes/run.py`.

It trains the interleaved pattern with 6 blocks for several numbers of passes and settings, and evaluates valid 20 times
during each training. Every finished training is a JSON file in OUT and is not repeated. Several processes may share OUT
if --only divides the trainings between them.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import Training, open_experiment, print_row
from experiments.jobs import Jobs, job_parser
from nas.core.errors import run_command
from nas.core.pattern import expand

PATTERN = "adadad"
PASSES = (3.5, 7, 14, 28)
COLUMNS = {
    "dropout 0": ["model.dropout=0"],
    "dropout 0.1": ["model.dropout=0.1"],
    "dropout 0.2": ["model.dropout=0.2"],
    "dropout 0.4": ["model.dropout=0.4"],
    "weight decay 0.5": ["model.dropout=0.2", "train.weight_decay=0.5"],
}
SETTINGS = {
    "weight decay 0.1": ["model.dropout=0.2", "train.weight_decay=0.1"],
    "weight decay 1": ["model.dropout=0.2", "train.weight_decay=1"],
    "weight decay 0.5, dropout 0": ["model.dropout=0", "train.weight_decay=0.5"],
}  # with SETTINGS_PASSES
SETTINGS_PASSES = 28
MEMORIES = (0, 32, 64, 128, 256)
EVALUATIONS = 20


def main() -> None:
    arguments = job_parser(__doc__, "runs/passes", "dropout-0.2-*").parse_intermixed_args()
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
    for name, options in SETTINGS.items():
        if found := result(name, SETTINGS_PASSES, options):
            best[name] = found["best"]
            print_row(name, f"{found['best']:.4f} ({found['nlls'][-1]:.4f})")
    print_row("memory", *MEMORIES)
    for found in jobs.all(f"*-{SETTINGS_PASSES}"):
        print_row(found["setting"], *(f"{found['memory'][str(memory)]:.4f}" for memory in MEMORIES))
    print(json.dumps({"best_valid_nll": {name: round(nll, 4) for name, nll in best.items()}}))


def train(overrides: list[str]) -> dict:
    """nll per token on valid: at each evaluation (`nlls`), the lowest (`best`), and of the last weights by memory."""
    from nas.training.evaluation import evaluate_split

    (config, corpus, context), nlls = open_experiment(Path(__file__).with_name("passes.yaml"), overrides), []

    def evaluate(step, phase):
        if step in {math.ceil(count * phase.total_steps / EVALUATIONS) for count in range(1, EVALUATIONS + 1)}:
            nlls.append(phase.figures(phase.train_weights.average)["nll_per_token"])

    training = Training(expand(PATTERN), config, corpus, context, evaluate)
    training.end()
    model, by_memory = training.model, {}
    for memory in MEMORIES:
        longer = replace(config, evaluate=replace(config.evaluate, memory=memory))
        figures = evaluate_split(longer, model, model.blocks, corpus, "valid", context)
        by_memory[str(memory)] = figures["nll_per_token"]
    return {"setting": " ".join(overrides), "best": min(nlls), "nlls": nlls, "memory": by_memory}


if __name__ == "__main__":
    run_command(main)
