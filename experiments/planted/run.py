"""Corpora whose right pattern is known, and whether the search finds it: `python experiments/planted/run.py`.

Ten seeds of a search on each of four corpora, without a price on cost and with one. `--alone` trains all patterns
alone instead, to show that what is known is so. Every finished job is a JSON file in OUT and is not repeated. The last
line is JSON: for each corpus, and whether with a price, {"found", "of"}.
"""

import argparse
import itertools
import json
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
REACH = 4  # no rule looks further back
PRICED = "search.latency.source=flops"


@dataclass(frozen=True)
class Planted:
    """A kind of corpus: rule(stream, place, random source) gives the next token, noise in one of ten draws it anew."""

    vocab_size: int
    d_ffn: int
    rule: Callable[[np.ndarray, int, np.random.Generator], int]
    needs: str
    has: Callable[[str], bool]  # what it needs, of an abbreviated pattern
    attentions: int  # how many pay where there is a price; without one, more do no harm

    def stream(self, length: int, seed: int) -> np.ndarray:
        source = np.random.default_rng(seed)
        stream = source.integers(self.vocab_size, size=length)
        follows = source.random(length) >= NOISE
        for place in range(REACH, length):
            if follows[place]:
                stream[place] = self.rule(stream, place, source)
        return stream


def maps(size: int, count: int) -> np.ndarray:
    """Random permutations of the vocabulary [count, size]. Of one, an embedding could be found that makes it a linear
    map, which attention's values compute as well; of two in turn it cannot, so they need a dense block."""
    return np.random.default_rng(99).permuted(np.tile(np.arange(size), (count, 1)), axis=1)


MAPS, PAIRS = maps(48, 2), np.random.default_rng(99).integers(10, size=(10, 10))


def nowhere(stream, place, source):
    """One of two maps, by chance, of the token before."""
    return MAPS[source.integers(2), stream[place - 1]]


def once(stream, place, source):
    """The same of the token before the last: it must be fetched, and mapped before or after."""
    return MAPS[source.integers(2), stream[place - 2]]


def early(stream, place, source):
    """Decided by the last two tokens together: they must be brought together before they can be mapped."""
    return PAIRS[stream[place - 1], stream[place - 2]]


def late(stream, place, source):
    """One of two maps of one of the last four tokens, by chance: what is wanted is the mixture of their maps, which no
    map of their mixture gives, so each must be mapped before they are brought together."""
    return MAPS[source.integers(2), stream[place - 1 - source.integers(4)]]


def has_dense(pattern: str) -> bool:
    return "d" in pattern


def has_attention(pattern: str) -> bool:
    return "a" in pattern


def dense_after_attention(pattern: str) -> bool:
    return "a" in pattern and "d" in pattern[pattern.find("a") :]


def dense_before_attention(pattern: str) -> bool:
    return "d" in pattern and "a" in pattern[pattern.find("d") :]


CORPORA = {
    "nowhere": Planted(48, 64, nowhere, "a dense", has_dense, attentions=0),
    "once": Planted(48, 64, once, "an attention", has_attention, attentions=1),
    "early": Planted(10, 32, early, "an attention, and a dense after it", dense_after_attention, attentions=1),
    "late": Planted(48, 64, late, "an attention, and a dense before it", dense_before_attention, attentions=1),
}


class MadeCorpus:
    """What a phase needs of a corpus, from tokens made here."""

    def __init__(self, kind: Planted):
        self.vocab_size, self.splits = kind.vocab_size, {"train": kind.stream(TRAIN, 1), "valid": kind.stream(VALID, 2)}

    def tokens(self, split: str) -> np.ndarray:
        return self.splits["train" if split == "train" else "valid"]

    def counts(self) -> np.ndarray:
        return np.bincount(self.splits["train"], minlength=self.vocab_size)


def configured(name: str, seed: int, overrides: list[str]) -> Config:
    from nas.training.device import set_up

    config = load_config(FOLDER / "planted.yaml", [f"model.d_ffn={CORPORA[name].d_ffn}", f"seed={seed}", *overrides])
    set_up(seed, config.train)
    return config


def found_by_search(name: str, seed: int, overrides: list[str]) -> dict:
    """The likeliest pattern at the end of a search, abbreviated, and pi."""
    from nas.search.phase import Search
    from nas.search.supernet import build_supernet

    config, corpus = configured(name, seed, overrides), MadeCorpus(CORPORA[name])
    phase = Search(build_supernet(config, corpus), corpus, config)
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
    names = phase.supernet.names(phase.supernet.argmax_path())
    return {"found": abbreviate(names), "pi": phase.supernet.pi().tolist()}


