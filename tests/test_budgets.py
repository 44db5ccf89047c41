"""Patterns within a budget."""

import itertools
import math

import numpy as np
import pytest

from nas.core.errors import InputError
from nas.costs.budget import NoPatternFits, likeliest_path, patterns_within, read_budgets
from nas.costs.cost_table import FLOPS, CostTable
from nas.costs.lattice import PatternLattice
from tests.making import COSTS, NAMES


def brute_force(scores, costs, budget) -> float:
    """The highest score of all paths that cost at most the budget; -inf if there is none."""
    blocks, paths = np.arange(len(scores)), map(list, itertools.product(range(len(costs)), repeat=len(scores)))
    return max((scores[blocks, path].sum() for path in paths if costs[path].sum() <= budget), default=-math.inf)


@pytest.mark.parametrize("seed", range(30))
def test_the_pattern_within_a_budget_equals_that_of_brute_force(seed):
    source = np.random.default_rng(seed)
    blocks, operations = int(source.integers(1, 7)), int(source.integers(1, 5))
    costs = source.integers(0, 9, operations) / 8.0  # sums are exact, and often equal
    if seed % 3 == 0:
        costs = source.random(operations)
    scores = np.log(source.dirichlet(np.full(operations, 0.3), size=blocks) + 1e-12)
    for budget in source.random(20) * costs.max() * blocks * 1.1:
        expected = brute_force(scores, costs, budget)
        if expected == -math.inf:
            with pytest.raises(ValueError, match="no pattern of"):
                PatternLattice(costs.tolist(), blocks, budget)
            continue
        path = PatternLattice(costs.tolist(), blocks, budget).best(scores)
        assert costs[path].sum() <= budget + 1e-8
        assert scores[np.arange(blocks), path].sum() == pytest.approx(expected, abs=1e-8)


def test_a_pattern_fits_a_budget_that_equals_its_cost():
    """Rounding of sums must not push a pattern over the budget that equals its cost."""
    costs = CostTable(FLOPS, 0.3, {"attention": 0.1 + 0.2, "dense": 0.1, "identity": 0.0})
    pi = np.array([[0.98, 0.01, 0.01]] * 7)
    for count in range(8):
        pattern = ["attention"] * count + ["identity"] * (7 - count)
        path = likeliest_path(pi, NAMES, costs, costs.ratio(pattern))
        assert sum(index == 0 for index in path) == count


def test_patterns_with_few_attentions_use_95_percent_of_the_highest_cost():
    prefers_identity = np.tile([0.0, 0.0, 1.0], (20, 1))
    path = patterns_within(9.0, 20, NAMES, COSTS, 0).best(prefers_identity)
    assert (path.count(1), path.count(2)) == (19, 1)  # 19 dense blocks cost exactly 0.95 of 20


def test_a_budget_without_patterns_names_the_least_budget_or_the_limit_of_attentions():
    with pytest.raises(NoPatternFits, match=r"fits a budget of 0.4: the cheapest costs 0.500 .*; give at least that"):
        patterns_within(0.4, 2, NAMES, COSTS, 1)  # overhead 10 of interleaved's 20
    costly = CostTable(FLOPS, 0.0, {"attention": 1.0, "dense": 3.0})
    with pytest.raises(NoPatternFits, match="no pattern with 0 attention blocks or fewer fits 1"):
        patterns_within(1.0, 2, NAMES[:2], costly, 0)
    pi = np.array([[0.5, 0.4, 0.1]] * 2)
    paths = [likeliest_path(pi, NAMES, COSTS, budget) for budget in (0.5, 0.7, 1.0)]
    assert [sorted(path) for path in paths] == [[2, 2], [1, 2], [0, 1]]


def test_a_lattice_of_many_blocks_and_operations_has_few_nodes():
    source = np.random.default_rng(0)
    lattice = PatternLattice([3.1, 2.2, 2.3, 1.0, 0.0], 32, 60.0)
    assert max(lattice.level_sizes) <= math.comb(36, 4)
    assert len(lattice.best(np.log(source.dirichlet(np.ones(5), size=32)))) == 32


def test_budgets_are_positive_numbers():
    assert read_budgets("1,0.5,0.65,1.0,0.65000001") == [0.5, 0.65, 1.0]
    for bad in ("", "x", "0.5;0.6", "0", "-1", "nan", "inf", "0.5,,1", "10.5", "0.5,20"):
        with pytest.raises(InputError, match="is not a budget: give ratios"):
            read_budgets(bad)
