"""Simulated searches: `python experiments/versus/simulate.py stdlib --seeds 16`, with the recorded costs of a text.

A truth is a draw of the surrogate, given all trainings of a text (trainings.csv and the grid of experiments/frontier),
from means of 0 except for the text read. So it has the form of the surrogate, which favours it. Each search sees its
losses with noise, and is judged by how far its network is behind the best one at the end of a training, of all
candidates of all searches. The searches differ in the prior of their surrogate, fitted to one or both of the texts by
prior.py. `random` is the search of run.py.
"""

import argparse
import sys
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import FRONTIER, print_row
from experiments.versus.draws import random_networks
from experiments.versus.prior import MISJUDGED, TEXTS, fitted_terms, misjudged_columns, read_points
from experiments.versus.run import BAND, RandomStrategy
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.search.network_search import COSTS
from nas.search.space import Network, NetworkCosts, first_candidates
from nas.search.strategy import Strategy, successive_halving
from nas.search.surrogate import NOISE, OWN, TERMS, Point, Surrogate, Text
from nas.search.trials import RUNGS, Trials

RECORDED = Path(__file__).with_name("recorded")
WIDER = 2  # the spread of the terms of a truth, relative to that of the surrogate's prior


class Truth:
    """A draw of the surrogate, with effects of networks and sizes, given the trainings of a text."""

    def __init__(self, points: dict[Point, bool], seed: int, terms: dict):
        """points: of read_points()."""
        networks = list(dict.fromkeys(p.network for p in points))
        generator, surrogate = np.random.default_rng(seed), Surrogate([], networks, terms=terms)
        self.seed, self.surrogate = seed, surrogate
        known = surrogate.inputs([p.network for p in points], [p.share for p in points])
        misjudged = misjudged_columns(surrogate, points)
        ends = [[p.share == 1.0] for p in points]  # decayed rates have an offset
        features, others = np.hstack([known.features, misjudged, ends]), [MISJUDGED] * misjudged.shape[1]
        mean = np.append(surrogate.mean, [0.0] * (len(others) + 1))
        spread = np.concatenate([surrogate.spread, others, [1.0]])
        effects = np.zeros((len(points), len(surrogate.keys)))
        for row, own in zip(effects, known.effects, strict=True):
            row[own] = 1
        covariance = (features * spread**2) @ features.T + OWN**2 * effects @ effects.T + NOISE**2 * np.eye(len(points))
        factors = mean + spread * generator.standard_normal(len(mean))
        own = OWN * generator.standard_normal(effects.shape[1])
        missed = np.log([p.loss for p in points]) - features @ factors - effects @ own
        missed -= NOISE * generator.standard_normal(len(points))
        weights = np.linalg.solve(covariance, missed)
        self.factors = (factors + spread**2 * (features.T @ weights))[: len(surrogate.mean)]
        self.own = [*(own + OWN**2 * (effects.T @ weights))]

    def losses(self, networks: list[Network], text: float = 1.0) -> np.ndarray:
        inputs = self.surrogate.inputs(networks, text)
        self.own += [OWN * self.draw(key) for key in list(self.surrogate.keys)[len(self.own) :]]
        return np.exp(inputs.features @ self.factors + np.array(self.own)[inputs.effects].sum(axis=1))

    def draw(self, *names) -> float:
        """A standard normal number that depends on the truth and the names alone, and not on earlier draws."""
        return np.random.default_rng([self.seed, zlib.crc32(str(names).encode())]).standard_normal()

    def trial(self, network: Network, text: float) -> float:
        """The loss after a share of a training, with noise."""
        return float(self.losses([network], text)[0] * np.exp(NOISE * self.draw(network, text)))


class SimulatedTrials(Trials):
    """Trials without trainings. loss: bits per byte of a network after a share of a training. text: as in Trials."""

    def __init__(self, config, loss: Callable[[Network, float], float], text: Text | None = None, engine=None):
        super().__init__(config, {}, Path(), None, engine)
        self.loss, self.text = loss, text or self.text
        self.steps = dict.fromkeys(config.search.vocab_size, 800_000)  # no warning about the warm-up

    def train(self, networks: list[Network], share: float) -> dict[Network, dict]:
        return {network: {"valid": {"bits_per_byte": self.loss(network, share)}} for network in networks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", choices=TEXTS, help="of the truths")
    parser.add_argument("--seeds", type=int, default=16, help="number of truths (default 16)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    arguments = parser.parse_args()
    config, costs = load_config(FRONTIER, []), NetworkCosts.read(RECORDED / arguments.text / COSTS)
    target, points = config.search.latency.target, {text: read_points(text) for text in TEXTS}
    limit = target * costs.reference_cost
    priors = {text: fitted_terms([own]) for text, own in points.items()} | {
        "both texts": fitted_terms([*points.values()])
    }
    neutral = {term: (mean if term in ("T", "TT") else 0.0, WIDER * spread) for term, (mean, spread) in TERMS.items()}
    behind = {}
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        config.seed = seed
        truth, plain = Truth(points[arguments.text], seed, neutral), first_candidates(config, costs.tables, limit)
        drawn = list(islice(random_networks(config, costs.tables, limit, BAND), RUNGS[0].networks))
        found, known = {"the best interleaved network": truth.losses(plain).min()}, {*plain, *drawn}
        for name in ("random", *priors):
            kind, networks = (RandomStrategy, drawn) if name == "random" else (Strategy, plain)
            strategy = kind(SimulatedTrials(config, truth.trial), costs, target, networks)
            strategy.terms = priors.get(name, TERMS)
            with redirect_stdout(None):
                found[name] = truth.losses([successive_halving(strategy)])[0]
            known |= {*strategy.networks}
        best = truth.losses([*known]).min()
        for name, loss in found.items():
            behind.setdefault(name, []).append(loss / best - 1)
    print_row("search, or text of its prior", "bits behind the best network", "than random", "largest", header=True)
    for name, values in behind.items():
        more = np.subtract(values, behind["random"])
        columns = [f"{np.mean(own):+.2%} ± {np.std(own, ddof=1) / len(own) ** 0.5:.2%}" for own in (values, more)]
        print_row(name, *columns, f"{max(values):.1%}")


if __name__ == "__main__":
    run_command(main)
