"""Quality of options at their latency: `python experiments/bench/quality.py --recipe "" --recipe "model.dropout=0.1"`.

Each recipe, some options separated by spaces, trains a pattern with each seed. The first one is the baseline. The table
has for each recipe, on valid: the mean word perplexity with its standard error, its change from the baseline, and p of
Welch's t-test of nll. --latency also measures all networks in turns, as ratios to the baseline's latency of inference;
nothing else should run then. Every finished training is a JSON file in OUT and is not repeated. Several processes may
share OUT, each with its own --only. The last line is JSON.
"""

import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import Training, open_experiment, print_row
from experiments.jobs import Jobs, job_parser
from nas.comparison.results import mean_and_standard_error
from nas.core.errors import run_command
from nas.core.pattern import expand

CONFIG = Path(__file__).with_name("quality.yaml")
ROUNDS = 60  # of the latencies


def train(pattern: list[str], overrides: list[str]) -> dict:
    """Train a pattern from scratch; its figures on valid."""
    config, corpus, runtime = open_experiment(CONFIG, overrides)
    began = time.monotonic()
    training = Training(pattern, config, corpus, runtime)
    valid = training.end()
    seconds = time.monotonic() - began
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    figures = {"nll": valid["nll_per_token"], "word_perplexity": valid["word_perplexity"]}
    return figures | {"seconds": seconds, "parameters": parameters}


def measure(pattern: list[str], recipes: list[list[str]]) -> list[float]:
    """The median ratio of each recipe's latency to that of the first one."""
    from nas.costs.measurement import text_times

    networks = {}
    for number, overrides in enumerate(recipes):
        config, corpus, runtime = open_experiment(CONFIG, overrides)
        networks[number] = pattern, config, corpus
    return [found["ratio"] for found in text_times(networks, runtime, ROUNDS).values()]


def main() -> None:
    parser = job_parser(__doc__, "runs/quality", "*-1")
    parser.add_argument("--recipe", action="append", required=True, help="options, separated by spaces; repeat it")
    parser.add_argument("--pattern", default="adadadadadad", help="its short form (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds (default: 1 2 3)")
    parser.add_argument("--latency", action="store_true", help="measure the latencies")
    arguments = parser.parse_intermixed_args()
    pattern, settings = expand(arguments.pattern), [*arguments.overrides, f"pattern={arguments.pattern}"]
    jobs = Jobs(arguments.out, settings, arguments.only)
    options = {recipe: [*arguments.overrides, *recipe.split()] for recipe in arguments.recipe}
    for seed in arguments.seeds:
        for recipe, given in options.items():
            jobs.do(job_name(recipe, seed), lambda: train(pattern, [*given, f"seed={seed}"]))  # noqa: B023
    ratios = dict.fromkeys(options)
    if arguments.latency:
        ratios = dict(zip(options, measure(pattern, list(options.values())), strict=True))
    print(json.dumps(report(jobs, arguments.seeds, ratios)))


def job_name(recipe: str, seed: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', recipe) or 'default'}-{seed}"


def report(jobs: Jobs, seeds: list[int], ratios: dict[str, float | None]) -> dict:
    """Print the table of the recipes whose trainings have finished. Returns the content of the last line."""
    from scipy import stats

    print_row("recipe", "seeds", "word perplexity", "change", "p", "latency", "parameters", "seconds", header=True)
    baseline, summary = None, {}
    for recipe, ratio in ratios.items():
        results = [result for seed in seeds if (result := jobs.get(job_name(recipe, seed)))]
        if not results:
            continue
        perplexities, nlls = ([result[key] for result in results] for key in ("word_perplexity", "nll"))
        mean, error = mean_and_standard_error(perplexities)
        if recipe == next(iter(ratios)):
            baseline = mean, nlls
        if not baseline:
            print("the baseline has no finished training yet")
            return {}
        change, tested = mean / baseline[0] - 1, len(nlls) > 1 and len(baseline[1]) > 1 and nlls != baseline[1]
        p = float(stats.ttest_ind(nlls, baseline[1], equal_var=False).pvalue) if tested else math.nan
        seconds = float(np.mean([result["seconds"] for result in results]))
        spread = "" if error is None else f" ± {error:.2f}"
        about = f"{mean:.2f}{spread}", f"{change:+.1%}", f"{p:.3f}", "" if ratio is None else f"{ratio:.3f}"
        print_row(recipe or "default", len(results), *about, f"{results[0]['parameters']:,}", f"{seconds:.0f}")
        figures = {"word_perplexity": round(mean, 2), "change": round(change, 4), "latency": ratio and round(ratio, 3)}
        summary[recipe or "default"] = figures
    return summary


if __name__ == "__main__":
    run_command(main)
