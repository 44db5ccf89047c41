"""The ranking experiment: its networks, and its comparison of orders."""

from pathlib import Path

import pytest
import yaml

from experiments.helpers import kendall_tau
from tests.making import load_script

FOLDER = Path(__file__).parents[1] / "experiments" / "ranking"


@pytest.fixture(scope="module")
def ranking():
    return load_script("ranking/run")


def test_the_recorded_losses_give_the_taus_of_the_readme(ranking):
    recorded, readme = yaml.safe_load((FOLDER / "expected.yaml").read_text()), (FOLDER / "README.md").read_text()
    supernets = recorded["supernets"]
    patterns = [ranking.expand(short) for short in supernets.pop("patterns")]
    assert patterns == ranking.reference_patterns()
    alone = [recorded["alone"][ranking.network(pattern)] for pattern in patterns]
    for supernet in supernets.values():
        assert f"{kendall_tau(supernet['losses'], alone):.3f}" in readme


def test_the_patterns_are_different_networks(ranking):
    patterns = ranking.random_patterns()
    assert len({ranking.network(pattern) for pattern in patterns}) == len(patterns) == 20
    assert ranking.network(["identity", "dense", "identity", "attention"]) == "da"
    assert ranking.network(["identity"]) == "nothing"
    assert patterns == ranking.random_patterns()
