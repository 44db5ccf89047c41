"""Successive halving among networks, led by a law of their losses.

P networks, N blocks, O operations.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from nas.core.config import Config
from nas.core.errors import RunError
from nas.core.pattern import interleaved
from nas.search.network_costs import NetworkCosts
from nas.search.space import Network, make_network, neighbours, within
from nas.search.surrogate import TERMS, Law, mean_sizes
from nas.search.trials import BATCH, Rung, Trials, rung_steps

UNLIKELY = 0.02  # networks that are the best with a lower probability do not go on
TIE = 0.001  # relative; of networks whose losses at the end differ less by the law, the cheapest is chosen
PARENTS = 20  # of the networks that are one change away
LONG_ENOUGH = 1.3  # times the warm-up; shorter first trials are judged on weights of the warm-up
RECORDED = 60  # networks
NONE_LEFT = "no network is left, because trials failed; the notices above say why"
NORMAL_95 = 1.96


class Halving:
    """Successive halving (arXiv 1502.07943), in which a law chooses the networks of each rung.

    networks: the first candidates within the budget. Networks that are one change away from the best join them.
    """

    def __init__(self, trials: Trials, costs: NetworkCosts, budget: float, networks: list[Network]):
        self.trials, self.costs, self.budget, self.networks = trials, costs, budget, networks
        self.config, self.centre, self.terms = trials.config, mean_sizes(networks), TERMS

    def law(self, points: int | None = None) -> Law:
        """The law of the first points; None: of all. Their shares are those of whole steps."""
        trials, known = self.trials, []
        for point in trials.points[:points]:
            share = trials.until(point.network, point.share) / trials.steps[point.network.vocab_size]
            known.append(replace(point, share=share))
        return Law(known, self.networks, self.config.model.d_ffn, self.centre, self.terms, self.trials.text)

    def run(self) -> Network:
        """The network of the last rung that is the best at the end of a training, by the law of all trials.

        Of several that are equally good it is the cheapest. The law decides, because networks still differ in what they
        gain from the rest of the text.
        """
        rungs = self.trials.rungs
        first, count, _ = rungs[0]
        steps, warmup = rung_steps(first, min(self.trials.steps.values())), self.config.train.warmup_steps
        if steps < LONG_ENOUGH * warmup:
            print(
                f"WARNING: the first trials have {steps} steps, and the warm-up {warmup}: give a smaller "
                "train.warmup_steps"
            )
        batch = self.first_networks(min(BATCH, count))
        while batch:
            if not self.train(batch, first) and not self.trials.points:
                raise RunError(NONE_LEFT)
            self.add_neighbours()
            batch = self.promising(min(BATCH, count - len(self.trials.tried)))
        for before, rung in pairwise(rungs):
            self.train_best(before, rung)
        return self.winner(self.finished(rungs[-1]))

    def train_best(self, before: Rung, rung: Rung) -> None:
        """Train the best networks of the rung before; if the trials of all of them fail, the next best ones.

        Raises RunError if none is left.
        """
        share, count, vocabularies = rung
        others = self.finished(before)
        while others:
            batch = self.contenders(others, count, vocabularies)
            if before == self.trials.rungs[0]:
                batch = self.with_newcomer(batch, count)
            batch = self.fill_free_places(batch, before, rung)
            if self.train(batch, share):
                return
            others = [network for network in others if network not in batch]
        raise RunError(NONE_LEFT)

    def train(self, networks: list[Network], share: float) -> bool:
        """Train networks until a share of their steps. False, with a notice, if the trials of all fail."""
        try:
            self.trials.run(networks, share)
        except RunError as error:
            print(f"NOTICE: {error}", flush=True)
            return False
        return True

    def finished(self, rung: Rung) -> list[Network]:
        """The networks whose trials in a rung have not failed."""
        return [point.network for point in self.trials.points if point.share == rung.share]

    def winner(self, networks: list[Network]) -> Network:
        losses = self.law().predict(networks)
        equal = [network for network, loss in zip(networks, losses, strict=True) if loss <= (1 + TIE) * min(losses)]
        return min(equal, key=self.costs.cost)

    def first_networks(self, count: int) -> list[Network]:
        """The best network of each of the best vocabularies by the law, which has seen no trial.

        If there are fewer than `count`, others by Thompson sampling.
        """
        self.add_neighbours()
        law = self.law()
        return list(dict.fromkeys([*law.best_of_vocabularies(self.networks), *self.promising(count)]))[:count]

    def add_neighbours(self) -> None:
        limit = self.budget * self.costs.reference_cost
        fits = {shape: within(table, limit) for shape, table in self.costs.tables.items()}
        self.networks = with_neighbours(self.networks, self.law(), self.config, fits)

    def untried(self) -> list[Network]:
        return [network for network in self.networks if network not in self.trials.tried]

    def promising(self, count: int) -> list[Network]:
        """Untried networks by Thompson sampling (arXiv 1707.02038): each is the best one by a draw of the law."""
        others, chosen = self.untried(), []
        count = max(0, min(count, len(others)))
        generator = np.random.default_rng([self.config.seed, len(self.trials.tried)])
        for draw in self.law().draw(others, count, generator) if count else ():
            draw[chosen] = np.inf
            chosen.append(int(np.argmin(draw)))
        return [others[index] for index in chosen]

    def contenders(self, networks: list[Network], count: int, vocabularies: int) -> list[Network]:
        """The networks of a later rung by the law: the best of each of the best vocabularies, and then the best others.

        The first parts of trainings do not show which vocabulary is the best at the end, so several of them stay. No
        network stays that is unlikely to be the best.
        """
        law = self.law()
        order = [networks[index] for index in np.argsort(law.predict(networks))]
        chances = dict(zip(networks, law.chances(networks), strict=True))
        likely = [network for network in order if chances[network] >= UNLIKELY]
        best = law.best_of_vocabularies(likely)[:vocabularies]
        return [*best, *(network for network in likely if network not in best)][:count]

    def with_newcomer(self, networks: list[Network], count: int) -> list[Network]:
        """Add the untried network that the present law predicts to be the best.

        If there are `count` networks already, it replaces the last one if it is better.
        """
        others, last = networks[: count - 1], networks[count - 1 :]
        compared = [*last, *self.untried()]
        return [*others, *(compared[index] for index in self.law().predict(compared).argsort()[:1])]

    def fill_free_places(self, networks: list[Network], before: Rung, rung: Rung) -> list[Network]:
        """Fill the free places of a rung with untried networks and those of earlier rungs, as far as the steps suffice.

        An untried one takes more steps. Each is the best by the law, and likely enough to be the best of the rung.
        """
        law, free = self.law(), (rung.networks - len(networks)) * (rung.share - before.share)
        reached = {point.network: point.share for point in self.trials.points}
        others = [network for network in self.networks if network not in {*networks, *self.trials.failed}]
        missing = {network: rung.share - reached.get(network, 0.0) for network in others}
        while fitting := [network for network, cost in missing.items() if cost <= free]:
            best = fitting[law.predict(fitting).argmin()]
            if law.chances([*networks, best])[-1] < UNLIKELY:
                break
            networks, free = [*networks, best], free - missing.pop(best)
        return networks

    def history(self) -> list[dict]:
        """The lines of pi.jsonl, one for each trial and one before them."""
        operations = sorted(self.config.search.operations, key="identity".__eq__)  # identity last
        ratios = np.array([self.costs.ratio(network) for network in self.networks])
        lines, steps, reached = [], 0, {}
        for count in range(len(self.trials.points) + 1):
            if count:
                point = self.trials.points[count - 1]
                until = self.trials.until(point.network, point.share)
                steps, reached[point.network] = steps + until - reached.get(point.network, 0), until
            chances = self.law(count).chances(self.networks)
            line = {"step": steps, "temperature": 1.0, "operations": operations}
            line["pi"] = block_probabilities(self.networks, chances, operations, self.config.model.blocks).tolist()
            lines.append(line | {"expected_cost_ratio": float(chances @ ratios)})
        return [line | {"of_steps": steps} for line in lines]

    def record(self, best: Network) -> dict:
        """The content of choice.yaml.

        `behind` is the relative difference of a network's loss to that of the chosen one, by the law, at the end of a
        training. Where no trial ends a training, the law knows no absolute loss of the end.
        """
        law, costs, points = self.law(), self.costs, self.trials.points
        networks = list(dict.fromkeys([*self.networks, costs.reference]))  # the reference may be beyond the budget
        losses, chances = law.predict(networks), np.append(law.chances(self.networks), 0.0)
        own, intervals = law.predict([best])[0], NORMAL_95 * law.errors(networks, best)
        results = self.trials.results
        shown = {*np.argsort(-chances[: len(networks)], kind="stable")[:RECORDED].tolist()}
        shown |= {i for i, n in enumerate(networks) if n in results or n.is_interleaved}
        train, steps = self.config.train, sum(one["step"] for one in results.values())
        plain = make_network(*best[:2], interleaved(self.config.model.blocks))
        return {
            "format": "par-choice/2",
            "name": str(best),
            "network": best.to_dict(),
            "reference": costs.reference.to_dict(),
            "budget": self.budget,
            "unit": f"{costs.unit} for 1,000 bytes of text",
            "reference_cost": costs.reference_cost,
            "ratio": costs.ratio(best),
            "interleaved_ratio": costs.ratio(plain),
            "centre": self.centre.tolist(),  # of the law
            "text": self.trials.text._asdict(),
            "trial": {"folder": str(self.trials.folder / str(best)), **results[best]},
            "trainings": sum(one["step"] / one["of_steps"] for one in results.values()),
            "train_steps": steps,
            "train_tokens": steps * train.batch_size * train.segment,
            "trials": [
                {"name": str(one.network), **one.network.to_dict(), "share": one.share, "bits_per_byte": one.loss}
                for one in points
            ],
            "networks": [
                {
                    "name": str(networks[index]),
                    **networks[index].to_dict(),
                    "cost": costs.cost(networks[index]),
                    "ratio": costs.ratio(networks[index]),
                    "behind": float(losses[index] / own - 1),
                    "interval": float(intervals[index]),
                    "probability": float(chances[index]),
                }
                for index in sorted(shown, key=lambda index: losses[index])
            ],
            "wall_time_s": sum(one["wall_time_s"] for one in results.values()),
        }


def with_neighbours(networks: list[Network], law: Law, config: Config, fits: dict) -> list[Network]:
    """Add the networks within the budget that are one change away from the best by the law, until none is new.

    fits: {vocabulary and width: whether blocks are within the budget}.
    """
    operations, most, count = config.search.operations, config.model.blocks, 0
    while len(networks) > count:
        count = len(networks)
        best = [networks[index] for index in np.argsort(law.predict(networks))[:PARENTS]]
        near = [other for network in best for other in neighbours(network, operations, most)]
        networks = list(dict.fromkeys([*networks, *(other for other in near if fits[other[:2]](other.blocks))]))
    return networks


def block_probabilities(networks: list[Network], chances: np.ndarray, operations: list[str], most: int) -> np.ndarray:
    """pi [N, O]: the probability of each operation in each block of the best network.

    Blocks that it does not have are identity. chances [P]: of each network to be the best.
    """
    pi = np.zeros((most, len(operations)))
    for network, chance in zip(networks, chances, strict=True):
        blocks = [*network.blocks, *["identity"] * (most - len(network.blocks))]
        pi[range(most), [operations.index(block) for block in blocks]] += chance
    return pi
