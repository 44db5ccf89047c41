"""Random networks of a given cost."""

import itertools
from collections import Counter

import numpy as np

from experiments.prior.draws import random_networks, random_patterns, sample_paths
from nas.core.pattern import abbreviate
from nas.costs.budget import PatternLattice
from nas.costs.cost_table import FLOPS, MILLISECONDS, CostTable
from tests.making import NAMES
from tests.test_budgets import BLOCKS, LATTICE_COSTS, LIMIT, LOGITS, probabilities


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
    found = list(itertools.islice(random_networks(config, tables, 10.0, 0.75), 40))
    sizes = Counter(network.vocab_size for network in found)
    assert len({*found}) == 40 and sizes.keys() == {100, 200} and min(sizes.values()) > 10  # 2,000 are too costly
    ratios = [tables[network[:2]].cost(network.blocks) / 10 for network in found]
    assert 0.75 - 1e-9 <= min(ratios) < 0.85 and max(ratios) <= 1 + 1e-9
    assert found == list(itertools.islice(random_networks(config, tables, 10.0, 0.75), 40))
    few = random_networks(config, {(100, 8): tables[100, 8]}, 2.0, 0.75)  # it ends
    assert [network.blocks for network in few] == [("dense",)]


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
