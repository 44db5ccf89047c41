"""The comparison of three searches, the ranking of judges, and the opponents of the found network."""

from types import SimpleNamespace

import pytest

from nas.comparison.spec import read_contenders, read_settings
from nas.costs.cost_table import FLOPS, CostTable
from nas.search.space import NetworkCosts
from tests.making import load_script, plain


def test_the_report_compares_the_networks_of_each_search_with_those_of_the_trials(tmp_path, capsys):
    versus = load_script("versus/run")
    jobs = versus.Jobs(tmp_path, [], "*")
    found = {"trials": (100, 101, 99), "random": (110, 111, 109), "gumbel": (100.5, 99.5, 101)}
    network = {"vocab_size": 900, "d_model": 8, "blocks": ["dense"]}
    for name, perplexities in found.items():
        for seed, value in enumerate(perplexities, start=1):
            figures = {"word_perplexity": value}
            jobs.do(f"{name}-{seed}", lambda: {"network": network, "seconds": 5.0})
            jobs.do(f"{name}-{seed}-trained", lambda: {"valid": figures, "test": figures})  # noqa: B023
    jobs.do("gumbel-4", lambda: {"network": network | {"blocks": []}, "seconds": 5.0})
    table, shown = versus.report(jobs), capsys.readouterr().out
    for split in ("valid", "test"):
        random, gumbel = table[f"random, {split}"], table[f"gumbel, {split}"]
        assert random["behind"] == pytest.approx(0.1, abs=1e-3) and random["p"] < 0.001
        assert random["p_ranks"] == pytest.approx(2 * 2 / 20)  # all pairs; twice, because two are tested
        assert gumbel["p_ranks"] > 0.7 and gumbel["p"] is None  # one search found no network
        assert gumbel["searches"] == 4
    assert "| valid | trials | 3 of 3 | 100.0 | 1.0% | +0.0% |  |  |" in shown
    assert "| gumbel | 4 | 900, 8, `no block` | none |  | 5 |" in shown
    assert "| trials | 2 | 900, 8, `d` | 101.0 | 101.0 | 5 |" in shown


def test_each_judge_has_a_tau(capsys):
    blocks = [["attention"], ["attention", "dense"], ["attention", "dense", "dense"], ["dense"]]
    rungs = [{"0.125": 3.0 + index, "0.25": 2.5 - index / 5, "0.5": 2.2 - index / 9} for index in range(4)]
    found = []
    for index, own in enumerate(blocks):
        sizes = {"vocab_size": 900 + 100 * (index == 1), "d_model": 8 * index + 8, "blocks": own}
        found.append(sizes | {"flops": len(own), "rungs": rungs[index], "bits_per_byte": 2.0 - index / 10})
    ranking = load_script("versus/ranking").report(found)
    taus, within = ranking["tau"], ranking["within"]
    assert within["loss after 0.125"] == -1 and within["vocabulary (larger is better)"] == 0
    assert within["FLOPs (more is better)"] == pytest.approx(0, abs=1e-3)
    assert taus["loss after 0.125"] == -1 and taus["loss after 0.25"] == taus["loss after 0.5"] == 1
    assert taus["FLOPs (more is better)"] == pytest.approx(0.183, abs=1e-3) and taus["surrogate before trials"] > 0
    shown = capsys.readouterr().out
    assert "| 900-32-d | 1.7000 | -1 | -900 | 0 |" in shown and "surrogate after 0.5" in shown


def known_costs() -> NetworkCosts:
    blocks = {"attention": 2.0, "dense": 1.0, "conv": 0.5}
    tables = {shape: CostTable(FLOPS, shape[1] / 16, blocks) for shape in ((2000, 16), (2000, 64), (4000, 999))}
    return NetworkCosts(tables, plain(2000, 64, 4))  # 4 + 6


def test_opponents_are_the_deepest_networks_of_a_rule_and_can_be_compared(tmp_path):
    opponents, costs = load_script("frontier/opponents"), known_costs()
    deepest = opponents.rule_networks("conv-attention", costs, [*costs.tables], 0.75, 6)  # at most 7.5
    assert [str(network) for network in deepest] == ["2000-16-cdcdad", "2000-64-cda"]
    names = "searched", "random-1"
    patterns = {name: network.to_dict() | {"heads": 2} for name, network in zip(names, deepest, strict=True)}
    opponents.write_comparison(tmp_path, patterns, 5)
    file = tmp_path / "compare.yaml"
    first, second = read_contenders(read_settings(file, {}), file, [])
    assert (first.name, first.key, first.seeds) == ("searched", "2000-16-h2-cdcdad", [1, 2, 3, 4, 5])
    assert (second.name, second.key, second.seeds) == ("random-1", "2000-64-cda", [1])


def test_rules_have_the_budget_of_the_search_and_narrower_is_the_widest_that_fits(tmp_path, monkeypatch, small_config):
    opponents, costs = load_script("frontier/opponents"), known_costs()
    config, given = small_config("search.latency.source=flops", "search.latency.target=0.75", "model.blocks=6"), []
    monkeypatch.setattr(opponents, "open_space", lambda *_: (config, {}, [*costs.tables], costs, None))
    trials = SimpleNamespace(config=config, results={}, folder=tmp_path)
    monkeypatch.setattr(opponents, "open_trials", lambda *_: trials)

    def halve(strategy):
        given.append((strategy.budget, strategy.networks))
        return strategy.networks[0]

    monkeypatch.setattr(opponents, "successive_halving", halve)
    found = opponents.choose_sizes(tmp_path, [], "conv-attention")
    ((budget, networks),) = given
    assert budget == 0.75 and networks == opponents.rule_networks("conv-attention", costs, [*costs.tables], 0.75, 6)
    assert found["network"] == networks[0].to_dict() and found["ratio"] <= 0.75
    jobs = SimpleNamespace(do=lambda *_: None, get={"narrow": {"64": 1.0, "48": 0.8, "32": 0.7, "16": 0.5}}.get)
    patterns = opponents.patterns_of(jobs, "0.75", ["narrower"], tmp_path, [])
    assert patterns["narrower"]["d_model"] == 32 and patterns["narrower"]["blocks"] == [*costs.reference.blocks]
