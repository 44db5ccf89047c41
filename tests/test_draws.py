"""Random networks of a given cost (experiments/versus/draws.py)."""

import itertools
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from experiments.versus.draws import random_networks, random_patterns, sample_paths
from nas.core.errors import InputError
from nas.core.pattern import abbreviate, abbreviate_network
from nas.costs.budget import PatternLattice
from nas.costs.cost_table import FLOPS, MILLISECONDS, CostTable
from tests.making import NAMES
from tests.test_lattice import BLOCKS, LIMIT, LOGITS, probabilities
from tests.test_lattice import COSTS as LATTICE_COSTS

COSTS = CostTable(MILLISECONDS, 3.0, {"attention": 5.0, "dense": 1.0, "identity": 0.0})


def test_samples_within_a_budget_have_the_conditional_frequencies():
    draws, expected = 40_000, probabilities(LATTICE_COSTS, LOGITS, LIMIT)
    noise = np.random.default_rng(1).gumbel(size=(draws, *LOGITS.shape))
    drawn = [tuple(path) for path in sample_paths(PatternLattice(LATTICE_COSTS, BLOCKS, LIMIT), LOGITS, noise).tolist()]
    assert set(drawn) <= expected.keys()
    observed = np.array([drawn.count(path) for path in expected])
    wanted = draws * np.array(list(expected.values()))
    chi_square, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(expected) - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_random_networks_are_of_the_budget_and_of_every_vocabulary_and_width(small_config):
    config = small_config("model.blocks=6", "search.operations=[attention,dense,identity]", "search.method=trials")
    blocks = {"attention": 2.0, "dense": 1.0, "identity": 0.0}
    tables = {(size, 8): CostTable(FLOPS, size / 100, blocks) for size in (100, 200, 2000)}
    found = list(islice(random_networks(config, tables, 10.0, 0.75), 40))
    sizes = Counter(network.vocab_size for network in found)
    assert len({*found}) == 40 and sizes.keys() == {100, 200} and min(sizes.values()) > 10  # 2,000 are too costly
    ratios = [tables[network[:2]].cost(network.blocks) / 10 for network in found]
    assert 0.75 - 1e-9 <= min(ratios) < 0.85 and max(ratios) <= 1 + 1e-9
    few = random_networks(config, {(100, 8): tables[100, 8]}, 2.0, 0.75)
    assert [network.blocks for network in few] == [("dense",)]


def test_random_patterns_have_the_given_cost_and_are_different_networks():
    patterns = list(itertools.islice(random_patterns(8, NAMES, COSTS, 20.0, 0.1, seed=1), 30))
    assert len({abbreviate_network(pattern) for pattern in patterns}) == 30
    assert all(len(pattern) == 8 and abs(COSTS.cost(pattern) / 20 - 1) <= 0.1 for pattern in patterns)
    again = itertools.islice(random_patterns(8, NAMES, COSTS, 20.0, 0.1, seed=1), 30)
    assert list(again) == patterns
    other = itertools.islice(random_patterns(8, NAMES, COSTS, 20.0, 0.1, seed=2), 30)
    assert list(other) != patterns


def test_random_patterns_are_uniform_in_their_number_of_blocks_and_then_among_networks_of_the_cost():
    """The first patterns of many seeds have the probabilities of the enumerated networks, each in one spelling."""
    costs = CostTable(MILLISECONDS, 0.0, {"attention": 2.0, "dense": 1.0, "identity": 0.0})
    fitting = {}  # by number of blocks
    for count in range(1, 5):
        paths = itertools.product(["attention", "dense"], repeat=count)
        fitting[count] = [abbreviate([*p, *["identity"] * (4 - count)]) for p in paths if costs.cost(p) == 4]
    assert {count: len(networks) for count, networks in fitting.items()} == {1: 0, 2: 1, 3: 3, 4: 1}
    draws = 1800
    firsts = (next(random_patterns(4, NAMES, costs, 4.0, 0.1, seed)) for seed in range(draws))
    counts = Counter(map(abbreviate, firsts))
    expected = {name: draws / 3 / len(names) for names in fitting.values() for name in names}
    assert counts.keys() == expected.keys()
    assert sum((counts[name] - count) ** 2 / count for name, count in expected.items()) < 18.5  # 99.9%, 4 degrees


def test_random_patterns_end_if_no_new_network_is_left():
    patterns = list(random_patterns(3, ["dense", "identity"], COSTS, 5.0, 0.01, seed=0))
    assert [abbreviate_network(pattern) for pattern in patterns] == ["dd"]


def test_random_patterns_refuse_a_cost_that_no_pattern_has():
    with pytest.raises(InputError, match="no pattern of 4 blocks costs 50 ms, within 3%"):
        next(random_patterns(4, NAMES, COSTS, 50.0, 0.03, seed=0))
