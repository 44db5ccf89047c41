"""The comparison of searches: random networks, judges, opponents, and the fit of the surrogate's prior."""

import csv
import itertools
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.versus.draws import random_networks, random_patterns, sample_paths
from nas.comparison.spec import read_contenders, read_settings
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import abbreviate, abbreviate_network, expand
from nas.costs.budget import PatternLattice
from nas.costs.cost_table import FLOPS, MILLISECONDS, CostTable
from nas.search.space import NetworkCosts, make_network
from nas.search.surrogate import NOISE, OWN, TERMS, Point, Surrogate
from tests.making import NAMES, load_script, plain
from tests.test_budgets import BLOCKS, LATTICE_COSTS, LIMIT, LOGITS, probabilities


def test_the_fit_is_a_regression_with_random_effects_of_networks_and_sizes():
    """Least squares in which every effect is a column, and every prior a row. The surrogate has seen no text."""
    prior, generator = load_script("versus/prior"), np.random.default_rng(0)
    patterns = [["attention"], ["dense"], ["attention", "dense"], ["dense", "attention", "dense"]]
    networks = [make_network(size, 8 * size // 100, own) for size in (800, 1600) for own in patterns]
    texts = [[Point(n, t, 2 + generator.random()) for n in networks[:count] for t in (0.125, 1.0)] for count in (8, 6)]
    full = [[row % 4 < 2 for row in range(len(own))] for own in texts]  # judged at full lengths, if it is a trial
    surrogate, points = Surrogate([], networks), [point for own in texts for point in own]
    known = surrogate.inputs([point.network for point in points], [point.share for point in points])
    columns = [list(row) for row in known.features]
    priors = [(0, spread) for spread in (*prior.WIDER * surrogate.spread, *[prior.MISJUDGED] * 8, *[1] * 6)]
    effects = sorted(
        {(text, key) for text, own in enumerate(texts) for p in own for key in (p.network, p.network[:2])}, key=str
    )
    priors += [(0, OWN)] * len(effects)
    of_text = [text for text, own in enumerate(texts) for _ in own]
    for row, point, text, long in zip(columns, points, of_text, [flag for own in full for flag in own], strict=True):
        blocks = point.network.blocks
        attending = [place for place, block in enumerate(blocks) if block == "attention"]
        wrong = [0.0] * 4
        if long and point.share < 1 and attending:
            places = np.linspace(-1, 1, len(blocks)) if len(blocks) > 1 else np.zeros(1)
            others = [places[place] for place in range(len(blocks)) if place not in attending]
            later = np.mean(places[attending]) - np.mean(others) if others else 0.0
            share = np.log((len(attending) + 0.5) / (len(blocks) / 2 + 0.5))
            wrong = [1.0, np.log(len(blocks)) - surrogate.mean_log_sizes[2], share, later]
        row += [*wrong, *(np.log(point.share) * np.array(wrong))]
        for value in (1.0, np.log(point.share), point.share == 1):
            row += [value * (text == number) for number in range(2)]
        row += [float(effect in ((text, point.network), (text, point.network[:2]))) for effect in effects]
    means, spreads = np.array(priors, dtype=float).T
    rows = np.vstack([np.array(columns) / NOISE, np.diag(1 / spreads)])
    wanted = np.concatenate([np.log([point.loss for point in points]) / NOISE, means / spreads])
    expected = np.linalg.lstsq(rows, wanted, rcond=None)[0][: len(TERMS)]
    errors = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))[: len(TERMS)]
    found = prior.fit([dict(zip(own, flags, strict=True)) for own, flags in zip(texts, full, strict=True)])
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    np.testing.assert_allclose(found[1], errors, rtol=1e-4)


