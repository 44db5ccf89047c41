"""Interleaved networks of a grid of shapes, each trained to the end: `python experiments/frontier/grid.py`.

A shape is a vocabulary, a width and a number of blocks. OUT/grid.csv has for each shape, on valid: word perplexity,
bits per byte, also after the parts of a training that probes have, and the time per byte of text as a ratio to the
reference, which is the shape of frontier.yaml. --latency measures these times; nothing else should run then. Every
finished training is a JSON file in OUT and is not repeated. Several processes may share OUT, each with its own --only.
The last line is JSON: the best shape of each budget.
"""

import csv
import itertools
import json
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import open_experiment
from experiments.jobs import Jobs, job_parser
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.files import read_yaml
from nas.core.pattern import interleaved
from nas.core.run_folder import CHOICE, RESULTS
from nas.networks.space import NetworkShape, options_of, own_shape

CONFIG = Path(__file__).with_name("frontier.yaml")
PIECES, WIDTHS, BLOCKS = (2000, 4000, 8000, 16_000, 32_000), (64, 96, 128, 192, 256), (2, 4, 6, 8, 12)
BUDGETS = 0.4, 0.65, 1.0
ROUNDS = 20


def train(shape: NetworkShape, overrides: list[str]) -> dict:
    """Train the interleaved network of a shape. Returns its figures on valid, and bits per byte after each rung."""
    from nas.networks.choice import RUNGS
    from nas.retraining.phase import TRIAL_SHARE, RetrainPhase
    from nas.retraining.trials import rung_steps
    from nas.training.build import build_fixed
    from nas.training.optimizer import TailAverage

    config, corpus, context = open_experiment(CONFIG, [*options_of(shape, load_config(CONFIG, [])), *overrides])
    began = time.monotonic()
    phase = RetrainPhase(build_fixed(interleaved(shape.blocks), config, corpus.vocab_size), corpus, config, context)
    trials, rungs = {rung_steps(share, RUNGS[0][0], phase.total_steps): share for share, _ in RUNGS}, {}
    averages = {until: TailAverage(phase.train_weights.optimizer.parameters, TRIAL_SHARE, until) for until in trials}
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
        for until in (until for until in trials if step <= until):
            averages[until].update(step)
            if step == until:
                rungs[str(trials[until])] = phase.figures(averages[until])["bits_per_byte"]
    phase.end()
    valid = phase.valid_figures()
    figures = {key: valid[key] for key in ("word_perplexity", "bits_per_byte", "nll_per_token")}
    return figures | {"rungs": rungs, "steps": phase.total_steps, "seconds": time.monotonic() - began}


def measure(shapes: list[NetworkShape], overrides: list[str]) -> dict[str, float]:
    """{name: the time per byte of text of inference, as a ratio to the reference's}"""
    from nas.costs.latency import segment_works, timed_rounds
    from nas.data.corpus import bytes_per_token

    works, tokens_per_byte = {}, {}
    for shape in shapes:
        config, corpus, context = open_experiment(CONFIG, [*options_of(shape, load_config(CONFIG, [])), *overrides])
        (works[shape],) = segment_works([interleaved(shape.blocks)], config, corpus.counts(), context)
        tokens_per_byte[shape] = 1 / bytes_per_token(corpus)
    times, own = timed_rounds(works, ROUNDS), own_shape(load_config(CONFIG, []))
    return {
        str(shape): float(np.median(taken / times[own])) * tokens_per_byte[shape] / tokens_per_byte[own]
        for shape, taken in times.items()
    }


def report(jobs: Jobs, shapes: list[NetworkShape], ratios: dict[str, float], folders: list[Path]) -> dict:
    """Write grid.csv of the finished trainings, and grid.png. Returns the content of the last line: the best shapes."""
    from nas.networks.choice import RUNGS

    shares = [str(share) for share, _ in RUNGS]
    rows = [(ratios[str(shape)], shape, result) for shape in shapes if (result := jobs.get(str(shape)))]
    with open(jobs.folder / "grid.csv", "w", newline="") as file:
        table, best = csv.writer(file), {}
        head = ["vocab_size", "d_model", "blocks", "time_per_byte", "word_perplexity", "bits_per_byte", "steps"]
        table.writerow([*head, *shares])
        for ratio, shape, result in sorted(rows):
            figures = round(result["word_perplexity"], 2), round(result["bits_per_byte"], 4), result["steps"]
            after = [result.get("rungs", {}).get(share, "") for share in shares]
            table.writerow([*shape, round(ratio, 3), *figures, *after])
    for budget in BUDGETS:
        fitting = [(result["word_perplexity"], str(shape)) for ratio, shape, result in rows if ratio <= budget]
        if fitting:
            best[str(budget)] = min(fitting)[::-1]
    if folders:
        draw(rows, folders, jobs.folder / "grid.png")
    return {"missing": len(shapes) - len(rows), "best": best}


def draw(rows: list[tuple], folders: list[Path], path: Path) -> None:
    """Draw the grid over its times, and the networks that run.py found. folders: of run.py."""
    from nas.reporting.shape_figure import shapes_figure

    choices = [read_yaml(folder / "search" / CHOICE) for folder in folders]
    found = [read_yaml(folder / "training" / RESULTS) for folder in folders]
    networks = [
        (f"found within {choice['budget']:g}", one["latency"]["ms_per_1000_bytes"], one["valid"]["word_perplexity"])
        for choice, one in zip(choices, found, strict=True)
    ]
    best, first = min(words for _, _, words in networks), choices[0]
    del first["shape"]
    shapes = [
        {
            **shape._asdict(),
            "cost": ratio * first["reference_cost"],
            "behind": math.log(result["word_perplexity"]) / math.log(best) - 1,
        }
        for ratio, shape, result in rows
    ]
    shapes_figure({**first, "shapes": shapes, "probes": []}, networks, path)


def main() -> None:
    parser = job_parser(__doc__, "runs/grid", "8000-*")
    parser.add_argument("--latency", action="store_true", help="measure the latencies, which choose what is trained")
    parser.add_argument("--largest", type=float, default=1.02, help="ratio of the slowest shapes that are trained")
    found = "folder of a finished run.py, to draw in OUT/grid.png; may be repeated"
    parser.add_argument("--found", type=Path, action="append", default=[], metavar="FOLDER", help=found)
    arguments = parser.parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    shapes = [NetworkShape(*sizes) for sizes in itertools.product(PIECES, WIDTHS, BLOCKS)]
    if arguments.latency:
        (arguments.out / "latency.json").unlink(missing_ok=True)
    ratios = jobs.do("latency", lambda: measure(shapes, overrides))
    shapes = [shape for shape in shapes if ratios[str(shape)] <= arguments.largest]
    for shape in sorted(shapes, key=lambda shape: -ratios[str(shape)]):
        jobs.do(str(shape), lambda: train(shape, overrides))  # noqa: B023
    print(json.dumps(report(jobs, shapes, ratios, arguments.found)))


if __name__ == "__main__":
    run_command(main)
