"""Does a SuperNet rank patterns as training them alone does? `python experiments/ranking/run.py --out runs/ranking`.

Random patterns are trained alone on a small budget, which is the truth, and evaluated with the weights of SuperNets
that were searched with different settings; Kendall's tau says how far the two orders agree. What each search found is
trained alone too. Every finished job is a JSON file in OUT and is not repeated; several processes may share OUT, each
with its own --only. The last line is JSON.
"""

import argparse
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
JUDGED_TOKENS = 65_536  # of valid, the first
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
}  # each on ranking.yaml, whose warm-up is a quarter of the steps


def random_patterns(blocks: int = BLOCKS, count: int = PATTERNS, seed: int = 0) -> list[list[str]]:
    """Different networks, every operation of every block equally likely."""
    source, found = np.random.default_rng(seed), {}
    while len(found) < count:
        pattern = [CANDIDATES[index] for index in source.integers(len(CANDIDATES), size=blocks)]
        found.setdefault(network(pattern), pattern)
    return list(found.values())


def kendall_tau(one: list[float], two: list[float]) -> float:
    """Kendall's tau: of all pairs, the share in the same order minus the share in the other order (tau-a)."""
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    return sum(float(np.sign((one[i] - one[j]) * (two[i] - two[j]))) for i, j in pairs) / len(pairs)


def prepared(overrides: list[str]) -> tuple[Config, object]:
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.training.device import set_up

    config = load_config(FOLDER / "ranking.yaml", overrides)
    set_up(config.seed, config.train)
    return config, Corpus(prepare(config.data))


def judge(model, operations, config: Config, corpus) -> float:
    """nll per token on the beginning of valid."""
    from nas.training.device import device_context
    from nas.training.evaluation import count_looking_back, total_nll

    tokens, train = corpus.tokens("valid")[: JUDGED_TOKENS + 1], config.train
    looking_back, device = count_looking_back(operations), device_context(train).device
    total, counted = total_nll(model, tokens, 16, train.segment, train.memory, looking_back, device=device)
    return total / counted


def train_alone(pattern: list[str], seed: int, overrides: list[str]) -> dict:
    """One pattern from scratch."""
    from nas.retraining.phase import Retraining
    from nas.training.build import build_fixed

    config, corpus = prepared([*overrides, f"train.steps={ALONE_STEPS}", f"seed={seed}"])
    phase = Retraining(build_fixed(pattern, config, corpus), corpus, config)
    started = time.perf_counter()
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
    seconds = time.perf_counter() - started
    nll = judge(phase.model, phase.model.blocks, config, corpus)
    return {"pattern": abbreviate(pattern), "nll": nll, "seconds": seconds}


def search(variant: str, seed: int, overrides: list[str]) -> dict:
    """One search; its weights judge the random patterns when the warm-up is over, and at the end."""
    from nas.search.phase import Search
    from nas.search.supernet import build_supernet

    config, corpus = prepared([*overrides, f"seed={seed}", *VARIANTS[variant]])
    phase = Search(build_supernet(config, corpus), corpus, config)
    net, seconds, judged = phase.supernet, 0.0, {}
    for step in range(1, phase.total_steps + 1):
        started = time.perf_counter()
        phase.step(step)
        seconds += time.perf_counter() - started
        if step in (phase.warmup_steps, phase.total_steps):
            judged[step] = []
            for pattern in random_patterns():
                path = [net.operations.index(name) for name in pattern]
                net.set_path(path)
                judged[step].append(judge(net, net.operations_on(path), config, corpus))
    path = net.argmax_path()
    net.set_path(path)
    return {
        "variant": variant,
        "found": abbreviate(net.names(path)),
        "pi": net.pi().tolist(),
        "nll_of_found": judge(net, net.operations_on(path), config, corpus),
        "after_warmup": judged.get(phase.warmup_steps),
        "at_the_end": judged[phase.total_steps],
        "seconds": seconds,
    }


def report(jobs: Jobs) -> dict:
    """Print the tables of what is there; returns what the last line holds."""

    def alone(short: str) -> list[float]:
        results = [jobs.get(f"alone-{network(expand(short))}-{seed}") for seed in SEEDS]
        return [result["nll"] for result in results if result]

    truth = {short: alone(short) for short in map(abbreviate, random_patterns())}
    if any(len(nlls) < len(SEEDS) for nlls in truth.values()):
        print("the random patterns are not all trained yet")
        return {}
    print("| pattern | " + " | ".join(f"nll, seed {seed}" for seed in SEEDS) + " |\n|---|" + "---|" * len(SEEDS))
    for short, nlls in sorted({**truth, "adadad": alone("adadad")}.items(), key=lambda item: np.mean(item[1] or [9])):
        print(f"| {short} | " + " | ".join(f"{nll:.4f}" for nll in nlls) + " |")
    means = [float(np.mean(nlls)) for nlls in truth.values()]
    ceiling = kendall_tau(*zip(*truth.values(), strict=True))
    print(f"\ntau between the seeds of the truth: {ceiling:.3f}\n")
    print(
        "| search | seed | tau after warm-up | tau at the end | found | its nll alone | better random ones | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    taus = {}
    for variant in VARIANTS:
        for seed in SEEDS:
            result = jobs.get(f"search-{variant}-{seed}")
            if result is None:
                continue
            early = kendall_tau(means, result["after_warmup"]) if result["after_warmup"] else None
            late = kendall_tau(means, result["at_the_end"])
            taus.setdefault(variant, []).append(round(late, 3))
            own = alone(result["found"])
            cells = [variant, str(seed), "" if early is None else f"{early:.3f}", f"{late:.3f}", result["found"]]
            cells += [f"{np.mean(own):.4f}", str(sum(mean < np.mean(own) for mean in means))] if own else ["", ""]
            print("| " + " | ".join([*cells, f"{result['seconds']:.0f}"]) + " |")
    return {"tau_between_seeds": round(ceiling, 3), "tau": taus}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as data.source=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/ranking"), help="folder of the results")
    parser.add_argument("--only", default="*", help="names of jobs with wildcards and commas, such as 'search-soft*'")
    arguments = parser.parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    for seed in SEEDS:
        for pattern in [*random_patterns(), interleaved(BLOCKS)]:
            jobs.do(f"alone-{network(pattern)}-{seed}", lambda: train_alone(pattern, seed, overrides))  # noqa: B023
    for seed in SEEDS:
        for variant in VARIANTS:
            jobs.do(f"search-{variant}-{seed}", lambda: search(variant, seed, overrides))  # noqa: B023
    found = {result["found"] for v in VARIANTS for seed in SEEDS if (result := jobs.get(f"search-{v}-{seed}"))}
    for short in sorted(found):
        for seed in SEEDS:
            jobs.do(f"alone-{network(expand(short))}-{seed}", lambda: train_alone(expand(short), seed, overrides))  # noqa: B023
    print(json.dumps(report(jobs)))


if __name__ == "__main__":
    run_command(main)
