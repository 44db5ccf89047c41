"""What are the weights of a search worth? `python experiments/inherit/run.py data.source=FOLDER --searches DIR ...`.

Each DIR is the run folder of a finished search with search.yaml and another seed. Each pattern is trained from scratch
with the seeds 1, 2, ..., and from the weights of its path in each SuperNet. Valid is evaluated at several times; the
seconds do not include the evaluations. Every finished training is a JSON file in OUT and is not repeated. Several
processes may share OUT if --only divides the trainings between them. The program writes curves.png to OUT. The last
line is JSON.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from scipy.stats import ttest_rel

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import is_due, mean_and_error, open_experiment, print_row
from experiments.jobs import Jobs, job_parser
from nas.core.errors import InputError, run_command
from nas.core.pattern import expand
from nas.core.run_folder import CHECKPOINT, OUTCOME
from nas.data.text_files import sha256_of
from nas.data.vocabulary import VOCABULARY
from nas.reporting.style import BLUE, GREY, new_figure, save, tidy

PATTERNS = ("adadad", "aadadd", "iaiiad")  # interleaved, and what experiments/wikitext2 derives within 1.0 and 0.65
EVALUATIONS = 10
SCRATCH, INHERITED = "scratch", "inherited"
COLOURS = {SCRATCH: GREY, INHERITED: BLUE}


def main() -> None:
    parser = job_parser(__doc__, "runs/inherit/trainings", "*-scratch-*")
    parser.add_argument(
        "--searches", type=Path, nargs="+", required=True, metavar="DIR", help="finished searches with search.yaml"
    )
    arguments = parser.parse_intermixed_args()
    for search in arguments.searches:
        if not (search / OUTCOME).exists():
            raise InputError(f"--searches {search} is not a finished search; options come before --searches")
    origins = [f"search={sha256_of(search / CHECKPOINT)}" for search in arguments.searches]
    jobs, results = Jobs(arguments.out, [*arguments.overrides, *origins], arguments.only), {}
    for seed, search in enumerate(arguments.searches, start=1):
        same = [f"seed={seed}", f"data.tokenizer={search / VOCABULARY}", *arguments.overrides]
        for short in PATTERNS:
            for start, origin in {SCRATCH: [], INHERITED: [f"train.init_from={search}"]}.items():
                if found := jobs.do(f"{short}-{start}-{seed}", partial(train, short, [*same, *origin])):
                    results.setdefault(short, {}).setdefault(start, []).append(found)
    wanted = [len(arguments.searches)] * len(COLOURS)
    finished = {short: found for short, found in results.items() if list(map(len, found.values())) == wanted}
    draw(finished, arguments.out / "curves.png")
    print(json.dumps(report(finished)))


def train(short: str, options: list[str]) -> dict:
    """Seconds of training and nll per token on valid before the first step and at EVALUATIONS equal distances."""
    from nas.retraining.phase import train_pattern
    from nas.retraining.weights import set_weights, with_origin

    config, corpus, context = open_experiment(Path(__file__).with_name("retrain.yaml"), options)
    config, origin = with_origin(config, expand(short))
    times, nlls, evaluating, began = [], [], 0.0, time.perf_counter()

    def evaluate(step, phase):
        nonlocal evaluating
        if step == 0 or is_due(step, phase.total_steps, EVALUATIONS):
            now = time.perf_counter()
            times.append(now - began - evaluating)
            nlls.append(phase.valid_figures()["nll_per_token"])
            evaluating += time.perf_counter() - now

    prepare = (lambda model: set_weights(model, origin)) if origin else (lambda model: None)
    train_pattern(expand(short), config, corpus, context, evaluate, prepare)
    return {"pattern": short, "seconds": [one - times[0] for one in times], "nlls": nlls}


def report(results: dict[str, dict[str, list[dict]]]) -> dict:
    """Print the nll of each pattern from scratch and with inherited weights. Returns the last line's content."""
    header = "pattern", SCRATCH, INHERITED, "difference", "p", "inherited, before training", "as good as scratch after"
    print_row(*header, "seconds", header=True)
    final = {}
    for short, starts in results.items():
        nlls = {start: np.array([training["nlls"] for training in found]) for start, found in starts.items()}
        scratch, inherited = nlls[SCRATCH][:, -1], nlls[INHERITED][:, -1]
        differences = inherited - scratch
        p = float(ttest_rel(inherited, scratch).pvalue) if len(differences) > 1 else None  # paired by seed
        curve = nlls[INHERITED].mean(axis=0)
        reached = np.flatnonzero((curve <= scratch.mean()) & (np.arange(len(curve)) > 0))
        print_row(
            *(short, mean_and_error(list(scratch)), mean_and_error(list(inherited)), f"{differences.mean():+.4f}"),
            *(None if p is None else f"{p:.2g}", f"{curve[0]:.4f}"),
            f"{reached[0]}/{EVALUATIONS} of the steps" if len(reached) else "never",
            f"{np.mean([training['seconds'][-1] for training in starts[INHERITED]]):.0f}",
        )
        final[short] = {start: round(float(nlls[start][:, -1].mean()), 4) for start in COLOURS}
    return {"nll": final}


def draw(results: dict[str, dict[str, list[dict]]], path: Path) -> None:
    """nll on valid over seconds of training, a panel per pattern, the mean over the seeds."""
    if not results:
        return
    figure, panels = new_figure(9, 3.2, columns=len(results), sharey=True, squeeze=False)
    panels = panels[0]
    for axes, (short, starts) in zip(panels, results.items(), strict=True):
        for start, found in starts.items():
            nlls, seconds = (np.mean([training[key] for training in found], axis=0) for key in ("nlls", "seconds"))
            shown = nlls < nlls[-1] + 1.0  # an untrained network would hide the differences
            axes.plot(seconds[shown], nlls[shown], marker=".", color=COLOURS[start], label=start)
        axes.set(title=short, xlabel="seconds of training")
        tidy(axes)
    panels[0].set_ylabel("nll on valid (nats per token)")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    run_command(main)
