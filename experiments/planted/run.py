"""Check that searches find patterns that are known to be right: `python experiments/planted/run.py`.

Four corpora are made by rules that need a certain pattern. The trials of search.method=trials run ten times on each
corpus, without a budget and within the FLOPs of the known pattern. --alone instead trains every pattern to the end,
which shows that the known patterns are indeed the best. Every finished job is a JSON file in OUT and is not repeated.
The last line is JSON: {"found", "of"} for each corpus and budget; with --alone, the best pattern for each.
"""

import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import ArrayCorpus, Training, print_row
from experiments.jobs import Jobs, job_parser
from nas.core.config import Config
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.pattern import abbreviate, expand, interleaved

SEEDS, NOISE, TRAIN, VALID = range(11, 21), 0.1, 600_000, 16_000  # the settings were chosen with other seeds
REACH = 4  # the most tokens that a rule looks back


@dataclass(frozen=True)
class Planted:
    """A corpus: rule(stream, position, random source) gives the next token; one token in ten is random instead."""

    vocab_size: int
    d_ffn: int
    rule: Callable[[np.ndarray, int, np.random.Generator], int]
    needs: str
    sufficient: str  # regular expression; it matches abbreviated patterns that can compute the rule
    known: str  # the cheapest pattern that can; its FLOPs are the budget

    def stream(self, length: int, seed: int) -> np.ndarray:
        source = np.random.default_rng(seed)
        stream = source.integers(self.vocab_size, size=length)
        follows = source.random(length) >= NOISE
        for position in range(REACH, length):
            if follows[position]:
                stream[position] = self.rule(stream, position, source)
        return stream


def random_maps(size: int, count: int) -> np.ndarray:
    """Random permutations of the vocabulary [count, size]. An embedding can make one of them a linear map, which
    attention's values compute as well. It cannot do so for two at once, so two need a dense block."""
    return np.random.default_rng(99).permuted(np.tile(np.arange(size), (count, 1)), axis=1)


MAPS, PAIRS = random_maps(48, 2), np.random.default_rng(99).integers(10, size=(10, 10))


def nowhere(stream, position, source):
    """A random one of two maps of the previous token."""
    return MAPS[source.integers(2), stream[position - 1]]


def once(stream, position, source):
    """A random one of two maps of the second last token. Attention must copy it, before or after the map."""
    return MAPS[source.integers(2), stream[position - 2]]


def early(stream, position, source):
    """A function of the last two tokens. Attention must join them before a dense block can compute it."""
    return PAIRS[stream[position - 1], stream[position - 2]]


def late(stream, position, source):
    """A random one of two maps of a random one of the last four tokens. The prediction is a mixture of their maps, and
    not a map of their mixture. So a dense block must map each token before attention mixes them."""
    return MAPS[source.integers(2), stream[position - 1 - source.integers(4)]]


CORPORA = {
    "nowhere": Planted(48, 64, nowhere, "a dense", "d", "d"),
    "once": Planted(48, 64, once, "an attention", "a", "a"),
    "early": Planted(10, 32, early, "an attention, and a dense after it", "a.*d", "ad"),
    "late": Planted(48, 64, late, "an attention, and a dense before it", "d.*a", "da"),
}


@functools.cache
def make_corpus(name: str) -> ArrayCorpus:
    corpus = CORPORA[name]
    return ArrayCorpus(corpus.vocab_size, train=corpus.stream(TRAIN, 1), valid=corpus.stream(VALID, 2))


def make_config(name: str, seed: int, overrides: list[str]) -> Config:
    from nas.training.device import set_up_device

    config = load_config(
        Path(__file__).with_name("planted.yaml"), [f"model.d_ffn={CORPORA[name].d_ffn}", f"seed={seed}", *overrides]
    )
    set_up_device(seed, config.train)
    return config


def search(name: str, seed: int, overrides: list[str]) -> dict:
    """The networks that trials choose without a budget (`free`), and within that of the known pattern (`budget`).

    They are abbreviated. Both searches share the trials.
    """
    from nas.costs.flops import count_flops
    from nas.search.space import NetworkCosts, make_network, within_budget
    from nas.search.strategy import Strategy, successive_halving
    from nas.search.trials import Trials
    from nas.training.device import choose_runtime

    config, corpus, known, trainings = make_config(name, seed, overrides), make_corpus(name), {}, {}
    runtime = choose_runtime(config.train)

    class TrialsHere(Trials):
        """Trials in this process."""

        def train(self, networks, share):
            for network in networks:
                if network not in trainings:
                    trainings[network] = Training(list(network.blocks), config, corpus, runtime)
                for earlier, *_ in self.rungs:  # a training cannot go back when the other search asks for less of it
                    if earlier <= share and (network, earlier) not in known:
                        known[network, earlier] = {"valid": trainings[network].until(earlier)}
            return {network: known[network, share] for network in networks}

    sizes, table = (corpus.vocab_size, config.model.d_model), count_flops(config, corpus.counts())
    costs, result = NetworkCosts({sizes: table}, make_network(*sizes, interleaved(config.model.blocks))), {}
    least = table.cost(expand(CORPORA[name].known)) / costs.reference_cost
    for kind, budget in (("free", math.inf), ("budget", least)):
        trials = TrialsHere(config, {corpus.vocab_size: corpus}, Path(), runtime)
        affordable = filter(within_budget(table, budget * costs.reference_cost), all_networks())
        networks = [make_network(*sizes, blocks) for blocks in affordable]
        result[kind] = abbreviate(successive_halving(Strategy(trials, costs, budget, networks)).blocks)
    return result


