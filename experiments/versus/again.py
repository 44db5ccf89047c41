"""Simulated searches on a text that is read again: `python experiments/versus/again.py --passes 1.5,2.75,5,9`.

The losses are those of the grids of experiments/frontier, with noise. Each pass after the first multiplies them, by a
factor that depends on the vocabulary (OVERFITTING). `once` is a search that does not know that the text is read again.
`again` knows the number of passes. A cell tells how far the found network is behind the best one, in bits per byte at
the end.

The first line is the factor of WR, the surrogate's term for overfitting, given trials with model.dropout=auto.
"""

import argparse
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import FRONTIER, grid_network, print_row, read_table
from experiments.versus.prior import AGAIN_TEXT, GRIDS, read_grid, read_trials
from experiments.versus.run import GivenStrategy
from experiments.versus.simulate import SimulatedTrials
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.search.space import Network
from nas.search.strategy import successive_halving
from nas.search.surrogate import AGAIN, NOISE, TERMS, Surrogate, Text
from nas.search.trials import RUNGS

CASES = ("stdlib", 8.8e6, 0.65), ("wikitext2", 10.9e6, 0.65), ("wikitext2", 10.9e6, 1.0)  # bytes, and the budget
AGAIN_READ = Text(2.88, 10_900_000)  # what the trials of AGAIN_TEXT are parts of
OVERFITTING = {  # the logarithm of the factor of a pass, for a number of pieces
    "none": lambda pieces: 0.0,
    "0.03 per 30,000 pieces": lambda pieces: 0.03 * pieces / 30_000,
    "0.065 per 30,000 pieces": lambda pieces: 0.065 * pieces / 30_000,
    "0.06 ln(pieces / 16,000)": lambda pieces: 0.06 * max(0.0, np.log(pieces / 16_000)),
    "0.04 ln(pieces / 8,000)": lambda pieces: 0.04 * max(0.0, np.log(pieces / 8000)),
    "0.05 ln(pieces / 2,000)": lambda pieces: 0.05 * np.log(pieces / 2000),
}


@cache
def read_losses(text: str) -> tuple[dict[Network, float], dict[tuple[Network, float], float]]:
    """{network: its time, relative to the reference} and {(network, share of a training): bits per byte}.

    Leaves out networks whose first parts of a training were not recorded.
    """
    losses = {(point.network, point.share): point.loss for point in read_grid(text)}
    times = {grid_network(row): float(row["time_per_byte"]) for row in read_table(GRIDS / f"{text}.csv")}
    return {network: time for network, time in times.items() if (network, RUNGS[0].share) in losses}, losses


def behind(case: tuple[str, float, float], factor, passes: float, knows: bool, config) -> float:
    """How far the found network is behind the best one. knows: whether the search knows that the text is read again."""
    text, size, budget = case
    times, losses = read_losses(text)
    networks = [network for network, time in times.items() if time <= budget]
    truth = {
        (network, share): loss * np.exp(factor(network.vocab_size) * max(0.0, passes * share - 1))
        for (network, share), loss in losses.items()
    }
    generator = np.random.default_rng(config.seed)

    def loss(network: Network, share: float) -> float:
        return truth[network, share] * np.exp(NOISE * generator.normal())

    trials = SimulatedTrials(config, loss, Text(passes if knows else 1.0, size))
    costs = SimpleNamespace(cost=times.__getitem__)
    with redirect_stdout(None):
        best = successive_halving(GivenStrategy(trials, costs, budget, networks))
    return truth[best, 1.0] / min(truth[network, 1.0] for network in networks) - 1


def measured_overfitting() -> tuple[float, float]:
    """The mean and standard error of the factor of WR, given trials of a text that is read again."""
    points = list(dict.fromkeys(point for point, _ in read_trials(AGAIN_TEXT)))
    surrogate = Surrogate(points, list(dict.fromkeys(point.network for point in points)), text=AGAIN_READ)
    index = [*TERMS, *AGAIN].index("WR")
    gain = surrogate.spread[index] ** 2 * surrogate.known.features[:, index]
    missed = surrogate.logs - surrogate.known.features @ surrogate.mean
    mean = surrogate.mean[index] + gain @ surrogate.solve(missed)
    return mean, np.sqrt(surrogate.spread[index] ** 2 - gain @ surrogate.solve(gain))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", default="1.5,2.75,5,9", help="separated by commas (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=12, help="of noise and draws (default: %(default)s)")
    arguments = parser.parse_args()
    config = load_config(FRONTIER, [])
    print("WR given trials with model.dropout=auto: {:.4f} ± {:.4f}".format(*measured_overfitting()))
    passes = [float(text) for text in arguments.passes.split(",")]
    heads = [f"{count:g} passes: once, again" for count in passes]
    print_row("a pass multiplies the loss by e to", *heads, header=True)
    for name, factor in OVERFITTING.items():
        columns = []
        for count in passes:
            searches = list(product(range(arguments.seeds), CASES))
            means = [
                np.mean([behind(case, factor, count, knows, replace(config, seed=seed)) for seed, case in searches])
                for knows in (False, True)
            ]
            columns.append(", ".join(f"{mean:.1%}" for mean in means))
        print_row(name, *columns)


if __name__ == "__main__":
    run_command(main)
