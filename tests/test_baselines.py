import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nas.core.errors import InputError
from nas.core.pattern import abbreviate, interleaved, network, read_pattern
from nas.costs.baselines import (
    RULES,
    par,
    random_patterns,
    rules_within,
    sandwich,
)
from nas.costs.cost_table import MILLISECONDS, CostTable

PATTERNS = Path(__file__).parents[1] / "experiments" / "patterns"
OPERATIONS = ["attention", "dense", "identity"]
COSTS = CostTable(MILLISECONDS, 3.0, {"attention": 5.0, "dense": 1.0, "identity": 0.0})


def test_rules_for_32_blocks_are_the_published_patterns():
    for rule in RULES:
        assert RULES[rule](32) == read_pattern(PATTERNS / f"{rule}.yaml")["blocks"]


@pytest.mark.parametrize("blocks", range(1, 65))
def test_rules_place_attention_and_dense_as_documented(blocks):
    sandwiched, sparse = sandwich(blocks), par(blocks)
    assert Counter(sandwiched) == Counter(interleaved(blocks))
    ends = round(blocks // 2 * 6 / 16)
    assert sandwiched[:ends] == ["attention"] * ends and sandwiched[blocks - ends :] == ["dense"] * ends
    assert sandwiched[ends : blocks - ends] == interleaved(blocks - 2 * ends)
    places = [index for index, name in enumerate(sparse) if name == "attention"]
    assert len(sparse) == blocks and len(places) == max(1, round(blocks / 5)) and set(sparse) <= {"attention", "dense"}
    assert places[0] == 0 and places[-1] < 2 * blocks / 3
    assert len(set(np.diff(places))) <= 1  # evenly spread


def test_sandwich_and_par_of_twelve_blocks():
    assert abbreviate(sandwich(12)) == "aaadadadaddd"
    assert abbreviate(par(12)) == "adddaddddddd"


def test_hybrid_rules_have_one_full_attention_in_six_four_and_three():
    assert abbreviate(RULES["local-global"](12)) == "wdwdwdwdwdad"
    assert abbreviate(RULES["linear-full"](12)) == "ldldldadldad"
    assert abbreviate(RULES["conv-attention"](12)) == "cdcdadcdcdad"
    rules = ("local-global", "window", 6), ("linear-full", "linear", 4), ("conv-attention", "conv", 3)
    for name, cheap, group in rules:
        for blocks in range(1, 65):
            pattern = RULES[name](blocks)
            assert [part == "dense" for part in pattern] == [part == "dense" for part in interleaved(blocks)]
            counts = Counter(pattern)
            attending = counts["attention"] + counts[cheap]
            rest = 1 if name == "linear-full" and attending % group else 0
            assert counts["attention"] == max(1, attending // group + rest)
            if name == "linear-full":
                assert [part for part in pattern if part != "dense"][-1] == "attention"
            assert pattern[0] == cheap or attending == 1


def rules_of(blocks, operations, costs, limit):
    return rules_within(blocks, operations, lambda pattern: costs.cost(pattern) <= limit)


def test_hybrid_rules_within_a_cost_need_their_operations():
    costs = CostTable(MILLISECONDS, 3.0, COSTS.blocks | {"window": 2.0, "linear": 3.0})
    rules = rules_of(6, ["attention", "window", "linear", "dense", "identity"], costs, 16.5)
    assert abbreviate(rules["local-global"]) == "wdwdad" and abbreviate(rules["linear-full"]) == "ldldai"
    assert abbreviate(rules["interleaved with linear"]) == "ldldld"
    assert {"local-global", "linear-full"}.isdisjoint(rules_of(6, ["attention", "window", "linear"], costs, 99.0))
    assert "local-global" not in rules_of(6, ["attention", "linear", "dense"], costs, 99.0)


def test_rules_within_a_cost_also_have_sparse_attention():
    costs = CostTable(MILLISECONDS, 3.0, COSTS.blocks | {"sparse_fixed": 2.0})
    rules = rules_of(4, ["attention", "sparse_fixed", "dense", "identity"], costs, 9.5)
    expected = dict.fromkeys(("interleaved", "sandwich", "par", "one attention"), "adii")
    expected |= {"interleaved with sparse_fixed": "fdfd", "sandwich with sparse_fixed": "ffdd"}
    expected |= {"par with sparse_fixed": "fddd", "one attention with sparse_fixed": "fddd"}
    assert {name: abbreviate(pattern) for name, pattern in rules.items()} == expected
    names = list(rules_of(4, OPERATIONS, COSTS, 9.5))
    assert names == ["interleaved", "sandwich", "par", "one attention"]
    assert rules_of(2, ["sparse_fixed", "identity"], costs, 99.0) == {}  # no rule without dense


def test_random_patterns_have_the_given_cost_and_are_different_networks():
    patterns = list(itertools.islice(random_patterns(8, OPERATIONS, COSTS, 20.0, 0.1, seed=1), 30))
    assert len({network(pattern) for pattern in patterns}) == 30
    assert all(len(pattern) == 8 and abs(COSTS.cost(pattern) / 20 - 1) <= 0.1 for pattern in patterns)
    again = itertools.islice(random_patterns(8, OPERATIONS, COSTS, 20.0, 0.1, seed=1), 30)
    assert list(again) == patterns
    other = itertools.islice(random_patterns(8, OPERATIONS, COSTS, 20.0, 0.1, seed=2), 30)
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
    firsts = (next(random_patterns(4, OPERATIONS, costs, 4.0, 0.1, seed)) for seed in range(draws))
    counts = Counter(map(abbreviate, firsts))
    expected = {name: draws / 3 / len(names) for names in fitting.values() for name in names}
    assert counts.keys() == expected.keys()
    assert sum((counts[name] - count) ** 2 / count for name, count in expected.items()) < 18.5  # 99.9%, 4 degrees


def test_random_patterns_end_if_no_new_network_is_left():
    patterns = list(random_patterns(3, ["dense", "identity"], COSTS, 5.0, 0.01, seed=0))
    assert [network(pattern) for pattern in patterns] == ["dd"]


def test_random_patterns_refuse_a_cost_that_no_pattern_has():
    with pytest.raises(InputError, match="no pattern of 4 blocks costs 50 ms, within 3%"):
        next(random_patterns(4, OPERATIONS, COSTS, 50.0, 0.03, seed=0))
