"""The lattice of patterns within a cost, against enumeration of all patterns."""

import itertools

import numpy as np
import pytest

from nas.costs.budget import PatternLattice

COSTS, BLOCKS, LIMIT = [3.0, 1.0, 0.1], 4, 6.15
LOGITS = np.random.default_rng(0).normal(size=(BLOCKS, 3))


def probabilities(costs, logits, limit) -> dict[tuple[int, ...], float]:
    """The probability of every pattern within the limit under pi, by enumeration."""
    weights = {
        path: np.exp(logits[range(len(logits)), path].sum())
        for path in itertools.product(range(len(costs)), repeat=len(logits))
        if sum(costs[index] for index in path) <= limit
    }
    return {path: weight / sum(weights.values()) for path, weight in weights.items()}


@pytest.mark.parametrize("seed", range(60))
def test_marginals_and_the_best_path_equal_those_of_enumeration(seed):
    source = np.random.default_rng(seed)
    blocks, operations = int(source.integers(1, 7)), int(source.integers(1, 5))
    costs = source.integers(0, 9, operations) / 8.0  # sums are exact, and often equal
    if seed % 3 == 0:
        costs = source.random(operations)
    logits, limit = source.normal(size=(blocks, operations)), source.random() * 1.2 * costs.max() * blocks
    expected = probabilities(costs, logits, limit)
    if not expected:
        with pytest.raises(ValueError, match=f"no pattern of {blocks} blocks is within the limit"):
            PatternLattice(costs.tolist(), blocks, limit)
        return
    lattice, marginals = PatternLattice(costs.tolist(), blocks, limit), np.zeros((blocks, operations))
    for path, probability in expected.items():
        marginals[range(blocks), path] += probability
    np.testing.assert_allclose(lattice.marginals(logits), marginals, atol=1e-12)
    assert tuple(lattice.best(logits)) == max(expected, key=expected.get)


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


def test_many_blocks_do_not_overflow():
    lattice = PatternLattice([1.0, 0.5], 300, 300.0)
    assert lattice.best(np.tile([1.0, 0.0], (300, 1))) == [0] * 300
