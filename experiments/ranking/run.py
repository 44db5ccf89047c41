"""Compare a SuperNet's ranking of patterns with separate trainings: `python experiments/ranking/run.py`.

Random patterns are trained alone on a small budget; their losses are the reference. SuperNets that were searched with
different settings evaluate the same patterns with shared weights. Kendall's tau measures how far the two orders agree.
The pattern that each search found is trained alone too. Every finished job is a JSON file in OUT and is not repeated.
Several processes may share OUT, each with its own --only. The last line is JSON.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))

from experiments.jobs import Jobs  # noqa: E402
from nas.core.config import Config  # noqa: E402
from nas.core.config_loading import load_config  # noqa: E402
from nas.core.errors import run_command  # noqa: E402
from nas.core.pattern import abbreviate, expand, interleaved, network  # noqa: E402

BLOCKS, PATTERNS, SEEDS, ALONE_STEPS = 6, 20, (1, 2), 800
CANDIDATES = ("attention", "dense", "identity")
EVALUATED_TOKENS = 65_536  # the first of valid
HALF = "search.warmup_steps=1200"
SOFT = ["search.sampling=soft", "search.optimizer.lr=0.01"]
VARIANTS = {
    "hard-cold": ["search.warmup_steps=0"],
    "hard-quarter-unfair": ["search.fair_warmup=false"],
    "hard-quarter": [],
    "hard-half-unfair": [HALF, "search.fair_warmup=false"],
    "hard-half": [HALF],
    "hard-half-twice-as-long": ["train.steps=4800", "search.warmup_steps=2400"],
    "hard-half-uniform": [HALF, "search.weights_paths=uniform"],
    "hard-three-quarters": ["search.warmup_steps=1800"],
    "hard-quarter-loo-2": ["search.paths=2"],
    "hard-quarter-loo-8": ["search.paths=8"],
    "hard-half-loo-8": [HALF, "search.paths=8"],
    "hard-quarter-straight-through": ["search.estimator=straight_through"],
    "hard-half-straight-through": [HALF, "search.estimator=straight_through"],
    "soft-cold": [*SOFT, "search.warmup_steps=0"],
    "soft-quarter": SOFT,
    "soft-half": [*SOFT, HALF],
}  # options on top of ranking.yaml, where a quarter of the steps is warm-up


def random_patterns(blocks: int = BLOCKS, count: int = PATTERNS, seed: int = 0) -> list[list[str]]:
    """Patterns of different networks; in each block every operation is equally likely."""
    source, patterns = np.random.default_rng(seed), {}
    while len(patterns) < count:
        pattern = [CANDIDATES[index] for index in source.integers(len(CANDIDATES), size=blocks)]
        patterns.setdefault(network(pattern), pattern)
    return list(patterns.values())


def kendall_tau(first: list[float], second: list[float]) -> float:
    """Kendall's tau-b, which equals tau-a where no values are equal, as with measured losses."""
    from scipy.stats import kendalltau

    return float(kendalltau(first, second).statistic)


def load_experiment(overrides: list[str]) -> tuple[Config, object]:
    """(configuration, corpus) of ranking.yaml with overrides."""
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.training.device import set_up_device

    config = load_config(FOLDER / "ranking.yaml", overrides)
    set_up_device(config.seed, config.train)
    return config, Corpus(prepare(config.data))


def evaluate(model, operations, config: Config, corpus) -> float:
    """nll per token on the first tokens of valid."""
    from nas.training.device import device_context
    from nas.training.evaluation import count_memory_blocks, total_nll

    tokens, train = corpus.tokens("valid")[: EVALUATED_TOKENS + 1], config.train
    memory_blocks, device = count_memory_blocks(operations), device_context(train).device
    total, counted = total_nll(model, tokens, 16, train.segment, train.memory, memory_blocks, device=device)
    return total / counted


def train_alone(pattern: list[str], seed: int, overrides: list[str]) -> dict:
    """Train one pattern from scratch, and evaluate it."""
    from nas.retraining.phase import train_pattern
    from nas.training.device import device_context

    config, corpus = load_experiment([*overrides, f"train.steps={ALONE_STEPS}", f"seed={seed}"])
    started = time.perf_counter()
    model = train_pattern(pattern, config, corpus, device_context(config.train))
    seconds = time.perf_counter() - started
    nll = evaluate(model, model.blocks, config, corpus)
    return {"pattern": abbreviate(pattern), "nll": nll, "seconds": seconds}


def evaluate_path(supernet, path: list[int], config: Config, corpus) -> float:
    supernet.set_path(path)
    return evaluate(supernet, supernet.operations_on(path), config, corpus)


