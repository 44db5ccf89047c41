"""Check that searches find patterns that are known to be right: `python experiments/planted/run.py`.

Four corpora are made by rules that need a certain pattern. Ten seeds of a search run on each corpus, without and with a
penalty on FLOPs. --alone instead trains every pattern alone, which shows that the known patterns are indeed the best.
Every finished job is a JSON file in OUT and is not repeated. The last line is JSON: {"found", "of"} for each corpus and
penalty; with --alone, the best pattern for each.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))

from experiments.jobs import Jobs  # noqa: E402
from nas.core.config import Config  # noqa: E402
from nas.core.config_loading import load_config  # noqa: E402
from nas.core.errors import run_command  # noqa: E402
from nas.core.pattern import abbreviate, network  # noqa: E402

SEEDS, NOISE, TRAIN, VALID = 10, 0.1, 120_000, 4_000
REACH = 4  # the most tokens that a rule looks back
PENALTY = "search.latency.source=flops"


@dataclass(frozen=True)
class Planted:
    """A corpus: rule(stream, position, random source) gives the next token; one token in ten is random instead."""

    vocab_size: int
    d_ffn: int
    rule: Callable[[np.ndarray, int, np.random.Generator], int]
    needs: str
    sufficient: str  # regular expression; it matches abbreviated patterns that can compute the rule
    attentions: int  # the right number of attention blocks with a penalty; without a penalty, more are right too

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
    "nowhere": Planted(48, 64, nowhere, "a dense", "d", attentions=0),
    "once": Planted(48, 64, once, "an attention", "a", attentions=1),
    "early": Planted(10, 32, early, "an attention, and a dense after it", "a.*d", attentions=1),
    "late": Planted(48, 64, late, "an attention, and a dense before it", "d.*a", attentions=1),
}


class PlantedCorpus:
    """The interface that a phase needs of a corpus."""

    def __init__(self, planted: Planted):
        self.vocab_size = planted.vocab_size
        self.splits = {"train": planted.stream(TRAIN, 1), "valid": planted.stream(VALID, 2)}

    def tokens(self, split: str) -> np.ndarray:
        return self.splits["train" if split == "train" else "valid"]

    def counts(self) -> np.ndarray:
        return np.bincount(self.splits["train"], minlength=self.vocab_size)


def make_config(name: str, seed: int, overrides: list[str]) -> Config:
    from nas.training.device import set_up_device

    config = load_config(FOLDER / "planted.yaml", [f"model.d_ffn={CORPORA[name].d_ffn}", f"seed={seed}", *overrides])
    set_up_device(seed, config.train)
    return config


def search(name: str, seed: int, overrides: list[str]) -> dict:
    """Run a search. Returns its most probable pattern, abbreviated, and pi."""
    from nas.search.phase import SearchPhase
    from nas.search.supernet import build_supernet
    from nas.training.device import device_context

    config, corpus = make_config(name, seed, overrides), PlantedCorpus(CORPORA[name])
    phase = SearchPhase(build_supernet(config, corpus), corpus, config, device_context(config.train))
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
    names = phase.supernet.names(phase.supernet.argmax_path())
    return {"found": abbreviate(names), "pi": phase.supernet.pi().tolist()}


def is_right(name: str, pattern: str, penalty: bool) -> bool:
    planted = CORPORA[name]
    return bool(re.search(planted.sufficient, pattern)) and (not penalty or pattern.count("a") == planted.attentions)


def train_alone(name: str, pattern: tuple[str, ...], overrides: list[str]) -> dict:
    """Train one pattern for as many steps as the search. Returns its nll on valid and its FLOPs ratio."""
    from nas.costs.flops import count_flops
    from nas.retraining.phase import train_pattern
    from nas.training.device import device_context
    from nas.training.evaluation import count_memory_blocks, total_nll

    config, corpus = make_config(name, 1, overrides), PlantedCorpus(CORPORA[name])
    context = device_context(config.train)
    model = train_pattern(list(pattern), config, corpus, context)
    memory_blocks = count_memory_blocks(model.blocks)
    total, counted = total_nll(model, corpus.tokens("valid"), 16, 16, 16, memory_blocks, device=context.device)
    return {"nll": total / counted, "ratio": count_flops(config, corpus.counts()).ratio(list(pattern))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, default=Path("runs/planted"), help="folder of the results")
    parser.add_argument(
        "--corpus", choices=[*CORPORA], nargs="+", default=[*CORPORA], help="corpora to use (default: all)"
    )
    parser.add_argument("--alone", action="store_true", help="train every pattern alone, without searches")
    arguments = parser.parse_intermixed_args()
    jobs = Jobs(arguments.out, arguments.overrides)
    if arguments.alone:
        print_alone(jobs, arguments)
    else:
        print_searches(jobs, arguments)


def print_searches(jobs: Jobs, arguments: argparse.Namespace) -> None:
    """Run the searches and print their patterns. `by chance`: how many of ten random patterns would be right."""
    summary, all_patterns = {}, ["".join(letters) for letters in itertools.product("adi", repeat=3)]
    print("| corpus | penalty | what is right | found | by chance | the ten patterns |\n|---|---|---|---|---|---|")
    for name, penalty in itertools.product(arguments.corpus, (False, True)):
        overrides = [*([PENALTY] if penalty else []), *arguments.overrides]
        label = f"{name}-{'priced' if penalty else 'free'}"
        results = [
            jobs.do(f"{label}-{seed}", lambda: search(name, seed, overrides))  # noqa: B023
            for seed in range(1, SEEDS + 1)
        ]
        found = [result["found"] for result in results]
        right = sum(is_right(name, pattern, penalty) for pattern in found)
        chance = SEEDS * sum(is_right(name, pattern, penalty) for pattern in all_patterns) / len(all_patterns)
        summary[label] = {"found": right, "of": SEEDS}
        answer = CORPORA[name].needs + (f"; attentions: {CORPORA[name].attentions}" if penalty else "")
        cells = [name, "yes" if penalty else "no", answer, f"{right} of {SEEDS}", f"{chance:.1f}", " ".join(found)]
        print("| " + " | ".join(cells) + " |", flush=True)
    print(json.dumps(summary))


def print_alone(jobs: Jobs, arguments: argparse.Namespace) -> None:
    """Train every network of three blocks alone, and print its nll, without and with the penalty."""
    weight = load_config(FOLDER / "planted.yaml", arguments.overrides).search.latency.weight
    best = {}
    for name in arguments.corpus:
        results = {}
        for pattern in itertools.product(("attention", "dense", "identity"), repeat=3):
            short = network(pattern)
            if short not in results:
                work = lambda: train_alone(name, pattern, arguments.overrides)  # noqa: B023, E731
                results[short] = jobs.do(f"{name}-alone-{short}", work)
        print(f"\n{name}: {CORPORA[name].needs}; with a penalty, attentions: {CORPORA[name].attentions} (* is right)")
        for penalty in (False, True):
            values = {short: result["nll"] + penalty * weight * result["ratio"] for short, result in results.items()}
            marks = {short: "*" if is_right(name, short, penalty) else "" for short in values}
            ranked = sorted(values, key=values.get)
            print("  ".join(f"{short}{marks[short]} {values[short]:.3f}" for short in ranked))
            best[f"{name}-{'priced' if penalty else 'free'}"] = ranked[0]
    print(json.dumps(best))


if __name__ == "__main__":
    run_command(main)
