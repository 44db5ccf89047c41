from collections import Counter

import numpy as np
import pytest

from nas.core.pattern import abbreviate, interleaved, read_pattern
from nas.costs.baselines import RULES, par, sandwich
from tests.processes import ROOT

PATTERNS = ROOT / "experiments" / "patterns"


def test_rules_for_32_blocks_are_the_published_patterns():
    for rule in RULES:
        assert RULES[rule](32) == read_pattern(PATTERNS / f"{rule}.yaml")["blocks"]
    # s^k (sf)^(n-k) f^k with a sandwiching coefficient of 6, as in arXiv 1911.03864
    assert abbreviate(sandwich(32)) == "a" * 6 + "ad" * 10 + "d" * 6
    short = [abbreviate(RULES[rule](3)) for rule in ("attention-only", "dense-only", "interleaved")]
    assert short == ["aaa", "ddd", "ada"]


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