def all_networks() -> list[tuple[str, ...]]:
    """Every network of at most three blocks."""
    return [blocks for count in (1, 2, 3) for blocks in itertools.product(("attention", "dense"), repeat=count)]


def is_right(name: str, pattern: str) -> bool:
    return bool(re.search(CORPORA[name].sufficient, pattern))


def which_fit(name: str, overrides: list[str]) -> dict[str, bool]:
    """{network: whether it is within the budget} for all networks."""
    from nas.costs.flops import count_flops
    from nas.search.space import within_budget

    costs = count_flops(make_config(name, 1, overrides), make_corpus(name).counts())
    affordable = within_budget(costs, costs.cost(expand(CORPORA[name].known)))
    return {abbreviate(blocks): affordable(blocks) for blocks in all_networks()}


def train_alone(name: str, blocks: tuple[str, ...], overrides: list[str]) -> dict:
    """Train one network to the end. Returns its nll on valid."""
    from nas.training.device import choose_runtime

    config = make_config(name, 1, overrides)
    training = Training(list(blocks), config, make_corpus(name), choose_runtime(config.train))
    return {"nll": training.end()["nll_per_token"]}


def main() -> None:
    parser = job_parser(__doc__, "runs/planted", "late-*")
    parser.add_argument("--alone", action="store_true", help="train every pattern alone, without searches")
    arguments = parser.parse_intermixed_args()
    jobs = Jobs(arguments.out, arguments.overrides, arguments.only)
    (print_alone if arguments.alone else print_searches)(jobs, arguments.overrides)


def print_searches(jobs: Jobs, overrides: list[str]) -> None:
    """Run the searches and print their patterns. `by chance`: how many random patterns would be right."""
    summary = {}
    print_row("corpus", "budget", "what is right", "found", "by chance", "the patterns", header=True)
    for name in CORPORA:
        results = [
            jobs.do(f"{name}-{seed}", lambda: search(name, seed, overrides))  # noqa: B023
            for seed in SEEDS
        ]
        results, within = [result for result in results if result], which_fit(name, overrides)
        for kind, possible in (("free", list(within)), ("budget", [pattern for pattern in within if within[pattern]])):
            found = [result[kind] for result in results]
            right = sum(is_right(name, pattern) for pattern in found)
            chance = len(found) * sum(is_right(name, pattern) for pattern in possible) / len(possible)
            summary[f"{name}-{kind}"] = {"found": right, "of": len(found)}
            budget = f"as `{CORPORA[name].known}`" if kind == "budget" else "no"
            print_row(name, budget, CORPORA[name].needs, f"{right} of {len(found)}", f"{chance:.1f}", " ".join(found))
    print(json.dumps(summary))


def print_alone(jobs: Jobs, overrides: list[str]) -> None:
    """Train every network of at most three blocks alone, and print its nll; and again those within the budget."""
    best = {}
    for name in CORPORA:
        results, within = {}, which_fit(name, overrides)
        for blocks in all_networks():
            work = lambda: train_alone(name, blocks, overrides)  # noqa: B023, E731
            if found := jobs.do(f"{name}-alone-{abbreviate(blocks)}", work):
                results[abbreviate(blocks)] = found
        print(f"\n{name}: {CORPORA[name].needs}; the budget is that of {CORPORA[name].known} (* is right)")
        cheap = {short for short, fits in within.items() if fits}
        for kind, names in (("free", set(results)), ("budget", cheap)):
            ranked = sorted(names & results.keys(), key=lambda short: results[short]["nll"])
            marked = [f"{short}{'*' if is_right(name, short) else ''} {results[short]['nll']:.3f}" for short in ranked]
            print("  ".join(marked))
            best[f"{name}-{kind}"] = ranked[0] if ranked else None
    print(json.dumps(best))


if __name__ == "__main__":
    run_command(main)