def is_right(name: str, pattern: str, priced: bool) -> bool:
    about = CORPORA[name]
    return about.has(pattern) and (not priced or pattern.count("a") == about.attentions)


def trained_alone(name: str, pattern: tuple[str, ...], overrides: list[str]) -> dict:
    """nll on valid of one pattern, trained for as long as the search trains, and its cost ratio."""
    from nas.costs.flops import count_flops
    from nas.retraining.phase import Retraining
    from nas.training.build import build_fixed
    from nas.training.evaluation import count_looking_back, total_nll

    config, corpus = configured(name, 1, overrides), MadeCorpus(CORPORA[name])
    phase = Retraining(build_fixed(list(pattern), config, corpus), corpus, config)
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
    looking_back = count_looking_back(phase.model.blocks)
    total, counted = total_nll(
        phase.model, corpus.tokens("valid"), 16, 16, 16, looking_back, device=phase.context.device
    )
    return {"nll": total / counted, "ratio": count_flops(config, corpus.counts()).ratio(list(pattern))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, default=Path("runs/planted"), help="folder of the results")
    parser.add_argument("--corpus", choices=[*CORPORA], nargs="+", default=[*CORPORA], help="only these")
    parser.add_argument("--alone", action="store_true", help="train every pattern alone instead")
    arguments = parser.parse_intermixed_args()
    jobs = Jobs(arguments.out, arguments.overrides)
    if arguments.alone:
        print_alone(jobs, arguments)
    else:
        print_searches(jobs, arguments)


def print_searches(jobs: Jobs, arguments: argparse.Namespace) -> None:
    """What the searches found; `by chance` is how many of ten patterns drawn at random would be right."""
    summary, all_patterns = {}, ["".join(letters) for letters in itertools.product("adi", repeat=3)]
    print("| corpus | price | what is right | found | by chance | the ten patterns |\n|---|---|---|---|---|---|")
    for name, priced in itertools.product(arguments.corpus, (False, True)):
        overrides = [*([PRICED] if priced else []), *arguments.overrides]
        label = f"{name}-{'priced' if priced else 'free'}"
        results = [
            jobs.do(f"{label}-{seed}", lambda: found_by_search(name, seed, overrides))  # noqa: B023
            for seed in range(1, SEEDS + 1)
        ]
        found = [result["found"] for result in results]
        right = sum(is_right(name, pattern, priced) for pattern in found)
        chance = SEEDS * sum(is_right(name, pattern, priced) for pattern in all_patterns) / len(all_patterns)
        summary[label] = {"found": right, "of": SEEDS}
        answer = CORPORA[name].needs + (f"; attentions: {CORPORA[name].attentions}" if priced else "")
        cells = [name, "yes" if priced else "no", answer, f"{right} of {SEEDS}", f"{chance:.1f}", " ".join(found)]
        print("| " + " | ".join(cells) + " |", flush=True)
    print(json.dumps(summary))


def print_alone(jobs: Jobs, arguments: argparse.Namespace) -> None:
    """Every network of three blocks, trained alone: its nll, and with the price; the right ones are marked."""
    weight = load_config(FOLDER / "planted.yaml", arguments.overrides).search.latency.weight
    best = {}
    for name in arguments.corpus:
        results = {}
        for pattern in itertools.product(("attention", "dense", "identity"), repeat=3):
            short = network(pattern)
            if short not in results:
                work = lambda: trained_alone(name, pattern, arguments.overrides)  # noqa: B023, E731
                results[short] = jobs.do(f"{name}-alone-{short}", work)
        print(f"\n{name}: {CORPORA[name].needs}; with a price, attentions: {CORPORA[name].attentions} (* is right)")
        for priced in (False, True):
            values = {short: about["nll"] + priced * weight * about["ratio"] for short, about in results.items()}
            marks = {short: "*" if is_right(name, short, priced) else "" for short in values}
            ranked = sorted(values, key=values.get)
            print("  ".join(f"{short}{marks[short]} {values[short]:.3f}" for short in ranked))
            best[f"{name}-{'priced' if priced else 'free'}"] = ranked[0]
    print(json.dumps(best))


if __name__ == "__main__":
    run_command(main)
