"""Compare a SuperNet's ranking of sized patterns with trainings alone: `python experiments/ranking/run.py`.

Random patterns of one budget are trained alone; their losses on valid are the truth. Four judges order them: SuperNets
whose operations have separate weights, SuperNets whose dense widths share weights, FLOPs, and the loss of each training
alone after a sixth of its steps. A family of patterns that differ in the width of their dense blocks shows how the
SuperNets judge width. With the truth of its first and last member, the judgement of width is corrected. Every finished
job is a JSON file in OUT and is not repeated. Several processes may share OUT, each with its own --only. The last line
is JSON.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import kendall_tau, open_experiment, print_row, train_supernet
from experiments.jobs import Jobs, job_parser
from nas.core.errors import run_command
from nas.core.pattern import abbreviate, expand, file_name, interleaved

CONFIG = Path(__file__).with_name("ranking.yaml")
BUDGET, TOLERANCE, PATTERNS = 0.8, 0.05, 18  # FLOPs of the random patterns, relative to interleaved
WIDTHS = "d", "d8x", "d16x"
FAMILY = [expand(f"a{width}" * 4 + "iiii") for width in WIDTHS]
SHORT = 6  # trainings alone are also evaluated after 1 / SHORT of their steps
SUPERNETS = {"separate": ["search.share_weights=false"], "shared": ["search.share_weights=true"]}
SEEDS = (1,)  # of SuperNets
DRAWS = 1000  # of the bootstrap that gives the standard error of tau


def open_costs(overrides: list[str]):
    """(configuration, corpus, device context, FLOPs of the operations)"""
    from nas.costs.flops import count_flops

    config, corpus, context = open_experiment(CONFIG, overrides)
    return config, corpus, context, count_flops(config, corpus.counts())


def random_patterns(overrides: list[str]) -> list[list[str]]:
    """Different networks, which have BUDGET of the FLOPs of interleaved."""
    from nas.costs.baselines import random_patterns

    config, _, _, costs = open_costs(overrides)
    blocks, target = config.model.blocks, BUDGET * costs.cost(interleaved(config.model.blocks))
    return list(
        itertools.islice(random_patterns(blocks, config.search.operations, costs, target, TOLERANCE, seed=0), PATTERNS)
    )


def train_alone(pattern: list[str], overrides: list[str]) -> dict:
    """nll on valid of a pattern trained from scratch: after a share of the steps, and at the end."""
    from nas.retraining.phase import train_pattern

    config, corpus, context, costs = open_costs(overrides)
    nlls, steps, started = {}, config.train.steps, time.perf_counter()

    def evaluate(step, phase):
        if step in (steps // SHORT, steps):
            nlls[step] = phase.valid_figures()["nll_per_token"]

    train_pattern(pattern, config, corpus, context, evaluate)
    seconds, flops = time.perf_counter() - started, costs.ratio(pattern)
    return {"nll": nlls[steps], "short_nll": nlls[steps // SHORT], "flops": flops, "seconds": seconds}


def judge(name: str, overrides: list[str], patterns: list[list[str]]) -> dict:
    """nll of patterns with the weights of a SuperNet, whose operations train as often as those of a pattern alone."""
    from nas.search.maturity import steps_per_update

    config, *_ = open_experiment(CONFIG, [*overrides, *SUPERNETS[name]])
    steps = config.train.steps * steps_per_update(config)
    config, corpus, context = open_experiment(CONFIG, [*overrides, *SUPERNETS[name], f"train.steps={steps}"])
    started = time.perf_counter()
    weights = train_supernet(config, corpus, context)
    seconds, operations = time.perf_counter() - started, weights.supernet.operations
    nlls = [weights.nll([operations.index(block) for block in pattern]) for pattern in patterns]
    return {"nll": nlls, "steps": steps, "seconds": seconds}


def corrected(nlls: list[float], patterns: list[list[str]], family: list[float], truth: list[float]) -> list[float]:
    """The losses of a SuperNet, corrected by the error of its judgement of width.

    family, truth: the losses of the family by the SuperNet and alone; of the truth, the first and the last are used.
    The error is linear in the logarithm of the width.
    """
    error = ((truth[-1] - truth[0]) - (family[-1] - family[0])) / FAMILY[0].count("dense")
    widths = {expand(width)[0]: index / (len(WIDTHS) - 1) for index, width in enumerate(WIDTHS)}
    return [nll + error * sum(widths.get(block, 0) for block in one) for nll, one in zip(nlls, patterns, strict=True)]


def report(jobs: Jobs, patterns: list[list[str]]) -> dict:
    """Print the tables of the finished jobs. Returns the content of the last line."""
    alone = [jobs.get(f"alone-{file_name(pattern)}") for pattern in [*patterns, *FAMILY]]
    if None in alone:
        return {"missing": alone.count(None)}
    count = len(patterns)
    truth, family = ([result["nll"] for result in part] for part in (alone[:count], alone[count:]))
    judges, widths = {}, {"alone": family}
    for name, seed in itertools.product(SUPERNETS, SEEDS):
        if result := jobs.get(f"supernet-{name}-{seed}"):
            judged, own = result["nll"][:count], result["nll"][count:]
            judges[f"{name} weights, seed {seed}"], widths[f"{name} weights, seed {seed}"] = judged, own
            judges[f"{name} weights, seed {seed}, corrected"] = corrected(judged, patterns, own, family)
    judges[f"alone, 1/{SHORT} of the steps"] = [result["short_nll"] for result in alone[:count]]
    judges["FLOPs (more is better)"] = [-result["flops"] for result in alone[:count]]
    attentions = [pattern.count("attention") for pattern in patterns]
    judges["attention blocks (more is better)"] = [-number for number in attentions]
    print_row("pattern", "alone", *judges, header=True)
    for index in np.argsort(truth):
        print_row(abbreviate(patterns[index]), f"{truth[index]:.4f}", *(f"{v[index]:.4f}" for v in judges.values()))
    print()
    print_row("nll less that of the narrow member", *map(abbreviate, FAMILY[1:]), header=True)
    for name, values in widths.items():
        print_row(name, *(f"{value - values[0]:+.4f}" for value in values[1:]))
    print()
    taus, attending = {}, np.flatnonzero(attentions)
    draws = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    print_row("judge", "Kendall's tau", "with attention only", "regret of its best", header=True)
    for name, values in judges.items():
        taus[name] = round(tau_of(values, truth), 3)
        error = np.nanstd([tau_of(values, truth, places) for places in draws])
        inner, regret = tau_of(values, truth, attending), truth[int(np.argmin(values))] - min(truth)
        print_row(name, f"{taus[name]:.3f} ± {error:.3f}", f"{inner:.3f}", f"{regret:.4f}")
    return {"tau": taus}


def tau_of(values: list[float], truth: list[float], places=slice(None)) -> float:
    """Kendall's tau of the patterns at these places."""
    return kendall_tau(np.array(values)[places], np.array(truth)[places])


def main() -> None:
    arguments = job_parser(__doc__, "runs/ranking", "supernet-*").parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    patterns = random_patterns(overrides)
    for name, seed in itertools.product(SUPERNETS, SEEDS):
        options = [*overrides, f"seed={seed}"]
        jobs.do(f"supernet-{name}-{seed}", lambda: judge(name, options, [*patterns, *FAMILY]))  # noqa: B023
    for pattern in [*patterns, *FAMILY]:
        jobs.do(f"alone-{file_name(pattern)}", lambda: train_alone(pattern, overrides))  # noqa: B023
    print(json.dumps(report(jobs, patterns)))


if __name__ == "__main__":
    run_command(main)
