"""The ranking experiment: its networks, and its comparison of orders."""

from pathlib import Path

import pytest

from experiments.helpers import kendall_tau
from tests.making import load_script

README = Path(__file__).parents[1] / "experiments" / "ranking" / "README.md"


@pytest.fixture(scope="module")
def ranking():
    return load_script("ranking/run")


def test_kendalls_tau_between_recorded_seeds_equals_the_recorded_value(ranking):
    rows = [line.strip("| \n").split(" | ") for line in README.read_text().splitlines() if line.startswith("|")]
    losses = {row[0]: [float(nll) for nll in row[1:]] for row in rows if len(row) == 3 and row[1][0].isdigit()}
    del losses["adadad"]
    assert losses.keys() == {ranking.abbreviate(pattern) for pattern in ranking.random_patterns()}
    assert kendall_tau(*zip(*losses.values(), strict=True)) == pytest.approx(0.895, abs=5e-4)


def test_the_patterns_are_different_networks(ranking):
    patterns = ranking.random_patterns()
    assert len({ranking.network(pattern) for pattern in patterns}) == len(patterns) == 20
    assert ranking.network(["identity", "dense", "identity", "attention"]) == "da"
    assert ranking.network(["identity"]) == "nothing"
    assert patterns == ranking.random_patterns()
