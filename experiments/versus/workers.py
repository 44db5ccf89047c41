"""Simulated searches with many workers: `python experiments/versus/workers.py wikitext2 --seeds 200`.

The truths are those of simulate.py. A trial takes the share of a training that it adds, times the cost of its network
relative to the reference, times a factor that varies (normal in the logarithm, by --varies), and 0.01 of a training to
start. One in 20 dies, and goes on from its checkpoint after 0.02 of a training. `waiting` is the search, with its
batches of search.batch networks. `asynchronous` has rungs without batches, as ASHA (arXiv 1810.05934): a free worker
goes on with the predicted best network of a rung, if it is among the first of those that have finished there, in the
proportion of the rungs, or else begins a new one. Both have the same surrogate.
"""

import argparse
import heapq
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import FRONTIER, print_row
from experiments.versus.prior import TEXTS, fitted_terms, read_points
from experiments.versus.simulate import RECORDED, WIDER, SimulatedTrials, Truth
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.search.network_search import COSTS
from nas.search.space import Network, NetworkCosts, first_candidates
from nas.search.strategy import Strategy, successive_halving
from nas.search.surrogate import TERMS, Point

START, AGAIN = 0.01, 0.02  # of a training
ONE_IN_20 = 1.645  # normal numbers that are larger


class TimedTrials(SimulatedTrials):
    """Trials on a clock. time: trainings of the reference, one after another."""

    def __init__(self, config, truth: Truth, costs: NetworkCosts, workers: int, varies: float):
        super().__init__(config, truth.trial, engine=SimpleNamespace(places=[None] * workers))
        self.truth, self.costs, self.workers, self.varies = truth, costs, workers, varies
        self.time, self.reached = 0.0, {}

    def seconds(self, network: Network, share: float) -> float:
        varies = np.exp(self.varies * self.truth.draw("speed", network, share))
        seconds = (share - self.reached.get(network, 0.0)) * self.costs.ratio(network) * varies + START
        dies = self.truth.draw("dies", network, share) > ONE_IN_20
        self.reached[network] = share
        return seconds + dies * AGAIN

    def train(self, networks: list[Network], share: float) -> dict[Network, dict]:
        free = [self.time] * self.workers
        for network in networks:
            heapq.heapreplace(free, free[0] + self.seconds(network, share))
        self.time = max(free)
        return super().train(networks, share)


def asynchronous_halving(strategy: Strategy) -> Network:
    """The network that is chosen without batches."""
    trials, rungs, running = strategy.trials, strategy.trials.rungs, []
    promoted: list[set] = [set() for _ in rungs]

    def promotable() -> tuple[Network, int] | None:
        for index in reversed(range(len(rungs) - 1)):
            done = trials.finished(rungs[index])
            most = len(done) * rungs[index + 1].networks // rungs[index].networks
            best = [done[place] for place in np.argsort(strategy.fit().predict(done))[:most]] if most else []
            if new := [network for network in best if network not in promoted[index]]:
                promoted[index].add(new[0])
                return new[0], index + 1
        return None

    while True:
        while len(running) < trials.workers:
            chosen = promotable()
            if not chosen and len(trials.tried) < rungs[0].networks:
                chosen = strategy.propose(1)[0], 0
                trials.tried.add(chosen[0])
            if not chosen:
                break
            network, index = chosen
            heapq.heappush(running, (trials.time + trials.seconds(network, rungs[index].share), str(network), chosen))
        if not running:
            return strategy.choose(trials.finished(rungs[-1]) or trials.finished(rungs[-2]))
        trials.time, _, (network, index) = heapq.heappop(running)
        trials.points.append(Point(network, rungs[index].share, trials.loss(network, rungs[index].share)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", choices=TEXTS, help="of the truths")
    parser.add_argument("--seeds", type=int, default=200, help="number of truths (default 200)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--varies", type=float, default=0.3, help="of the speeds of trials (default 0.3)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    costs = NetworkCosts.read(RECORDED / arguments.text / COSTS)
    points = {text: read_points(text) for text in TEXTS}
    terms = fitted_terms([*points.values()])
    neutral = {term: (mean if term in ("T", "TT") else 0.0, WIDER * spread) for term, (mean, spread) in TERMS.items()}
    kinds = {"waiting": successive_halving, "asynchronous": asynchronous_halving}
    losses, times, trainings = {}, {}, {}
    for seed in range(arguments.seeds):
        config = load_config(FRONTIER, [*arguments.overrides, f"seed={seed}"])
        target = config.search.latency.target
        truth = Truth(points[arguments.text], seed, neutral)
        plain, found, known = first_candidates(config, costs.tables, target * costs.reference_cost), {}, set()
        for workers in arguments.workers:
            for name, halving in kinds.items():
                trials = TimedTrials(config, truth, costs, workers, arguments.varies)
                strategy = Strategy(trials, costs, target, plain)
                strategy.terms = terms
                with redirect_stdout(None):
                    found[name, workers] = truth.losses([halving(strategy)])[0]
                times.setdefault((name, workers), []).append(trials.time)
                trainings.setdefault((name, workers), []).append(sum(trials.reached.values()))
                known |= {*strategy.networks}
        best = truth.losses([*known]).min()
        for key, loss in found.items():
            losses.setdefault(key, []).append(loss / best - 1)
    first = "waiting", arguments.workers[0]
    print_row("search, workers", "bits behind the best", "than the first", "time", "trainings", header=True)
    for key, values in losses.items():
        more = np.subtract(values, losses[first])
        columns = [f"{np.mean(own):+.2%} ± {np.std(own, ddof=1) / len(own) ** 0.5:.2%}" for own in (values, more)]
        ratio = np.mean(times[key]) / np.mean(times[first])
        print_row(f"{key[0]}, {key[1]}", *columns, f"{ratio:.3f}", f"{np.mean(trainings[key]):.2f}")


if __name__ == "__main__":
    run_command(main)
