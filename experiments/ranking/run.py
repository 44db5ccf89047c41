"""Compare a SuperNet's ranking of patterns with separate trainings: `python experiments/ranking/run.py`.

Random patterns are trained alone for two lengths; their losses are the truth. SuperNets of several lengths evaluate the
same patterns with shared weights. Kendall's tau measures how far the two orders agree. With the weights of
each SuperNet, pi is learned. The patterns that they find are trained alone too; the regret is
their loss minus that of the best pattern trained. Every finished job is a JSON file in OUT and is not repeated.
Several processes may share OUT, each with its own --only. The last line is JSON.
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
from nas.core.config import Config
from nas.core.errors import run_command
from nas.core.pattern import abbreviate, expand, interleaved, network

BLOCKS, PATTERNS = 6, 20
TRUTH = {800: (1,), 3200: (1,)}  # seeds of the trainings alone, by their steps
SEEDS = (1, 2)  # of SuperNets
CANDIDATES = ("attention", "dense", "identity")
CONFIG = Path(__file__).with_name("ranking.yaml")
EVALUATED_TOKENS = 65_536  # the first of valid
SUPERNETS = {f"{steps}": [f"train.steps={steps}"] for steps in (800, 2400, 4800, 9600)}
LOGITS = {"leave-one-out": ["search.best_fraction=1"], "four paths": ["search.paths=4", "search.logits_steps=1200"]}
MATURE = "9600"  # the SuperNet with which pi is learned in these ways, too


def random_patterns(blocks: int = BLOCKS, count: int = PATTERNS, seed: int = 0) -> list[list[str]]:
    """Patterns of different networks; in each block every operation is equally likely."""
    source, patterns = np.random.default_rng(seed), {}
    while len(patterns) < count:
        pattern = [CANDIDATES[index] for index in source.integers(len(CANDIDATES), size=blocks)]
        patterns.setdefault(network(pattern), pattern)
    return list(patterns.values())


def evaluate(model, operations, config: Config, corpus, context) -> float:
    """nll per token on the first tokens of valid."""
    from nas.training.evaluation import count_memory_blocks, total_nll

    tokens, train = corpus.tokens("valid")[: EVALUATED_TOKENS + 1], config.train
    memory_blocks = count_memory_blocks(operations)
    total, counted = total_nll(model, tokens, 16, train.segment, train.memory, memory_blocks, device=context.device)
    return total / counted


def train_alone(pattern: list[str], overrides: list[str]) -> dict:
    """Train one pattern from scratch, and evaluate it."""
    from nas.retraining.phase import train_pattern

    config, corpus, context = open_experiment(CONFIG, overrides)
    started = time.perf_counter()
    model = train_pattern(pattern, config, corpus, context)
    seconds = time.perf_counter() - started
    nll = evaluate(model, model.blocks, config, corpus, context)
    return {"pattern": abbreviate(pattern), "nll": nll, "seconds": seconds}


def search(name: str, seed: int, overrides: list[str]) -> dict:
    """Train a SuperNet. Its weights evaluate the random patterns, and pi is learned with them."""
    from nas.costs.flops import count_flops
    from nas.search.learn_pi import learn_pi

    config, corpus, context = open_experiment(CONFIG, [*overrides, *SUPERNETS[name], f"seed={seed}"])
    weights = train_supernet(config, corpus, context)
    operations, costs = weights.supernet.operations, count_flops(config, corpus.counts())

    def nll(path: list[int]) -> float:
        weights.supernet.set_path(path)
        return evaluate(weights.supernet, weights.supernet.chosen_operations(), config, corpus, context)

    def learn(options: list[str]) -> dict:
        """The pattern that pi finds, and its nll by the weights."""
        weights.config, *_ = open_experiment(CONFIG, [*overrides, *SUPERNETS[name], *options])
        started = time.perf_counter()
        path = learn_pi(weights, costs, None).pi[0].argmax(axis=1).tolist()
        return {
            "found": abbreviate([operations[index] for index in path]),
            "nll": nll(path),
            "seconds": time.perf_counter() - started,
        }

    losses = [nll([operations.index(part) for part in pattern]) for pattern in reference_patterns()]
    found = {"own": learn([f"seed={seed}"])}
    if name == MATURE:
        found |= {how: learn([f"seed={seed + 10}", *options]) for how, options in LOGITS.items()}
    return {"found": found, "losses": losses}


def reference_patterns() -> list[list[str]]:
    return [interleaved(BLOCKS), *random_patterns()]


def losses_alone(jobs: Jobs, short: str, steps: int) -> list[float]:
    """nll of a pattern trained alone, for each seed that has finished."""
    results = [jobs.get(alone_name(expand(short), steps, seed)) for seed in TRUTH[steps]]
    return [result["nll"] for result in results if result]


def alone_name(pattern: list[str], steps: int, seed: int) -> str:
    return f"alone-{network(pattern)}-{steps}-{seed}"


def report(jobs: Jobs) -> dict:
    """Print the tables of all finished jobs. Returns the content of the last line."""
    shorts = list(map(abbreviate, reference_patterns()))
    truth = {steps: {short: losses_alone(jobs, short, steps) for short in shorts} for steps in TRUTH}
    for steps in TRUTH:
        if any(len(losses) < len(TRUTH[steps]) for losses in truth[steps].values()):
            print(f"not all patterns have been trained for {steps} steps")
            del truth[steps]
    if not truth:
        return {}
    columns = [(steps, index) for steps in truth for index in range(len(TRUTH[steps]))]
    print_row("pattern", *(f"{steps} steps, seed {TRUTH[steps][i]}" for steps, i in columns), header=True)
    for short in sorted(shorts, key=lambda short: truth[max(truth)][short][0]):
        print_row(short, *(f"{truth[steps][short][i]:.4f}" for steps, i in columns))
    means = {steps: [float(np.mean(losses)) for losses in truth[steps].values()] for steps in truth}
    summary = {}
    for one, other in itertools.combinations(means, 2):
        summary[f"tau_between_{one}_and_{other}_steps"] = round(kendall_tau(means[one], means[other]), 3)
    print(f"\n{summary}\n")
    return summary | {"tau": report_searches(jobs, means)}


def report_searches(jobs: Jobs, means: dict[int, list[float]]) -> dict[str, list[list[float]]]:
    """Print what each finished SuperNet shows. means: the truth. Returns each one's tau with both truths, by seed."""
    print_row("SuperNet", "seed", *(f"tau with {steps} steps" for steps in means), header=True)
    taus, results = {}, {}
    for name, seed in itertools.product(SUPERNETS, SEEDS):
        if result := jobs.get(f"supernet-{name}-{seed}"):
            results[name, seed] = result
            taus.setdefault(name, []).append(
                [round(kendall_tau(truth, result["losses"]), 3) for truth in means.values()]
            )
            print_row(name, seed, *taus[name][-1])
    print()
    steps = max(means)
    known = [losses_alone(jobs, result["pattern"], steps) for result in jobs.all("alone-*")]
    best = min([*means[steps], *(np.mean(losses) for losses in known if losses)])
    print_row(
        "SuperNet", "seed", "pi", "found", "nll by the weights", f"alone, {steps} steps", "regret", "s", header=True
    )
    for (name, seed), result in results.items():
        for how, found in result["found"].items():
            losses = losses_alone(jobs, found["found"], steps)
            alone = [f"{np.mean(losses):.4f}", f"{np.mean(losses) - best:.4f}"] if losses else ["", ""]
            print_row(name, seed, how, found["found"], f"{found['nll']:.4f}", *alone, f"{found['seconds']:.0f}")
    return taus


def main() -> None:
    arguments = job_parser(__doc__, "runs/ranking", "supernet-*").parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    for steps in TRUTH:
        train_patterns(jobs, reference_patterns(), steps, overrides)
    for seed, name in itertools.product(SEEDS, SUPERNETS):
        jobs.do(f"supernet-{name}-{seed}", lambda: search(name, seed, overrides))  # noqa: B023
    results = [jobs.get(f"supernet-{name}-{seed}") for name in SUPERNETS for seed in SEEDS]
    found = {about["found"] for result in results if result for about in result["found"].values()}
    for steps in TRUTH:
        train_patterns(jobs, list(map(expand, sorted(found))), steps, overrides)
    print(json.dumps(report(jobs)))


def train_patterns(jobs: Jobs, patterns: list[list[str]], steps: int, overrides: list[str]) -> None:
    """Train each pattern alone with each seed."""
    for seed, pattern in itertools.product(TRUTH[steps], patterns):
        options = [*overrides, f"train.steps={steps}", f"seed={seed}"]
        jobs.do(alone_name(pattern, steps, seed), lambda: train_alone(pattern, options))  # noqa: B023


if __name__ == "__main__":
    run_command(main)