def test_trials_of_a_search_replace_its_own_and_each_loss_counts_once(tmp_path, monkeypatch):
    prior, network = load_script("versus/prior"), make_network(2000, 64, expand("ad"))
    table, run = tmp_path / "trainings.csv", tmp_path / "runs" / "trials" / "2000-64-ad"
    rows = [("wikitext2", "earlier", 2000, 64, "ad", 0.5, loss, "full") for loss in (1.43219, 1.4322)]
    rows += [("wikitext2", "runs/trials", 2000, 64, "ad", 0.5, 1.7, "trial"), ("stdlib", *rows[0][1:])]
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([prior.COLUMNS, *rows])
    run.mkdir(parents=True)
    write_yaml(run / "config.yaml", {"data": {"vocab_size": 2000}, "model": {"d_model": 64}, "pattern": expand("ad")})
    for step, loss in ((4, 1.45), (8, 1.4)):  # a whole trial is a training: results.yaml has its loss
        write_yaml(run / f"trial-{step}.yaml", {"step": step, "of_steps": 8, "valid": {"bits_per_byte": loss}})
    write_yaml(run / "results.yaml", {"valid": {"bits_per_byte": 1.3}, "train_tokens_per_s": 9.0})
    for name, found in (("TRAININGS", table), ("read_grid", lambda text: []), ("read_frontier", lambda text: [])):
        monkeypatch.setattr(prior, name, found)
    prior.write_trainings("wikitext2", [tmp_path / "runs"])
    wanted = {(0.5, 1.4322): True, (0.5, 1.45): False, (1.0, 1.3): False}
    assert prior.read_points("wikitext2") == {Point(network, *key): full for key, full in wanted.items()}
    assert prior.read_points("stdlib") == {Point(network, 0.5, 1.4322): True}


COSTS = CostTable(MILLISECONDS, 3.0, {"attention": 5.0, "dense": 1.0, "identity": 0.0})


def test_samples_within_a_budget_have_the_conditional_frequencies():
    draws, expected = 40_000, probabilities(LATTICE_COSTS, LOGITS, LIMIT)
    noise = np.random.default_rng(1).gumbel(size=(draws, *LOGITS.shape))
    drawn = [tuple(path) for path in sample_paths(PatternLattice(LATTICE_COSTS, BLOCKS, LIMIT), LOGITS, noise).tolist()]
    assert set(drawn) <= expected.keys()
    observed = np.array([drawn.count(path) for path in expected])
    wanted = draws * np.array(list(expected.values()))
    chi_square, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(expected) - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_random_networks_are_of_the_budget_and_of_every_vocabulary_and_width(small_config):
    config = small_config("model.blocks=6", "search.operations=[attention,dense,identity]", "search.method=trials")
    blocks = {"attention": 2.0, "dense": 1.0, "identity": 0.0}
    tables = {(size, 8): CostTable(FLOPS, size / 100, blocks) for size in (100, 200, 2000)}
    found = list(islice(random_networks(config, tables, 10.0, 0.75), 40))
    sizes = Counter(network.vocab_size for network in found)
    assert len({*found}) == 40 and sizes.keys() == {100, 200} and min(sizes.values()) > 10  # 2,000 are too costly
    ratios = [tables[network[:2]].cost(network.blocks) / 10 for network in found]
    assert 0.75 - 1e-9 <= min(ratios) < 0.85 and max(ratios) <= 1 + 1e-9
    few = random_networks(config, {(100, 8): tables[100, 8]}, 2.0, 0.75)
    assert [network.blocks for network in few] == [("dense",)]


def test_random_patterns_have_the_given_cost_and_are_different_networks():
    patterns = list(itertools.islice(random_patterns(8, NAMES, COSTS, 20.0, 0.1, seed=1), 30))
    assert len({abbreviate_network(pattern) for pattern in patterns}) == 30
    assert all(len(pattern) == 8 and abs(COSTS.cost(pattern) / 20 - 1) <= 0.1 for pattern in patterns)
    again = itertools.islice(random_patterns(8, NAMES, COSTS, 20.0, 0.1, seed=1), 30)
    assert list(again) == patterns
    other = itertools.islice(random_patterns(8, NAMES, COSTS, 20.0, 0.1, seed=2), 30)
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
    firsts = (next(random_patterns(4, NAMES, costs, 4.0, 0.1, seed)) for seed in range(draws))
    counts = Counter(map(abbreviate, firsts))
    expected = {name: draws / 3 / len(names) for names in fitting.values() for name in names}
    assert counts.keys() == expected.keys()
    assert sum((counts[name] - count) ** 2 / count for name, count in expected.items()) < 18.5  # 99.9%, 4 degrees


def test_random_patterns_end_if_no_new_network_is_left():
    patterns = list(random_patterns(3, ["dense", "identity"], COSTS, 5.0, 0.01, seed=0))
    assert [abbreviate_network(pattern) for pattern in patterns] == ["dd"]


def test_random_patterns_refuse_a_cost_that_no_pattern_has():
    with pytest.raises(InputError, match="no pattern of 4 blocks costs 50 ms, within 3%"):
        next(random_patterns(4, NAMES, COSTS, 50.0, 0.03, seed=0))


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
    assert "| gumbel | 4 | 900, 8, `none` | none |  | 5 |" in shown
    assert "| trials | 2 | 900, 8, `d` | 101.0 | 101.0 | 5 |" in shown


@pytest.mark.slow
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
