"""The comparison of three searches: its random networks, and its table."""

from types import SimpleNamespace

import numpy as np
import pytest

from nas.costs.cost_table import FLOPS, CostTable
from nas.networks.space import BAND
from tests.making import load_script


@pytest.fixture(scope="module")
def versus():
    return load_script("versus/run")


def test_random_networks_are_of_the_budget_and_of_every_vocabulary_and_width(versus, small_config):
    config = small_config("model.blocks=6", "search.operations=[attention,dense,identity]", "search.method=trials")
    blocks = {"attention": 2.0, "dense": 1.0, "identity": 0.0}
    tables = {(size, 8): CostTable(FLOPS, size / 100, blocks) for size in (100, 200, 2000)}
    costs = SimpleNamespace(tables=tables)
    found = versus.random_networks(config, costs, list(tables), 10.0, 40, np.random.default_rng(0), BAND)
    assert len({*found}) == 40 and {network.vocab_size for network in found} == {100, 200}  # 2,000 are too costly
    ratios = [tables[network[:2]].cost(network.blocks) / 10 for network in found]
    assert BAND - 1e-9 <= min(ratios) < 0.85 and max(ratios) <= 1 + 1e-9
    few = versus.random_networks(config, costs, [(100, 8)], 2.0, 40, np.random.default_rng(0), BAND)
    assert [network.blocks for network in few] == [("dense",)]


def test_the_report_compares_each_search_with_the_trials(versus, tmp_path, capsys):
    jobs = versus.Jobs(tmp_path, [], "*")
    for name, perplexities in {
        "trials": (100, 101, 99),
        "random": (110, 111, 109),
        "gumbel": (100.5, 99.5, 101),
    }.items():
        jobs.do(name, lambda: {"vocab_size": 900, "d_model": 8, "blocks": ["dense"], "seconds": 5.0})
        for seed, value in enumerate(perplexities, start=1):
            jobs.do(f"{name}-{seed}", lambda: {"valid": {"word_perplexity": value}})  # noqa: B023
    table = versus.report(jobs, [1, 2, 3])
    assert table["random"]["behind"] == pytest.approx(0.1, abs=1e-3) and table["random"]["p"] < 0.001
    assert (
        table["gumbel"]["p"] > 0.5 and "| trials | 900, 8, d | 100.0 ± 0.6 | +0.0% |  | 5 |" in capsys.readouterr().out
    )
