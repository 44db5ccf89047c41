"""The search by trials: the networks of each rung."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from experiments.versus.draws import random_networks
from nas.core.errors import RunError
from nas.costs.cost_table import FLOPS, CostTable
from nas.search import halving
from nas.search.halving import Halving
from nas.search.network_costs import NetworkCosts
from nas.search.network_search import overfit_warning
from nas.search.space import Network, first_candidates, neighbours
from nas.search.surrogate import TERMS, Point, Text
from nas.search.time_budget import AFTER_S, whole_seconds
from nas.search.trials import AGAIN_RUNGS, RUNGS, Estimate, Trials, rung_steps
from tests.making import load_script, plain


def true_loss(network: Network, text: float, attention: tuple[float, float] = (0.7, 0.06)) -> float:
    """8,000 pieces are the best after an eighth of a training, and 2,000 at its end. Late attention is good.

    attention: the best share of the blocks, and its weight.
    """
    size, width, blocks = network
    early = 0.25 * (text * size / 2000) ** -0.35
    attends = np.array([block == "attention" for block in blocks])
    places = np.arange(len(blocks)) / max(1, len(blocks) - 1)
    best, weight = attention
    pattern = weight * abs(attends.mean() - best) - 0.02 * (attends * places).mean()
    return 0.9 + 1.5 * size**-0.3 + 3 * width**-0.5 + 0.3 * len(blocks) ** -0.7 + early + 0.15 * np.log(size) + pattern


class KnownTrials(Trials):
    """Trials of a known law, with noise. failing: {network: the share of its first trial that fails}."""

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


# A prior that expects nothing of patterns, because the truth here contradicts the shipped one
VAGUE = TERMS | {term: (0, 2 * spread) for term, (_, spread) in TERMS.items() if {*term} & {*"AFP"}}


@pytest.fixture
def known_search(small_config):
    """known_search(failing, seed, kind, terms) -> Halving of networks of 16 vocabularies and widths."""

    def make(failing=(), seed=0, kind=Halving, terms=TERMS):
        options = (
            f"seed={seed}",
            "model.blocks=8",
            "search.operations=[attention,dense,identity]",
            "search.method=trials",
        )
        trials = KnownTrials(small_config(*options), dict(failing))
        shapes = list(itertools.product((1000, 2000, 4000, 8000), (64, 96, 128, 192)))
        tables = {
            shape: CostTable(
                FLOPS,
                shape[1] * (5 + shape[0] / 1000),
                {"attention": 2 * shape[1] ** 1.3, "dense": shape[1] ** 1.3, "identity": 0.0},
            )
            for shape in shapes
        }
        own = plain(2000, 64, 8)
        about = trials.config, tables, tables[2000, 64].cost(own.blocks)
        networks = [*first_candidates(*about), *itertools.islice(random_networks(*about, 0.75), 60 * len(shapes))]
        search = kind(trials, NetworkCosts(tables, own), 1.0, networks)
        search.terms = terms
        return search

    return make


def test_trials_find_a_good_network_of_a_known_law_although_vocabularies_change_their_order(known_search):
    search = known_search(terms=VAGUE)
    best, points = search.run(), search.trials.points
    rungs = [[point.network for point in points if point.share == share] for share in (1 / 8, 1 / 4, 1 / 2)]
    assert len(rungs[0]) == len({*rungs[0]}) == 12 and len(rungs[1]) <= 5 and len(rungs[2]) == 2
    assert len({*rungs[1]} - {*rungs[0]}) <= 1  # a newcomer
    assert {*rungs[2]} <= {*rungs[1]} and best in rungs[2]
    assert len({network.vocab_size for network in rungs[0][:4]}) == 4
    assert len({network.vocab_size for network in rungs[1]}) >= 3
    assert all(search.costs.ratio(network) <= 1 + 1e-9 for network in search.networks)
    losses = {network: true_loss(network, 1.0) for network in search.networks}
    order = sorted(losses.values())
    assert losses[best] < order[len(order) // 20], "not among the best 5%"
    assert losses[best] < 1.005 * order[0] and np.median(order) > 1.015 * order[0]
    others = known_search({rungs[0][4]: 1 / 8}, terms=VAGUE)  # one that diverges, and is not tried again
    others.run()
    assert rungs[0][4] in others.trials.tried and len(others.trials.tried) in (12, 13)
    assert others.trials.failed == {rungs[0][4]}
    others = known_search(dict.fromkeys(rungs[2], 1 / 2), terms=VAGUE)  # the next best follow
    assert others.run() in {*rungs[1]} - {*rungs[2]}
    others = known_search(dict.fromkeys(rungs[0][4:], 1 / 8), terms=VAGUE)  # all of a batch
    assert others.run() not in rungs[0][4:]
    for failing in (dict.fromkeys(rungs[0][:4], 1 / 8), dict.fromkeys(rungs[1], 1 / 2)):
        with pytest.raises(RunError, match="no network is left"):
            known_search(failing, terms=VAGUE).run()
    search.trials.points = [point for point in points if point.share == 1 / 8]
    search.trials.tried = {*rungs[0]}
    untried = search.untried()
    newcomer = untried[search.law().predict(untried).argmin()]
    worst = rungs[0][search.law().predict(rungs[0]).argmax()]
    contenders = [*search.contenders(rungs[0], 5, 3)[:4], worst]
    assert search.with_newcomer(contenders, 5) == [*contenders[:4], newcomer]
    assert search.with_newcomer(contenders[:3], 5) == [*contenders[:3], newcomer]  # there is room
    search.networks = rungs[0]  # nothing better is left
    assert search.with_newcomer(contenders, 5) == contenders
    assert search.with_newcomer(contenders[:3], 5) == contenders[:3]


@pytest.mark.parametrize("overfit", [0.0, 0.025, 0.05])
def test_a_text_that_is_read_again_decides_between_vocabularies_at_the_end_of_trainings(known_search, overfit):
    """Large vocabularies overfit after the last trial of a search that does not know that the text is read again."""
    behind = {}
    for text in (Text(), Text(2.75, 2_400_000)):
        search = known_search(terms=VAGUE)
        search.trials.text = text

        def truth(network, share):
            again = max(0, 2.75 * share - 1)
            return true_loss(network, share) * (1 + overfit * again * np.log(network.vocab_size / 1000))

        search.trials.truth = truth
        best = search.run()
        losses = {network: truth(network, 1.0) for network in search.networks}
        behind[text.passes] = losses[best] / min(losses.values()) - 1
    shares = [point.share for point in search.trials.points]
    assert [shares.count(share) for share in (1 / 8, 1 / 4, 1 / 2, 1)] == [8, 5, 3, 2]
    for share, count in ((1 / 4, 4), (1 / 2, 3), (1, 2)):
        kept = [point.network.vocab_size for point in search.trials.points if point.share == share]
        assert len({*kept}) >= count
    assert best in [point.network for point in search.trials.points if point.share == 1]
    assert behind[2.75] < 0.01 and (not overfit or behind[2.75] < behind[1.0]), behind


def test_the_time_of_a_search_counts_each_part_of_a_training_once():
    """Each eighth of a training that trials and the two last trainings take, with an estimate of 8 seconds for one."""
    for rungs, eighths in ((RUNGS, 12 + 1 + 5 + 4), (AGAIN_RUNGS, 8 + 1 + 5 + 6 + 8)):
        rest = 8 * (1 - rungs[-1].share)
        assert whole_seconds(Estimate(0.0, 8.0, 1), rungs) == (AFTER_S, pytest.approx(eighths + 8 + rest))

    assert [rung_steps(rung.share, 4003) for rung in AGAIN_RUNGS] == [500, 1000, 2000, 4003]


def test_the_law_finds_better_networks_than_random_search(known_search):
    """Networks of attention alone are the best. Random search has as many trials, and judges by losses alone."""
    random, truth = load_script("versus/run").RandomHalving, (1.0, 0.3)
    behind = {Halving: [], random: []}
    for seed in range(1, 9):
        found, losses = {}, []
        for kind in behind:
            search = known_search(seed=seed, kind=kind, terms=VAGUE)
            search.trials.attention = (truth,)
            np.random.default_rng(seed).shuffle(search.networks)
            found[kind] = true_loss(search.run(), 1.0, truth)
            assert len(search.trials.tried) in ((12, 13) if kind is Halving else (12,))
            own = [true_loss(network, 1.0, truth) for network in search.networks]
            assert np.median(own) > 1.03 * min(own)
            losses += own
        for kind, loss in found.items():
            behind[kind].append(loss / min(losses) - 1)
    assert np.mean(behind[Halving]) < np.mean(behind[random]) / 2, behind


def test_neighbours_of_the_best_join_until_none_is_new(known_search):
    search = known_search()
    search.networks = plain_ones = [network for network in search.networks if network.is_interleaved]
    search.trials.run(search.first_networks(4), 1 / 8)
    search.add_neighbours()
    assert len(search.networks) > len({*plain_ones}) and {*plain_ones} < {*search.networks}
    best = [search.networks[index] for index in search.law().predict(search.networks).argsort()[: halving.PARENTS]]
    assert not all(network.is_interleaved for network in best)  # a change of a change, too
    for network in best:
        near = neighbours(network, search.config.search.operations, 8)
        assert all(other in search.networks or search.costs.ratio(other) > 1 for other in near)
    assert all(search.costs.ratio(network) <= 1 + 1e-9 for network in search.networks)


def test_the_networks_of_a_batch_differ(known_search):
    search = known_search()
    search.trials.run(search.first_networks(4), 1 / 8)
    others = search.untried()
    search.networks = others[:4]
    assert {*search.promising(4)} == {*search.promising(9)} == {*others[:4]}


def test_law_probability_and_vocabulary_decide_who_goes_on(known_search):
    """The prior expects that a large vocabulary loses its early lead."""
    search = known_search()
    small, large, bad = plain(2000, 64, 4), plain(8000, 64, 4), plain(2000, 64, 2)
    search.trials.points = [Point(small, 1 / 8, 2.0), Point(large, 1 / 8, 1.996)]
    assert search.contenders([large, small], 1, 1) == [small]
    search.trials.points.append(Point(bad, 1 / 8, 2.6))
    assert search.contenders([large, small, bad], 3, 1) == [small, large]
    near, far = [plain(2000, 64, blocks) for blocks in (4, 5, 6)], [plain(1000, 64, 4), plain(8000, 64, 4)]
    for loss, kept in ((2.02, {1000, 2000, 8000}), (2.4, {2000})):  # other vocabularies that are likely, and not
        points = [*((network, 2.0) for network in near), *((network, loss) for network in far)]
        search.trials.points = [Point(network, 1 / 8, loss) for network, loss in points]
        assert {network.vocab_size for network in search.contenders([*near, *far], 3, 3)} == kept
        assert {network.vocab_size for network in search.contenders([*near, *far], 3, 1)} == {2000}


def test_free_places_of_a_rung_go_to_likely_networks_that_train_in_its_steps(known_search):
    search, (_, before, rung, _) = known_search(), AGAIN_RUNGS  # three places of a quarter of a training
    first, second, bad, untried = [plain(2000, 64, blocks) for blocks in (4, 5, 2, 6)]
    losses = {first: 2.0, second: 2.003, bad: 2.6}
    search.trials.points = [Point(network, 1 / 4, loss) for network, loss in losses.items()]
    for networks, going_on, joined in (
        ([first, second, bad], [first], [second]),
        ([first, bad], [first], []),
        ([first, untried], [first], [untried]),  # half a training, from the start
        ([first, second, untried], [first, second], []),
        ([first, second], [first, bad, untried], []),
    ):
        search.networks = networks
        assert search.fill_free_places(going_on, before, rung) == [*going_on, *joined]
    search.networks, search.trials.failed = [first, second], {second}
    assert search.fill_free_places([first], before, rung) == [first]


def test_a_search_uses_the_free_places_of_its_rungs(known_search, monkeypatch):
    """One network goes on, so that places are free: the newcomer takes one, and likely networks the others."""
    search = known_search(terms=VAGUE)
    contenders = search.contenders
    monkeypatch.setattr(search, "contenders", lambda *arguments: contenders(*arguments)[:1])
    search.run()
    quarter = [point.network for point in search.trials.points if point.share == 1 / 4]
    assert len(quarter) > 2
    search = known_search(terms=VAGUE)
    monkeypatch.setattr(search, "contenders", lambda *arguments: contenders(*arguments)[:1])
    monkeypatch.setattr(search, "fill_free_places", lambda networks, *rungs: networks)
    search.run()
    tried = {
        share: [point.network for point in search.trials.points if point.share == share] for share in (1 / 8, 1 / 4)
    }
    assert len(tried[1 / 4]) == 2 and tried[1 / 4][1] not in tried[1 / 8]


def test_the_law_counts_the_steps_that_trials_have_taken(known_search, monkeypatch):
    search, seen = known_search(), []
    monkeypatch.setattr(halving, "Law", lambda points, *rest: seen.extend(points))
    search.trials.steps = {2000: 135, 8000: 128}
    search.trials.points = [Point(plain(size, 64, 4), share, 2.0) for size in (2000, 8000) for share in (1 / 8, 1)]
    search.law()
    assert [point.share for point in seen] == [16 / 135, 1, 1 / 8, 1]


def test_trials_are_evaluated_at_their_ends_alone_unless_the_text_is_read_again(known_search, tmp_path):
    trials, network = known_search().trials, plain(2000, 64, 2)
    for passes, given in ((1.0, True), (2.0, False)):  # then earlier weights may be the best
        trials.text = Text(passes)
        assert ("train.evaluate_every=0" in trials.task(network, 500, tmp_path).arguments) == given


def test_of_equally_good_networks_the_cheapest_is_chosen(known_search, monkeypatch):
    monkeypatch.setattr(halving, "TIE", 0.5)
    search = known_search()
    best = search.run()
    last = [point.network for point in search.trials.points if point.share == 1 / 2]
    assert search.costs.cost(best) == min(map(search.costs.cost, last))


def test_a_chosen_network_that_was_better_before_the_end_is_told():
    def warning(losses):
        points = [{"name": name, "share": share, "bits_per_byte": loss} for name, share, loss in losses]
        return overfit_warning({"name": "a", "trials": points})

    half, others = ("a", 0.5, 1.6), [("b", 0.5, 1.5), ("b", 1.0, 1.4)]
    assert "had 1.6000 bits per byte on valid after 0.5 of a training, and 1.6200" in warning([half, ("a", 1.0, 1.62)])
    assert warning([half]) is warning([half, *others]) is warning([half, *others, ("a", 1.0, 1.59)]) is None


def test_a_warm_up_that_reaches_beyond_the_first_trials_is_told(known_search, capsys):
    for warmup, told in ((384, False), (385, True)):
        search = known_search()
        search.config.train.warmup_steps = warmup
        search.run()
        assert (f"the first trials have 500 steps, and the warm-up {warmup}" in capsys.readouterr().out) == told


def test_pi_is_the_probability_of_each_operation_in_the_best_network(known_search):
    search = known_search()
    search.trials.attention = ((0.9, 0.3),)  # matters much
    best = search.run()
    lines, record = search.history(), search.record(best)
    assert len(lines) == len(search.trials.points) + 1 and lines[0]["step"] == 0
    assert lines[-1]["step"] == lines[0]["of_steps"] == record["train_steps"]
    pi = np.array([line["pi"] for line in lines])
    assert pi.shape[1:] == (8, 3) and np.allclose(pi.sum(axis=2), 1) and lines[0]["operations"][-1] == "identity"
    assert (np.diff(pi[:, :, 2], axis=1) >= 0).all()  # identity stands at the end
    chances = {one["name"]: one["probability"] for one in record["networks"]}
    assert str(search.costs.reference) in chances  # the reference
    longest = max(len(one["blocks"]) for one in record["networks"] if one["probability"])
    assert 0.5 < sum(chances.values()) <= 1 + 1e-9 and (pi[-1, longest:, 2] > 0.8).all()
    places = [lines[0]["operations"].index(block) for block in best.blocks]
    own = pi[:, range(len(places)), places].mean(axis=1)
    assert own[-1] > 1.3 * own[0]  # trials decide
