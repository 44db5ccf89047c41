"""The lattice of patterns within a cost, against enumeration of all patterns."""

import itertools

import numpy as np
import pytest
import torch

from nas.costs.lattice import PatternLattice
from nas.search.sampling import PathsWithinBudget
from tests.making import generator

COSTS, BLOCKS, LIMIT = [3.0, 1.0, 0.1], 4, 6.15
LOGITS = np.random.default_rng(0).normal(size=(BLOCKS, 3))


def probabilities() -> dict[tuple[int, ...], float]:
    """The probability of every pattern within the limit under pi, by enumeration."""
    weights = {
        path: np.exp(sum(LOGITS[block, index] for block, index in enumerate(path)))
        for path in itertools.product(range(3), repeat=BLOCKS)
        if sum(COSTS[index] for index in path) <= LIMIT
    }
    return {path: weight / sum(weights.values()) for path, weight in weights.items()}


def test_marginals_equal_those_of_all_patterns_within_the_limit():
    expected = np.zeros((BLOCKS, 3))
    for path, probability in probabilities().items():
        expected[range(BLOCKS), path] += probability
    assert 0 < len(probabilities()) < 3**BLOCKS
    np.testing.assert_allclose(PatternLattice(COSTS, BLOCKS, LIMIT).marginals(LOGITS), expected, atol=1e-13)


def test_samples_within_a_budget_have_the_conditional_frequencies():
    draws, expected = 40_000, probabilities()
    paths = PathsWithinBudget(PatternLattice(COSTS, BLOCKS, LIMIT))
    drawn = paths.sample(torch.from_numpy(LOGITS), draws, generator(1))
    assert set(drawn) <= expected.keys()
    observed = np.array([drawn.count(path) for path in expected])
    wanted = draws * np.array(list(expected.values()))
    chi_square, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(expected) - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_without_a_tight_limit_the_marginals_are_pi():
    pi = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(PatternLattice(COSTS, BLOCKS, 100.0).marginals(LOGITS), pi, atol=1e-13)


def test_extreme_logits_neither_overflow_nor_leave_the_limit():
    logits = np.tile([900.0, 0.0, -900.0], (BLOCKS, 1))
    lattice = PatternLattice(COSTS, BLOCKS, LIMIT)
    marginals = lattice.marginals(logits)
    np.testing.assert_allclose(marginals.sum(axis=1), 1.0)
    assert (marginals @ np.array(COSTS)).sum() <= LIMIT
    assert sum(COSTS[index] for index in lattice.best(logits)) <= LIMIT


def test_free_operations_need_no_unit():
    assert PatternLattice([0.0, 0.0], 3, 0.0).best(np.array([[0.0, 1.0]] * 3)) == [1, 1, 1]


def test_a_limit_below_the_cheapest_pattern_is_an_error():
    with pytest.raises(ValueError, match="no pattern of 4 blocks is within the limit"):
        PatternLattice(COSTS, BLOCKS, 0.3)


@pytest.mark.parametrize("seed", range(30))
def test_marginals_and_the_best_path_equal_those_of_enumeration(seed):
    source = np.random.default_rng(seed)
    costs, logits = source.integers(0, 5, 3) / 4.0, source.normal(size=(BLOCKS, 3))
    limit = source.random() * costs.max() * BLOCKS
    weights = {
        path: np.exp(logits[range(BLOCKS), path].sum())
        for path in itertools.product(range(3), repeat=BLOCKS)
        if sum(costs[index] for index in path) <= limit
    }
    if not weights:
        with pytest.raises(ValueError, match="no pattern of 4 blocks"):
            PatternLattice(costs.tolist(), BLOCKS, limit)
        return
    lattice, expected = PatternLattice(costs.tolist(), BLOCKS, limit), np.zeros((BLOCKS, 3))
    for path, weight in weights.items():
        expected[range(BLOCKS), path] += weight / sum(weights.values())
    np.testing.assert_allclose(lattice.marginals(logits), expected, atol=1e-12)
    assert tuple(lattice.best(logits)) == max(weights, key=weights.get)


def test_many_blocks_do_not_overflow():
    lattice = PatternLattice([1.0, 0.5], 300, 300.0)
    assert lattice.best(np.tile([1.0, 0.0], (300, 1))) == [0] * 300
