"""Patterns within a budget, and their lattice, against enumeration of all patterns."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from nas.core.errors import InputError
from nas.costs.budget import PatternLattice, as_ratio, describe_budget, likeliest_pattern, read_budgets
from nas.costs.cost_table import FLOPS, MILLISECONDS, CostTable
from tests.making import COSTS, NAMES

LATTICE_COSTS, BLOCKS, LIMIT = [3.0, 1.0, 0.1], 4, 6.15
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
    lattice = PatternLattice(LATTICE_COSTS, BLOCKS, LIMIT)
    marginals = lattice.marginals(logits)
    np.testing.assert_allclose(marginals.sum(axis=1), 1.0)
    assert (marginals @ np.array(LATTICE_COSTS)).sum() <= LIMIT
    assert sum(LATTICE_COSTS[index] for index in lattice.best(logits)) <= LIMIT


def test_free_operations_need_no_unit_and_many_blocks_do_not_overflow():
    assert PatternLattice([0.0, 0.0], 3, 0.0).best(np.array([[0.0, 1.0]] * 3)) == [1, 1, 1]
    assert PatternLattice([1.0, 0.5], 300, 300.0).best(np.tile([1.0, 0.0], (300, 1))) == [0] * 300
    with pytest.raises(ValueError, match="no pattern of 4 blocks is within the limit"):
        PatternLattice(LATTICE_COSTS, BLOCKS, 0.3)


def test_a_pattern_fits_a_budget_that_equals_its_cost():
    """Rounding of sums must not push a pattern over the budget that equals its cost."""
    costs = CostTable(FLOPS, 0.3, {"attention": 0.1 + 0.2, "dense": 0.1, "identity": 0.0})
    pi = np.array([[0.98, 0.01, 0.01]] * 7)
    for count in range(8):
        pattern = ["attention"] * count + ["identity"] * (7 - count)
        assert likeliest_pattern(pi, NAMES, costs, costs.ratio(pattern)).count("attention") == count


def test_a_budget_that_is_too_low_is_reported_with_the_lowest_possible_one():
    pi = np.array([[0.5, 0.4, 0.1]] * 2)
    with pytest.raises(InputError, match=r"fits a budget of 0.4: the cheapest costs 0.500 .*; give at least that"):
        likeliest_pattern(pi, NAMES, COSTS, 0.4)
    patterns = [sorted(likeliest_pattern(pi, NAMES, COSTS, budget)) for budget in (0.5, 0.7, 1.0)]
    assert patterns == [["identity", "identity"], ["dense", "identity"], ["attention", "dense"]]


def test_a_lattice_of_many_blocks_and_operations_has_few_nodes():
    source = np.random.default_rng(0)
    lattice = PatternLattice([3.1, 2.2, 2.3, 1.0, 0.0], 32, 60.0)
    assert max(lattice.level_sizes) <= math.comb(36, 4)
    assert len(lattice.best(np.log(source.dirichlet(np.ones(5), size=32)))) == 32


def test_budgets_are_positive_numbers():
    assert read_budgets("1,0.5,0.65,1.0,0.65000001") == [0.5, 0.65, 1.0]
    assert read_budgets("2.5ms, 0.7,2.5 ms") == [0.7, "2.5ms"]
    for bad in ("", "x", "0.5;0.6", "0", "-1", "nan", "inf", "0.5,,1", "10.5", "0.5,20", "2.5s"):
        with pytest.raises(InputError, match="is not a budget: give ratios"):
            read_budgets(bad)


def test_a_time_for_a_text_is_a_budget():
    times = replace(COSTS, unit=MILLISECONDS)
    assert as_ratio("12ms", times, 2) == pytest.approx(0.6) and as_ratio(0.7, times, 2) == 0.7
    assert as_ratio("12ms", replace(times, reference_cost=40.0), 2) == pytest.approx(0.3)  # of a slower reference
    with pytest.raises(InputError, match="a budget of 60ms needs measured costs"):
        as_ratio("60ms", COSTS, 2)


def test_a_budget_is_described_and_warns_if_it_has_no_room_for_attention():
    about, warning = describe_budget(0.79, 2, NAMES, COSTS)
    assert "so the blocks may cost 58% of" in about  # 0.79 * 20 - 10 of 10
    assert "WARNING" in warning and "give search.latency.target=0.800 or more" in warning
    assert len(describe_budget(0.8, 2, NAMES, COSTS)) == 1 and len(describe_budget(0.7, 2, NAMES[1:], COSTS)) == 1
    costly = replace(COSTS, blocks=COSTS.blocks | {"sparse_fixed": 9.0, "identity": 1.0})
    lines = describe_budget(0.79, 2, ["sparse_fixed", *NAMES], costly)
    assert "give search.latency.target=0.850" in lines[1]  # 10 + 6 + 1 of 20
    with pytest.raises(InputError, match=r"only ii is within search.latency.target=0.69, .* give 0.700 or more"):
        describe_budget(0.69, 2, NAMES, COSTS)
