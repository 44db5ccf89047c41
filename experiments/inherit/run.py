"""What is it worth to start from the weights of a search? `python experiments/inherit/run.py --searches RUN_DIR ...`.

Each RUN_DIR is a finished search with search.yaml and another seed. Each pattern is trained from scratch with the seeds
1, 2, ..., and from the weights of its path in each SuperNet. Valid is evaluated at several times; the seconds do not
include the evaluations. Every finished training is a JSON file in OUT and is not repeated. Several processes may share
OUT if --only divides the trainings between them. The program writes curves.png to OUT. The last line is JSON.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import is_due, mean_and_error, open_experiment, print_row
from experiments.jobs import Jobs, job_parser
from nas.core.errors import run_command
from nas.core.pattern import expand
from nas.core.run_folder import CHECKPOINT
from nas.data.text_files import sha256_of
from nas.data.vocabulary import VOCABULARY
from nas.reporting.style import BLUE, GREY, RED, new_figure, save, tidy

PATTERNS = ("adadad", "aadadd", "iaiiad")  # interleaved, and what experiments/wikitext2 derives within 1.0 and 0.65
EVALUATIONS = 10
SLOWER = ["train.lr=0.0033", "train.muon_lr=0.005"]  # a third of the defaults
STARTS = {"scratch": [], "inherited": [], "inherited, a third of the rates": SLOWER}
COLOURS = dict(zip(STARTS, (GREY, BLUE, RED), strict=True))


def main() -> None:
    parser = job_parser(__doc__, "runs/inherit/trainings", "*-scratch-*")
    parser.add_argument(
        "--searches", type=Path, nargs="+", required=True, metavar="RUN_DIR", help="finished searches with search.yaml"
    )
    arguments = parser.parse_intermixed_args()
    origins = [f"search={sha256_of(search / CHECKPOINT)}" for search in arguments.searches]
    jobs, results = Jobs(arguments.out, [*arguments.overrides, *origins], arguments.only), {}
    for seed, search in enumerate(arguments.searches, start=1):
        same = [f"seed={seed}", f"data.tokenizer={search / VOCABULARY}", *arguments.overrides]
        for short in PATTERNS:
            for start, options in STARTS.items():
                origin = [] if start == "scratch" else [f"train.init_from={search}"]
                work = partial(train, short, [*same, *options, *origin])
                if found := jobs.do(f"{short}-{start.replace(', ', '-').replace(' ', '-')}-{seed}", work):
                    results.setdefault((short, start), []).append(found)
    finished = {key: found for key, found in results.items() if len(found) == len(arguments.searches)}
    draw(finished, arguments.out / "curves.png")
    print(json.dumps(report(finished)))


def train(short: str, options: list[str]) -> dict:
    """Seconds of training and nll per token on valid before the first step and at EVALUATIONS equal distances."""
    import torch

    from nas.retraining.phase import RetrainPhase
    from nas.retraining.weights import set_weights, with_origin
    from nas.training.build import build_fixed

    config, corpus, context = open_experiment(Path(__file__).with_name("retrain.yaml"), options)
    config, origin = with_origin(config, expand(short))
    torch.manual_seed(config.seed)
    model = build_fixed(expand(short), config, corpus.vocab_size)
    if origin:
        set_weights(model, origin)
    phase, seconds = RetrainPhase(model, corpus, config, context), 0.0
    times, nlls = [0.0], [phase.valid_figures()["nll_per_token"]]
    for step in range(1, phase.total_steps + 1):
        began = time.perf_counter()
        phase.step(step)
        seconds += time.perf_counter() - began
        if is_due(step, phase.total_steps, EVALUATIONS):
            times.append(seconds)
            nlls.append(phase.valid_figures()["nll_per_token"])
    return {"pattern": short, "seconds": times, "nlls": nlls}


def report(results: dict[tuple[str, str], list[dict]]) -> dict:
    """Print the mean nll over time of each pattern and start. Returns the last line's content: the final means."""
    steps = [f"{index}/{EVALUATIONS}" for index in (0, 1, 2, 5, EVALUATIONS)]
    print_row("pattern", "start", *steps, "seconds", "time for the final loss from scratch", header=True)
    final = {}
    for (short, start), found in results.items():
        nlls, seconds = (np.mean([result[key] for result in found], axis=0) for key in ("nlls", "seconds"))
        final[f"{short}, {start}"] = round(float(nlls[-1]), 4)
        needed = ""
        if (scratch := results.get((short, "scratch"))) and start != "scratch":
            aim = np.mean([result["nlls"][-1] for result in scratch])
            reached = np.flatnonzero(nlls <= aim)
            needed = f"{reached[0]}/{EVALUATIONS}" if len(reached) else "not reached"
        cells = [f"{nlls[int(step.split('/')[0])]:.4f}" for step in steps]
        cells[-1] = mean_and_error([result["nlls"][-1] for result in found])
        print_row(short, start, *cells, f"{seconds[-1]:.0f}", needed)
    return {"final_nll": final}


def draw(results: dict[tuple[str, str], list[dict]], path: Path) -> None:
    """nll on valid over seconds of training, a panel per pattern, the mean over the seeds."""
    if not results:
        return
    figure, panels = new_figure(9, 3.2, columns=len(PATTERNS), sharey=True, squeeze=False)
    panels = panels[0]
    for (short, start), found in results.items():
        nlls, seconds = (np.mean([result[key] for result in found], axis=0) for key in ("nlls", "seconds"))
        shown = nlls < nlls[-1] + 1.0  # an untrained network would hide the differences
        panels[PATTERNS.index(short)].plot(seconds[shown], nlls[shown], marker=".", color=COLOURS[start], label=start)
    for short, axes in zip(PATTERNS, panels, strict=True):
        axes.set(title=short, xlabel="seconds of training")
        tidy(axes)
    panels[0].set_ylabel("nll on valid (nats per token)")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    run_command(main)
