"""Searches on corpora with known patterns, one for each kind. experiments/planted runs ten seeds of each."""

import numpy as np
import pytest

from tests.making import load_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def planted():
    return load_script("planted/run")


@pytest.mark.parametrize("name", ["nowhere", "late"])
def test_trials_find_the_planted_pattern_freely_and_within_the_budget(planted, name):
    """Shorter than the experiment, which shows all four corpora."""
    found = planted.search(name, 1, ["train.threads=1", "train.batch_size=32"])
    assert planted.is_right(name, found["free"]) and planted.is_right(name, found["budget"]), found
    assert planted.which_fit(name, [])[found["budget"]]


def test_is_right_accepts_the_right_patterns_only(planted):
    right = {"nowhere": "d ad ddd", "once": "a dad a", "early": "ad add dad", "late": "da dda ada"}
    wrong = {"nowhere": "a aa", "once": "d dd", "early": "da dda aaa", "late": "ad aad a"}
    for expected, cases in ((True, right), (False, wrong)):
        for name, patterns in cases.items():
            for pattern in patterns.split():
                assert planted.is_right(name, pattern) == expected, (name, pattern)


def test_the_known_pattern_just_meets_its_budget(planted):
    for name, corpus in planted.CORPORA.items():
        within = planted.which_fit(name, [])
        assert within[corpus.known] and planted.is_right(name, corpus.known) and not within["aaa"]


def test_streams_follow_their_rules(planted):
    """Nine tokens in ten are among those that the rule allows."""
    maps, pairs = planted.MAPS, planted.PAIRS
    allowed = {
        "nowhere": lambda x, i: {m[x[i - 1]] for m in maps},
        "once": lambda x, i: {m[x[i - 2]] for m in maps},
        "early": lambda x, i: {pairs[x[i - 1], x[i - 2]]},
        "late": lambda x, i: {m[x[i - k]] for m in maps for k in (1, 2, 3, 4)},
    }
    for name, rule in allowed.items():
        stream = planted.CORPORA[name].stream(4000, 5)
        follows = np.mean([stream[i] in rule(stream, i) for i in range(4, len(stream))])
        assert 0.88 < follows < 0.95, name


def test_both_searches_of_a_seed_see_the_losses_that_each_would_see_alone(planted, monkeypatch):
    """They share trainings, which cannot go back. A network of the free search may begin at the second rung."""
    seen = {}

    class Training:
        def __init__(self, blocks, *_):
            self.blocks, self.reached = tuple(blocks), 0.0

        def until(self, share):
            assert share > self.reached
            self.reached = share
            return {"bits_per_byte": share}

    def halve(strategy):
        first = next(network for network in strategy.networks if network.blocks == ("dense", "attention"))
        free = strategy.budget == float("inf")
        for share in (1 / 4,) if free else (1 / 8, 1 / 4):
            found = strategy.trials.train([first], share)
            seen[free, share] = found[first]["valid"]["bits_per_byte"]
        return first

    monkeypatch.setattr(planted, "Training", Training)
    monkeypatch.setattr("nas.search.strategy.successive_halving", halve)
    planted.search("early", 1, ["train.threads=1"])
    assert seen == {(True, 1 / 4): 1 / 4, (False, 1 / 8): 1 / 8, (False, 1 / 4): 1 / 4}
