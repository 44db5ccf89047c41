"""The ranking experiment's own arithmetic: which networks are compared, and how orders are."""

import itertools

import pytest

from tests.making import load_script


@pytest.fixture(scope="module")
def ranking():
    return load_script("ranking/run")


def test_kendalls_tau_is_the_share_of_pairs_in_the_same_order_minus_the_others(ranking):
    assert ranking.kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert ranking.kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert ranking.kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert ranking.kendall_tau([1, 1, 1], [1, 2, 3]) == 0
    orders = [ranking.kendall_tau(range(4), order) for order in itertools.permutations(range(4))]
    assert sum(orders) == pytest.approx(0)


def test_the_patterns_are_different_networks(ranking):
    patterns = ranking.random_patterns()
    assert len({ranking.network(pattern) for pattern in patterns}) == len(patterns) == 20
    assert ranking.network(["identity", "dense", "identity", "attention"]) == "da"
    assert ranking.network(["identity"]) == "nothing"
    assert patterns == ranking.random_patterns()
