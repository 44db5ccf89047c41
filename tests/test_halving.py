"""The search by trials: the networks of each rung."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.prior.draws import random_networks
from nas.core.errors import RunError
from nas.costs.cost_table import FLOPS, CostTable
from nas.search import pace as paces
from nas.search import strategy as strategies
from nas.search.network_search import choice_record, last_seconds, overfit_warning, pi_lines
from nas.search.pace import Pace
from nas.search.space import Network, NetworkCosts, first_candidates, neighbours
from nas.search.strategy import MOST_TRIED, Strategy, successive_halving
from nas.search.surrogate import ALONE, MIXED, Point, Prior, Text, prior_for
from nas.search.trials import AGAIN_RUNGS, RUNGS, Estimate, Rung, Trials, batches, rung_steps, with_batches
from tests.making import plain


def true_loss(network: Network, text: float, attention: tuple[float, float] = (0.7, 0.06)) -> float:
    """8,000 pieces are the best after an eighth of a training, and 2,000 at its end. Late attention is good.

    attention: the best share of the blocks, and its weight.
    """
    size, width, blocks = network
    if not blocks:
        return 9.0
    early = 0.25 * (text * size / 2000) ** -0.35
    attends = np.array([block == "attention" for block in blocks])
    places = np.arange(len(blocks)) / max(1, len(blocks) - 1)
    best, weight = attention
    pattern = weight * abs(attends.mean() - best) - 0.02 * (attends * places).mean()
    return 0.9 + 1.5 * size**-0.3 + 3 * width**-0.5 + 0.3 * len(blocks) ** -0.7 + early + 0.15 * np.log(size) + pattern


class KnownTrials(Trials):
    """Trials with known losses, and noise. failing: {network: the share of its first trial that fails}."""

    def __init__(self, config, failing):
        super().__init__(config, {}, Path("trials"), None)
        self.steps, self.failing = dict.fromkeys((1000, 2000, 4000, 8000), 4000), failing
        self.generator, self.attention = np.random.default_rng(0), ()

    def run(self, networks, share):
        assert share > 1 / 8 or not self.tried & {*networks}
        super().run(networks, share)

    def train(self, networks, share):
        results = {}
        for network in networks:
            if share < self.failing.get(network, 2):
                loss = self.truth(network, share) * (1 + 0.001 * self.generator.normal())
                steps = {"step": self.until(network, share), "of_steps": 4000, "wall_time_s": 1.0}
                results[network] = steps | {"valid": {"bits_per_byte": loss}}
        if not results:
            raise RunError("all failed")
        return results

    def truth(self, network, share):
        return true_loss(network, share, *self.attention)


def expecting_nothing(prior: Prior, letters: str) -> Prior:
    vague = {term: (0, 2 * spread) for term, (_, spread) in prior.terms.items() if {*term} & {*letters}}
    return prior._replace(terms=prior.terms | vague)


VAGUE = expecting_nothing(ALONE, "AFP")  # of patterns, because the truth here contradicts the shipped prior


OPTIONS = "model.blocks=8", "search.operations=[attention,dense,identity]", "search.method=trials"


@pytest.fixture
def known_search(small_config):
    """known_search(failing, seed, kind, prior) -> Strategy for networks of 16 vocabularies and widths."""

    def make(failing=(), seed=0, kind=Strategy, prior=None):
        trials = KnownTrials(small_config(*OPTIONS, f"seed={seed}"), dict(failing))
        tables = {}
        for size, width in itertools.product((1000, 2000, 4000, 8000), (64, 96, 128, 192)):
            blocks = {"attention": 2 * width**1.3, "dense": width**1.3, "identity": 0.0}
            tables[size, width] = CostTable(FLOPS, width * (5 + size / 1000), blocks)
        own = plain(2000, 64, 8)
        about = trials.config, tables, tables[2000, 64].cost(own.blocks)
        drawn = itertools.islice(random_networks(*about, 0.75), 15 * len(tables))
        strategy = kind(trials, NetworkCosts(tables, own), 1.0, [*first_candidates(*about), *drawn])
        strategy.prior = prior or strategy.prior
        return strategy

    return make


@pytest.mark.slow
def test_trials_find_a_good_network_although_vocabularies_change_their_order(known_search):
    strategy = known_search(prior=VAGUE)
    best, points = successive_halving(strategy), strategy.trials.points
    rungs = [strategy.trials.finished(rung) for rung in RUNGS]
    assert len(rungs[0]) == len({*rungs[0]}) == 12 and len(rungs[1]) <= 5 and len(rungs[2]) == 2
    assert len({*rungs[1]} - {*rungs[0]}) <= 1  # untried before
    assert {*rungs[2]} <= {*rungs[1]} and best in rungs[2]
    assert len({network.vocab_size for network in rungs[0][:4]}) == 4
    assert len({network.vocab_size for network in rungs[1]}) >= 3
    assert all(strategy.costs.ratio(network) <= 1 + 1e-9 for network in strategy.networks)
    losses = {network: true_loss(network, 1.0) for network in strategy.networks}
    order = sorted(losses.values())
    assert losses[best] < order[len(order) // 20], "not among the best 5%"
    assert losses[best] < 1.005 * order[0] and np.median(order) > 1.015 * order[0]
    others = known_search({rungs[0][4]: 1 / 8}, prior=VAGUE)  # one that diverges, and is not tried again
    successive_halving(others)
    assert rungs[0][4] in others.trials.tried and len(others.trials.tried) in (12, 13)
    assert others.trials.failed == {rungs[0][4]}
    others = known_search(dict.fromkeys(rungs[2], 1 / 2), prior=VAGUE)  # the next best follow
    assert successive_halving(others) in {*rungs[1]} - {*rungs[2]}
    others = known_search(dict.fromkeys(rungs[0][4:], 1 / 8), prior=VAGUE)  # all of a batch
    assert successive_halving(others) not in rungs[0][4:]
    for failing in (dict.fromkeys(rungs[0][:4], 1 / 8), dict.fromkeys(rungs[1], 1 / 2)):
        with pytest.raises(RunError, match="no network is left"):
            successive_halving(known_search(failing, prior=VAGUE))
    strategy.trials.points = [point for point in points if point.share == 1 / 8]
    strategy.trials.tried = {*rungs[0]}
    surrogate, untried = strategy.fit(), strategy.untried()
    new = untried[surrogate.predict(untried).argmin()]
    worst = rungs[0][surrogate.predict(rungs[0]).argmax()]
    likely = [*strategy.likely_best(surrogate, rungs[0], RUNGS[1])[:4], worst]
    for networks, own in ((strategy.networks, [new]), (rungs[0], [])):  # and nothing better is left
        strategy.networks = networks
        assert strategy.with_best_untried(surrogate, likely, 5) == [*likely[:4], *(own or [worst])]
        assert strategy.with_best_untried(surrogate, likely[:3], 5) == [*likely[:3], *own]  # a place is free


@pytest.mark.parametrize("overfit", [0.0, 0.025, 0.05])
def test_a_text_that_is_read_again_decides_between_vocabularies_at_the_end_of_trainings(known_search, overfit):
    """Large vocabularies overfit after the last trial of a search that does not know that the text is read again."""
    behind = {}
    for text in (Text(), Text(2.75, 2_400_000)):
        strategy = known_search(prior=VAGUE)
        strategy.trials.text = text

        def truth(network, share):
            again = max(0, 2.75 * share - 1)
            return true_loss(network, share) * (1 + overfit * again * np.log(network.vocab_size / 1000))

        strategy.trials.truth = truth
        best = successive_halving(strategy)
        losses = {network: truth(network, 1.0) for network in strategy.networks}
        behind[text.passes] = losses[best] / min(losses.values()) - 1
    rungs = [strategy.trials.finished(rung) for rung in AGAIN_RUNGS]
    assert [len(rung) for rung in rungs] == [8, 5, 3, 2] and best in rungs[-1]
    assert all(len({one.vocab_size for one in rung}) >= n for rung, n in zip(rungs[1:], (4, 3, 2), strict=True))
    assert behind[2.75] < 0.01 and (not overfit or behind[2.75] < behind[1.0]), behind


def test_the_time_of_a_search_counts_each_part_of_a_training_once():
    """Each eighth of a training that trials and the two last trainings take, with an estimate of 8 seconds for one."""
    for rungs, eighths, trials in ((RUNGS, 12 + 1 + 5 + 4, 20), (AGAIN_RUNGS, 8 + 1 + 5 + 6 + 8, 19)):
        rest = 8 * (1 - rungs[-1].share)
        read, looked = 2 * (4 + 2), 2  # two trainings read valid 4 times, and valid and test, which has a mixture

        def seconds(*estimate, rungs=rungs):
            known = Estimate(*estimate)
            return known.seconds(batches(rungs)) + last_seconds(known, rungs)

        assert seconds(0.0, 8.0, 0.0, 0.0, 0.0, 1) == pytest.approx(eighths + 8 + rest)
        assert seconds(0.0, 0.0, 1.0, 0.0, 10.0, 1, 1 / 4) == pytest.approx(trials / 4 + read + 2 * 10)
        assert seconds(0.0, 0.0, 0.0, 1.0, 0.0, 1, 1 / 4) == pytest.approx(trials / 4 + looked)
        assert seconds(1.0, 0.0, 0.0, 0.0, 0.0, 1) == trials + 2

    assert [rung_steps(rung.share, 4003) for rung in AGAIN_RUNGS] == [500, 1000, 2000, 4003]


class RandomStrategy(Strategy):
    """Networks in their order, of which those with the lowest losses go on, without a surrogate."""

    def add_neighbours(self):
        pass

    def propose(self, count):
        return self.untried()[:count]

    def likely_best(self, surrogate, networks, rung):
        return self.in_order(networks)[: rung.networks]

    def with_best_untried(self, surrogate, networks, count):
        return networks

    def choose(self, networks):
        return self.in_order(networks)[0]

    def in_order(self, networks):
        last = {point.network: point.loss for point in self.trials.points}
        return sorted(networks, key=last.__getitem__)


def test_searches_of_mixtures_have_a_prior_of_their_own(known_search, small_config):
    assert known_search().prior == ALONE
    for parts in ("states=9", "cache=[2]", "counts=2"):
        assert prior_for(small_config(f"mixture.{parts}")) == MIXED


@pytest.mark.slow
@pytest.mark.parametrize("prior", [ALONE, MIXED], ids=["alone", "mixed"])
def test_the_surrogate_finds_better_networks_than_random_search(known_search, prior):
    """Networks of attention alone are the best. Random search has as many trials, and judges by losses alone."""
    truth, behind = (1.0, 0.3), {Strategy: [], RandomStrategy: []}
    for seed in range(1, 11):  # single searches differ with the last digit of a logarithm
        found, losses = {}, []
        for kind in behind:
            strategy = known_search(seed=seed, kind=kind, prior=expecting_nothing(prior, "AFPV"))
            strategy.trials.attention = (truth,)
            np.random.default_rng(seed).shuffle(strategy.networks)
            found[kind] = true_loss(successive_halving(strategy), 1.0, truth)
            assert len(strategy.trials.tried) in ((12, 13, 14) if kind is Strategy else (12,))
            own = [true_loss(network, 1.0, truth) for network in strategy.networks]
            assert np.median(own) > 1.03 * min(own)
            losses += own
        for kind, loss in found.items():
            behind[kind].append(loss / min(losses) - 1)
    better = stats.ttest_rel(*behind.values(), alternative="less")
    assert np.mean(behind[Strategy]) < 0.7 * np.mean(behind[RandomStrategy]) and better.pvalue < 0.05, behind


def test_neighbours_of_the_best_join_until_none_is_new_and_proposals_differ(known_search):
    strategy = known_search()
    strategy.networks = plain_ones = [network for network in strategy.networks if network.is_interleaved]
    strategy.trials.run(strategy.propose(4), 1 / 8)
    strategy.add_neighbours()
    assert len(strategy.networks) > len({*plain_ones}) and {*plain_ones} < {*strategy.networks}
    order = strategy.fit().predict(strategy.networks).argsort()
    best = [strategy.networks[index] for index in order[: strategies.PARENTS]]
    assert not all(network.is_interleaved for network in best)  # a change of a change, too
    for network in best:
        near = neighbours(network, strategy.config.search.operations, 8)
        assert all(other in strategy.networks or strategy.costs.ratio(other) > 1 for other in near)
    assert all(strategy.costs.ratio(network) <= 1 + 1e-9 for network in strategy.networks)
    strategy.networks = left = strategy.untried()[:4]
    assert {*strategy.thompson_sampling(4)} == {*strategy.thompson_sampling(9)} == {*left}


def test_prediction_probability_and_vocabulary_decide_who_goes_on(known_search):
    """The prior expects that a large vocabulary loses its early lead, or in mixtures that it gains later."""
    strategy = known_search()
    near, far = [plain(2000, 64, blocks) for blocks in (4, 5, 6)], [plain(1000, 64, 4), plain(8000, 64, 4)]
    small, bad, large = plain(4000, 64, 4), plain(2000, 64, 2), plain(32_000, 64, 4)
    strategy.trials.steps[32_000] = 4000

    def likely(losses, count, vocabularies):
        strategy.trials.points = [Point(network, 1 / 8, loss) for network, loss in losses.items()]
        return strategy.likely_best(strategy.fit(), [*losses], Rung(1 / 4, count, vocabularies))

    assert likely({large: 1.996, small: 2.0}, 1, 1) == [small]
    assert likely({large: 1.996, small: 2.0, bad: 2.6}, 3, 1) == [small, large]
    strategy.prior = MIXED
    assert likely({large: 2.0, small: 1.996}, 1, 1) == [large]
    strategy.prior = ALONE
    for loss, kept in ((2.02, {1000, 2000, 8000}), (2.4, {2000})):  # other vocabularies that are likely, and not
        losses = dict.fromkeys(near, 2.0) | dict.fromkeys(far, loss)
        assert {network.vocab_size for network in likely(losses, 3, 3)} == kept
        assert {network.vocab_size for network in likely(losses, 3, 1)} == {2000}


def test_free_places_of_a_rung_go_to_likely_networks_that_train_in_its_steps(known_search):
    strategy, (_, before, rung, _) = known_search(), AGAIN_RUNGS  # three places of a quarter of a training
    first, second, bad, untried = [plain(2000, 64, blocks) for blocks in (4, 5, 2, 6)]
    losses = {first: 2.0, second: 2.003, bad: 2.6}
    strategy.trials.points = [Point(network, 1 / 4, loss) for network, loss in losses.items()]
    for networks, going_on, joined, failed in (
        ([first, second, bad], [first], [second], set()),
        ([first, bad], [first], [], set()),
        ([first, untried], [first], [untried], set()),  # half a training, from the start
        ([first, second, untried], [first, second], [], set()),
        ([first, second], [first, bad, untried], [], set()),
        ([first, second], [first], [], {second}),
    ):
        strategy.networks, strategy.trials.failed = networks, failed
        assert strategy.fill_free_places(strategy.fit(), going_on, before, rung) == [*going_on, *joined]


def test_a_search_uses_the_free_places_of_its_rungs(known_search, monkeypatch):
    """One network goes on, so that places are free: an untried one takes one, and likely networks the others."""
    likely_best = Strategy.likely_best
    monkeypatch.setattr(Strategy, "likely_best", lambda *arguments: likely_best(*arguments)[:1])
    for filled in (True, False):
        if not filled:
            monkeypatch.setattr(Strategy, "fill_free_places", lambda self, surrogate, networks, *rungs: networks)
        strategy = known_search(prior=VAGUE)
        successive_halving(strategy)
        eighth, quarter = (strategy.trials.finished(rung) for rung in RUNGS[:2])
        assert len(quarter) > 2 if filled else len(quarter) == 2 and quarter[1] not in eighth


def test_the_surrogate_counts_the_steps_that_trials_have_taken(known_search, monkeypatch):
    strategy, seen = known_search(), []
    monkeypatch.setattr(strategies, "Surrogate", lambda points, *rest: seen.extend(points))
    strategy.trials.steps = {2000: 135, 8000: 128}
    strategy.trials.points = [Point(plain(size, 64, 4), share, 2.0) for size in (2000, 8000) for share in (1 / 8, 1)]
    strategy.fit()
    assert [point.share for point in seen] == [16 / 135, 1, 1 / 8, 1]


def test_trials_are_evaluated_at_their_ends_alone_unless_the_text_is_read_again(known_search, tmp_path):
    trials, network = known_search().trials, plain(2000, 64, 2)
    for passes, given in ((1.0, True), (2.0, False)):  # then earlier weights may be the best
        trials.text = Text(passes)
        assert ("train.evaluate_every=0" in trials.task(network, 500, tmp_path).arguments) == given


def test_of_equally_good_networks_the_cheapest_is_chosen(known_search, monkeypatch):
    monkeypatch.setattr(strategies, "EQUAL_LOSS", 0.5)
    strategy = known_search()
    best = successive_halving(strategy)
    assert strategy.costs.cost(best) == min(map(strategy.costs.cost, strategy.trials.finished(RUNGS[-1])))


def test_a_chosen_network_that_was_better_before_the_end_is_told():
    def warning(losses):
        points = [{"name": name, "share": share, "bits_per_byte": loss} for name, share, loss in losses]
        return overfit_warning({"name": "a", "trials": points})

    half, others = ("a", 0.5, 1.6), [("b", 0.5, 1.5), ("b", 1.0, 1.4)]
    assert "had 1.6000 bits per byte on valid after 0.5 of a training, and 1.6200" in warning([half, ("a", 1.0, 1.62)])
    assert warning([half]) is warning([half, *others]) is warning([half, *others, ("a", 1.0, 1.59)]) is None


def test_a_warm_up_that_reaches_beyond_the_first_trials_is_told(known_search, capsys):
    for warmup, told in ((384, False), (385, True)):
        strategy = known_search()
        strategy.config.train.warmup_steps, strategy.propose = warmup, lambda count: []
        with pytest.raises(RunError, match="no network is left"):
            successive_halving(strategy)
        assert (f"the first trials have 500 steps, and the warm-up {warmup}" in capsys.readouterr().out) == told


def test_pi_is_the_probability_of_each_operation_in_the_best_network(known_search):
    strategy = known_search()
    strategy.trials.attention = ((0.9, 0.3),)  # matters much
    best = successive_halving(strategy)
    lines, record = pi_lines(strategy), choice_record(strategy, best)
    assert len(lines) == len(strategy.trials.points) + 1 and lines[0]["step"] == 0
    assert lines[-1]["step"] == lines[0]["of_steps"] == record["train_steps"]
    pi = np.array([line["pi"] for line in lines])
    assert pi.shape[1:] == (8, 3) and np.allclose(pi.sum(axis=2), 1) and lines[0]["operations"][-1] == "identity"
    assert (np.diff(pi[:, :, 2], axis=1) >= 0).all()  # identity stands at the end
    probabilities = {one["name"]: one["probability_best"] for one in record["networks"]}
    assert str(strategy.costs.reference) in probabilities
    longest = max(len(one["blocks"]) for one in record["networks"] if one["probability_best"])
    assert 0.5 < sum(probabilities.values()) <= 1 + 1e-9 and (pi[-1, longest:, 2] > 0.8).all()
    places = [lines[0]["operations"].index(block) for block in best.blocks]
    own = pi[:, range(len(places)), places].mean(axis=1)
    assert own[-1] > 1.3 * own[0]  # trials decide


ESTIMATE = Estimate(start=0.5, training=80.0, reading=0.8, looking=0.2, fitting=1.8, at_once=2, judged=0.5)
LAST = last_seconds(ESTIMATE, RUNGS)
WHOLE = ESTIMATE.seconds(batches(RUNGS)) + LAST


def paced_search(known_search, monkeypatch, file, seconds, slower):
    """The search whose trials take `slower` times as long as estimated, on a clock of its own, and that clock."""
    strategy, clock = known_search(prior=VAGUE), [100.0]
    monkeypatch.setattr(paces.time, "monotonic", lambda: clock[0])
    strategy.pace, train = Pace(file, seconds, ESTIMATE, LAST), strategy.trials.train

    def trained(networks, share):
        added = sorted((share - strategy.trials.reached.get(network, 0) for network in networks), reverse=True)
        clock[0] += slower * ESTIMATE.seconds([(longest, 1) for longest in added[::2]])  # two at once
        strategy.trials.reached |= dict.fromkeys(networks, share)
        return train(networks, share)

    strategy.trials.reached, strategy.trials.train = {}, trained
    best = successive_halving(strategy)
    return strategy, best, clock[0] - 100


def test_time_that_is_left_over_goes_into_trials_and_what_is_missing_comes_off_them(
    known_search, monkeypatch, tmp_path
):
    tried = {}
    for slower in (0.6, 0.8, 1.0, 1.05, 1.3, 1.6):
        file = tmp_path / f"{slower}.jsonl"
        strategy, best, spent = paced_search(known_search, monkeypatch, file, WHOLE, slower)
        tried[slower] = len(strategy.trials.tried)
        shares = [point.share for point in strategy.trials.points]
        ends = [shares.count(rung.share) for rung in RUNGS[1:]]
        np.testing.assert_allclose([one["slower"] for one in strategy.pace.made[1:]], slower)
        assert slower > 1.5 or (ends[0] >= 5 and ends[1] == 2), ends
        whole = spent + slower * LAST
        assert 0.85 * WHOLE < whole < 1.15 * WHOLE, slower
        again, same, _ = paced_search(known_search, monkeypatch, file, 0.0, 5.0)  # it repeats its choices
        assert same == best and again.trials.points == strategy.trials.points
    assert 4 <= tried[1.3] < 12 <= tried[1.05] <= tried[1.0] < tried[0.6] <= MOST_TRIED
    strategy, _, _ = paced_search(known_search, monkeypatch, tmp_path / "none.jsonl", 0.0, 1.0)
    shares = [point.share for point in strategy.trials.points]
    assert [shares.count(rung.share) for rung in RUNGS] == [4, 2, 2]  # the fewest, two at a time


def test_many_workers_have_as_many_networks_in_fewer_rungs(known_search):
    """16 workers have two batches and then one, and a resumed search with fewer workers repeats the same one."""
    config = known_search().config
    auto = replace(config, search=replace(config.search, batch="auto", networks="auto"))
    for places, batch, networks in ((1, 4, 12), (2, 4, 12), (3, 6, 12), (5, 5, 15), (8, 8, 16), (16, 16, 32)):
        search = with_batches(auto, places).search
        assert (search.batch, search.networks) == (batch, networks)
        assert with_batches(replace(config, search=search), 64).search == search
    strategy, began = known_search(prior=VAGUE), []
    strategy.trials.config.search.batch, strategy.trials.config.search.networks = 16, 32
    run = strategy.trials.run
    strategy.trials.run = lambda networks, share: began.append((len(networks), share)) or run(networks, share)
    best = successive_halving(strategy)
    assert began[:2] == [(16, 1 / 8)] * 2 and len(began) == 3 and began[2][0] <= 5 and began[2][1] == 1 / 4
    losses = sorted(true_loss(network, 1.0) for network in strategy.networks)
    assert true_loss(best, 1.0) < losses[len(losses) // 10]
    assert strategy.trials.batches == [(1 / 8, 16), (1 / 8, 16), (1 / 8, 5)]
