"""The strategy of a search by trials: which networks a surrogate model proposes, promotes and chooses."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from nas.core.config import Config
from nas.core.errors import RunError
from nas.search.pace import Pace
from nas.search.space import Network, NetworkCosts, neighbours, within_budget
from nas.search.surrogate import Surrogate, prior_for
from nas.search.trials import Rung, Trials, adds_untried, batches, rung_steps

UNLIKELY = 0.02  # networks whose probability of being the best is lower do not go on
EQUAL_LOSS = 0.001  # relative; of networks whose predicted losses differ less, the cheapest is chosen
MOST_TRIED = 40  # networks of the first rung, if time is left
PARENTS = 20  # of the networks that are one change away
LONG_ENOUGH = 1.3  # times the warm-up; shorter first trials are judged on weights of the warm-up
NONE_LEFT = "no network is left, because trials failed; the notices above say why"


class Strategy:
    """Proposes networks for the first rung, and promotes some. networks: the first candidates within the budget."""

    pace: Pace | None = None  # None: as many trials as rungs have, however long they take

    def __init__(self, trials: Trials, costs: NetworkCosts, budget: float, networks: list[Network]):
        self.trials, self.costs, self.budget, self.networks = trials, costs, budget, networks
        self.config, self.prior = trials.config, prior_for(trials.config)

    def fit(self, points: int | None = None) -> Surrogate:
        """The surrogate of the first points; None: of all. Their shares are those of whole steps."""
        trials, known = self.trials, []
        for point in trials.points[:points]:
            share = trials.until(point.network, point.share) / trials.steps[point.network.vocab_size]
            known.append(replace(point, share=share))
        return Surrogate(known, self.networks, self.config.model.d_ffn, self.prior, trials.text)

    def untried(self) -> list[Network]:
        return [network for network in self.networks if network not in self.trials.tried]

    def propose(self, count: int) -> list[Network]:
        """At most `count` untried networks for the first rung."""
        self.add_neighbours()
        best = [] if self.trials.tried else self.fit().best_of_vocabularies(self.networks)
        return list(dict.fromkeys([*best, *self.thompson_sampling(count)]))[:count]

    def add_neighbours(self) -> None:
        limit = self.budget * self.costs.reference_cost
        self.networks = with_neighbours(self.networks, self.fit(), self.config, self.costs.tables, limit)

    def thompson_sampling(self, count: int) -> list[Network]:
        """Untried networks, each of which is the best one in a draw of the surrogate (arXiv 1707.02038)."""
        others, chosen = self.untried(), []
        count = max(0, min(count, len(others)))
        generator = np.random.default_rng([self.config.seed, len(self.trials.tried)])
        for draw in self.fit().draw(others, count, generator) if count else ():
            draw[chosen] = np.inf
            chosen.append(int(np.argmin(draw)))
        return [others[index] for index in chosen]

    def promote(self, networks: list[Network], before: Rung, rung: Rung) -> list[Network]:
        """The networks of a rung. networks: those of the rung before."""
        surrogate = self.fit()
        promoted = self.likely_best(surrogate, networks, rung)
        if before == self.trials.rungs[0] and adds_untried(self.trials.rungs):
            promoted = self.with_best_untried(surrogate, promoted, rung.networks)
        return self.fill_free_places(surrogate, promoted, before, rung)

    def likely_best(self, surrogate: Surrogate, networks: list[Network], rung: Rung) -> list[Network]:
        """The first parts of trainings do not show which vocabulary is the best at the end, so several of them stay."""
        order = [networks[index] for index in np.argsort(surrogate.predict(networks))]
        probabilities = dict(zip(networks, surrogate.probability_best(networks), strict=True))
        likely = [network for network in order if probabilities[network] >= UNLIKELY]
        best = surrogate.best_of_vocabularies(likely)[: rung.vocabularies]
        return [*best, *(network for network in likely if network not in best)][: rung.networks]

    def with_best_untried(self, surrogate: Surrogate, networks: list[Network], count: int) -> list[Network]:
        """Add the predicted best untried network. If there are `count`, it replaces the last one if it is better."""
        others, last = networks[: count - 1], networks[count - 1 :]
        compared = [*last, *self.untried()]
        return [*others, *(compared[index] for index in surrogate.predict(compared).argsort(kind="stable")[:1])]

    def fill_free_places(
        self, surrogate: Surrogate, networks: list[Network], before: Rung, rung: Rung
    ) -> list[Network]:
        """Fill the free places of a rung, as far as the steps suffice. An untried network takes more of them."""
        free = (rung.networks - len(networks)) * (rung.share - before.share)
        missing = dict.fromkeys(self.networks, rung.share)
        missing |= {point.network: rung.share - point.share for point in self.trials.points}
        left_out = {*networks, *self.trials.failed}
        known = self.networks if adds_untried(self.trials.rungs) else self.trials.results
        others = [one for one in known if one not in left_out and missing[one] <= free]
        draws = dict(zip([*others, *networks], surrogate.sample([*others, *networks]).T, strict=True))
        for index in surrogate.predict(others).argsort(kind="stable"):
            best = others[index]
            if missing[best] > free:
                continue
            winners = np.argmin([draws[one] for one in (*networks, best)], axis=0)
            if (winners == len(networks)).mean() < UNLIKELY:
                break
            networks, free = [*networks, best], free - missing[best]
        return networks

    def choose(self, networks: list[Network]) -> Network:
        """The cheapest of the predicted best ones; predictions know what networks gain from the rest of the text."""
        losses = self.fit().predict(networks)
        most = (1 + EQUAL_LOSS) * min(losses)
        return min((one for one, loss in zip(networks, losses, strict=True) if loss <= most), key=self.costs.cost)


def with_neighbours(
    networks: Sequence[Network], surrogate: Surrogate, config: Config, tables: dict, limit: float
) -> list[Network]:
    """Add the networks within a cost that are one change away from the predicted best, until none is new."""
    operations, most, count = config.search.operations, config.model.blocks, 0
    affordable = {shape: within_budget(table, limit) for shape, table in tables.items()}
    while len(networks) > count:
        count = len(networks)
        best = [networks[index] for index in np.argsort(surrogate.predict(networks))[:PARENTS]]
        near = [other for network in best for other in neighbours(network, operations, most)]
        networks = list(dict.fromkeys([*networks, *(one for one in near if affordable[one[:2]](one.blocks))]))
    return networks


def successive_halving(strategy: Strategy) -> Network:
    """The network that a strategy chooses after the last rung. Raises RunError if all trials of a rung fail."""
    trials, rungs = strategy.trials, strategy.trials.rungs
    first, count, _ = rungs[0]
    steps, warmup = rung_steps(first, min(trials.steps.values())), trials.config.train.warmup_steps
    if steps < LONG_ENOUGH * warmup:
        told = f"the first trials have {steps} steps, and the warm-up {warmup}; give a smaller train.warmup_steps"
        print(f"WARNING: {told}")
    while networks := strategy.propose(first_count(strategy, count)):
        if not train(trials, networks, first) and not trials.points:
            raise RunError(NONE_LEFT)
    for index, (before, rung) in enumerate(pairwise(rungs), start=1):
        train_rung(strategy, before, paced(strategy, before, rung, rungs[index:]))
    return strategy.choose(trials.finished(rungs[-1]))


def first_count(strategy: Strategy, count: int) -> int:
    """The networks of the next batch of the first rung. count: of the rung, where the time plays no role."""
    tried, rungs, pace = len(strategy.trials.tried), strategy.trials.rungs, strategy.pace
    batch = strategy.trials.config.search.batch
    if not pace:
        return min(batch, count - tried)
    if tried >= max(MOST_TRIED, count):
        return 0
    more = [(rungs[0].share, batch), *batches(rungs)[len(batches(rungs[:1])) :]]
    planned = 0 if tried < count else None
    return 0 if pace.choose([more, []] if tried else [more], planned) else batch


def paced(strategy: Strategy, before: Rung, rung: Rung, rungs: tuple[Rung, ...]) -> Rung:
    """A rung with fewer networks if the time is short, and with up to twice as many if it is left over. rungs: from
    this one on.
    """
    if not strategy.pace:
        return rung
    counts, first = range(2 * rung.networks, 0, -1), strategy.trials.rungs[0]
    untried = [(first.share, 1)] if before == first and adds_untried(strategy.trials.rungs) else []
    choices = [  # networks beyond those of a rung leave time for all of the later ones
        [(rung.share - before.share, count), *untried]
        + [(two.share - one.share, two.networks if count > rung.networks else 1) for one, two in pairwise(rungs)]
        for count in counts
    ]
    count = counts[strategy.pace.choose(choices, counts.index(rung.networks))]
    return rung._replace(networks=count, vocabularies=min(rung.vocabularies, count))


def train_rung(strategy: Strategy, before: Rung, rung: Rung) -> None:
    """Train the promoted networks of the rung before; if the trials of all of them fail, the next best ones."""
    waiting = strategy.trials.finished(before)
    while waiting:
        promoted = strategy.promote(waiting, before, rung)
        if strategy.pace:
            reached = {point.network: point.share for point in strategy.trials.points}
            strategy.pace.run_instead([rung.share - reached.get(network, 0.0) for network in promoted])
        if train(strategy.trials, promoted, rung.share):
            return
        waiting = [network for network in waiting if network not in promoted]
    raise RunError(NONE_LEFT)


def train(trials: Trials, networks: list[Network], share: float) -> bool:
    """Train networks until a share of their steps. False, with a notice, if the trials of all fail."""
    try:
        trials.run(networks, share)
    except RunError as error:
        print(f"NOTICE: {error}", flush=True)
        return False
    return True