def search(variant: str, seed: int, overrides: list[str]) -> dict:
    """Run one search. Its weights evaluate the random patterns at the end of the warm-up, and at the end."""
    from nas.search.phase import SearchPhase
    from nas.search.supernet import build_supernet
    from nas.training.device import device_context

    config, corpus = load_experiment([*overrides, f"seed={seed}", *VARIANTS[variant]])
    phase = SearchPhase(build_supernet(config, corpus), corpus, config, device_context(config.train))
    supernet, seconds, losses = phase.supernet, 0.0, {}
    for step in range(1, phase.total_steps + 1):
        started = time.perf_counter()
        phase.step(step)
        seconds += time.perf_counter() - started
        if step in (phase.warmup_steps, phase.total_steps):
            paths = [[supernet.operations.index(name) for name in pattern] for pattern in random_patterns()]
            losses[step] = [evaluate_path(supernet, path, config, corpus) for path in paths]
    path = supernet.argmax_path()
    return {
        "variant": variant,
        "found": abbreviate(supernet.names(path)),
        "pi": supernet.pi().tolist(),
        "nll_of_found": evaluate_path(supernet, path, config, corpus),
        "after_warmup": losses.get(phase.warmup_steps),
        "at_the_end": losses[phase.total_steps],
        "seconds": seconds,
    }


def losses_alone(jobs: Jobs, short: str) -> list[float]:
    """nll of a pattern trained alone, for each seed that has finished."""
    results = [jobs.get(f"alone-{network(expand(short))}-{seed}") for seed in SEEDS]
    return [result["nll"] for result in results if result]


def report(jobs: Jobs) -> dict:
    """Print the tables of all finished jobs. Returns the content of the last line."""
    reference = {short: losses_alone(jobs, short) for short in map(abbreviate, random_patterns())}
    if any(len(losses) < len(SEEDS) for losses in reference.values()):
        print("some random patterns are not trained yet")
        return {}
    rows = {**reference, "adadad": losses_alone(jobs, "adadad")}
    print_row("pattern", *(f"nll, seed {seed}" for seed in SEEDS), header=True)
    for short, losses in sorted(rows.items(), key=lambda item: np.mean(item[1] or [9])):
        print_row(short, *(f"{nll:.4f}" for nll in losses))
    between_seeds = kendall_tau(*zip(*reference.values(), strict=True))
    print(f"\ntau between the seeds of the reference: {between_seeds:.3f}\n")
    means = [float(np.mean(losses)) for losses in reference.values()]
    return {"tau_between_seeds": round(between_seeds, 3), "tau": report_searches(jobs, means)}


def report_searches(jobs: Jobs, means: list[float]) -> dict[str, list[float]]:
    """Print a row for each finished search; means: the reference. Returns each variant's tau at the end, by seed."""
    columns = ["search", "seed", "tau after warm-up", "tau at the end", "found", "nll of it alone"]
    print_row(*columns, "better random ones", "seconds", header=True)
    taus = {}
    for variant, seed in itertools.product(VARIANTS, SEEDS):
        result = jobs.get(f"search-{variant}-{seed}")
        if result is None:
            continue
        early = f"{kendall_tau(means, result['after_warmup']):.3f}" if result["after_warmup"] else ""
        late = kendall_tau(means, result["at_the_end"])
        taus.setdefault(variant, []).append(round(late, 3))
        losses = losses_alone(jobs, result["found"])
        nll = float(np.mean(losses)) if losses else None
        alone = [f"{nll:.4f}", sum(mean < nll for mean in means)] if losses else ["", ""]
        print_row(variant, seed, early, f"{late:.3f}", result["found"], *alone, f"{result['seconds']:.0f}")
    return taus


def print_row(*cells, header: bool = False) -> None:
    print("| " + " | ".join(map(str, cells)) + " |" + ("\n|" + "---|" * len(cells) if header else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as data.source=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/ranking"), help="folder of the results")
    parser.add_argument(
        "--only", default="*", help="jobs to do: names with wildcards, separated by commas, such as 'search-soft*'"
    )
    arguments = parser.parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    train_patterns(jobs, [*random_patterns(), interleaved(BLOCKS)], overrides)
    for seed, variant in itertools.product(SEEDS, VARIANTS):
        jobs.do(f"search-{variant}-{seed}", lambda: search(variant, seed, overrides))  # noqa: B023
    searches = [jobs.get(f"search-{variant}-{seed}") for variant in VARIANTS for seed in SEEDS]
    found = sorted({result["found"] for result in searches if result})
    train_patterns(jobs, [expand(short) for short in found], overrides)
    print(json.dumps(report(jobs)))


def train_patterns(jobs: Jobs, patterns: list[list[str]], overrides: list[str]) -> None:
    """Train each pattern alone with each seed."""
    for seed, pattern in itertools.product(SEEDS, patterns):
        jobs.do(f"alone-{network(pattern)}-{seed}", lambda: train_alone(pattern, seed, overrides))  # noqa: B023


if __name__ == "__main__":
    run_command(main)
