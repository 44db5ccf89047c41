"""Searches on corpora with known patterns, one for each kind. experiments/planted runs ten seeds of each."""

import numpy as np
import pytest

from tests.making import load_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def planted():
    return load_script("planted/run")


@pytest.mark.parametrize(("name", "penalty"), [("nowhere", True), ("once", True), ("early", True), ("once", False)])
def test_the_search_finds_the_planted_pattern(planted, name, penalty):
    """`late` is missing, because no search finds its pattern; see experiments/planted/README.md."""
    overrides = ["train.threads=1", *([planted.PENALTY] if penalty else [])]
    found = planted.search(name, 1, overrides)["found"]
    assert planted.is_right(name, found, penalty), found


def test_is_right_accepts_the_right_patterns_only(planted):
    right = {
        ("nowhere", False): "d ad aad ddd",
        ("nowhere", True): "d dd ddd",
        ("once", False): "a aa dad aii",
        ("once", True): "a ad dai iia",
        ("early", False): "ad aad adi dad",
        ("early", True): "ad add dad aid",
        ("late", False): "da dda ada aada",
        ("late", True): "da dda dad dia",
    }
    wrong = {
        ("nowhere", False): "a iii",
        ("nowhere", True): "ad iii",
        ("once", False): "d iii",
        ("once", True): "aa ada ddd",
        ("early", False): "da dda aaa",
        ("early", True): "aad da aaa",
        ("late", False): "ad aad iai",
        ("late", True): "daa ada aid",
    }
    for expected, cases in ((True, right), (False, wrong)):
        for (name, penalty), patterns in cases.items():
            for pattern in patterns.split():
                assert planted.is_right(name, pattern, penalty) == expected, (name, penalty, pattern)


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
