"""Searches on simulated losses: `python experiments/prior/simulate.py python --seeds 40`.

A truth is a draw of the surrogate, given all losses of a text, from means of 0 except for the text read. So it has the
form of the surrogate, which favours it. Each search sees its losses with noise, and is judged by how far its network is
behind the best one at the end of a training, of all candidates of all searches. The searches differ in the texts that
their prior was fitted to. `random` are random networks with the same rungs, and `interleaved` is the best interleaved
network, which knows the truth. costs.yaml has the measured costs; the budget is 0.65 of the reference.
"""

import argparse
import sys
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import FRONTIER, print_row
from experiments.prior.draws import random_networks
from experiments.prior.fit import BETWEEN, MISJUDGED, TERMS, misjudged_columns, prior_of, read_points
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.search.space import Network, NetworkCosts, first_candidates
from nas.search.strategy import Strategy, successive_halving
from nas.search.surrogate import NOISE, OWN, Point, Surrogate, Text
from nas.search.trials import RUNGS, Trials

COSTS = Path(__file__).with_name("costs.yaml")
WIDER = 2  # the spread of the terms of a truth, relative to that of the surrogate's prior
TARGET, BAND = 0.65, 0.95  # the budget; least cost of a random network, as a share of it
OPERATIONS = "search.operations=[attention,dense,dense 8x,identity]"  # those of the losses


class Truth:
    """A draw of the surrogate, with effects of networks and sizes, given the losses of a text."""

    def __init__(self, points: dict[Point, bool], seed: int):
        """points: of read_points()."""
        terms = {term: (TERMS[term][0] if term in ("T", "TT") else 0, WIDER * own) for term, own in BETWEEN.items()}
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
    """Trials without trainings. loss: bits per byte of a network after a share of a training."""

    def __init__(self, config, loss: Callable[[Network, float], float], sizes: set[int]):
        super().__init__(config, {}, Path(), None)
        self.loss, self.text, self.steps = loss, Text(), dict.fromkeys(sizes, 800_000)  # no warning about the warm-up

    def train(self, networks: list[Network], share: float) -> dict[Network, dict]:
        return {network: {"valid": {"bits_per_byte": self.loss(network, share)}} for network in networks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", choices=(points := read_points()), help="of the truths")
    parser.add_argument("--seeds", type=int, default=16, help="number of truths (default: %(default)s)")
    arguments = parser.parse_args()
    config, costs = load_config(FRONTIER, [OPERATIONS]), NetworkCosts.read(COSTS)
    limit, sizes = TARGET * costs.reference_cost, {shape[0] for shape in costs.tables}
    others = {name: own for name, own in points.items() if name != arguments.text}
    priors = {f"{name} alone": prior_of([own]) for name, own in others.items()}
    priors[f"all but {arguments.text}"] = prior_of([*others.values()])
    priors["means of 0"] = {term: TERMS[term] if term in ("", "T") else (0, own) for term, own in BETWEEN.items()}
    behind: dict[str, list] = {}
    for seed in range(arguments.seeds):
        config.seed = seed
        truth, plain = Truth(points[arguments.text], seed), first_candidates(config, costs.tables, limit)
        drawn = list(islice(random_networks(config, costs.tables, limit, BAND), RUNGS[0].networks))
        losses, known = {"interleaved": truth.losses(plain).min()}, {*plain, *drawn}
        for share, count in zip(
            (rung.share for rung in RUNGS), (*(rung.networks for rung in RUNGS[1:]), 1), strict=True
        ):
            drawn = sorted(drawn, key=partial(truth.trial, text=share))[:count]  # the lowest losses go on
        losses["random"] = truth.losses(drawn)[0]
        for name, terms in priors.items():
            strategy = Strategy(SimulatedTrials(config, truth.trial, sizes), costs, TARGET, plain)
            strategy.terms = terms
            with redirect_stdout(None):
                losses[name] = truth.losses([successive_halving(strategy)])[0]
            known |= {*strategy.networks}
        best = truth.losses([*known]).min()
        for name, loss in losses.items():
            behind.setdefault(name, []).append(loss / best - 1)
    print_row("texts of the prior", "bits behind the best network", header=True)
    for name, values in behind.items():
        print_row(name, f"{np.mean(values):.2%} ± {np.std(values, ddof=1) / len(values) ** 0.5:.2%}")


if __name__ == "__main__":
    run_command(main)
