import json

import numpy as np
import pytest
import yaml
from scipy import stats

from experiments.prior.fit import COUNTED, MISJUDGED, SOURCES, Fit, fit_alone, prior_of, read_points
from nas.comparison.spec import FORMAT as COMPARISON_FORMAT
from nas.comparison.spec import read_contenders, read_settings
from nas.core.config_loading import load_config
from nas.core.files import write_yaml
from nas.core.pattern import FORMAT as PATTERN_FORMAT
from nas.core.pattern import read_pattern
from nas.search.space import NetworkCosts, make_network
from nas.search.surrogate import ALONE, CENTRE, MIXED, Point, Surrogate
from tests.making import load_script
from tests.processes import ROOT

EXPERIMENTS = ROOT / "experiments"


@pytest.mark.parametrize(
    "path", sorted(EXPERIMENTS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(EXPERIMENTS))
)
def test_every_yaml_loads(path):
    content = yaml.safe_load(path.read_text())
    if content.get("format") == PATTERN_FORMAT:
        read_pattern(path)
    elif path.name.startswith("expected"):
        assert content["format"] == "par-expected/1"
    elif content.get("format") == COMPARISON_FORMAT:
        read_contenders(read_settings(path, {}), path, [])
    elif "tables" in content:
        assert NetworkCosts.read(path).reference_cost > 0
    else:
        load_config(path, [])


def misjudged_by_hand(network, share) -> list[float]:
    """What full lengths change in a trial of attention: a constant, its blocks, the attending ones and their places."""
    count, places = len(network.blocks), np.linspace(-1, 1, len(network.blocks)) if len(network.blocks) > 1 else [0.0]
    attends = [block == "attention" for block in network.blocks]
    if share == 1 or not any(attends):
        return [0.0] * 8
    own, others = (np.array(places)[np.equal(attends, which)] for which in (True, False))
    later = own.mean() - others.mean() if len(others) else 0.0
    blocks = np.log(count) - CENTRE[2]
    wrong = np.array([1.0, blocks, np.log((sum(attends) + 0.5) / (count / 2 + 0.5)), later])
    return [*wrong, *(np.log(share) * wrong)]


def test_the_fit_of_the_prior_is_a_regression_with_effects_of_networks_and_sizes():
    """Least squares in which every effect is a column, and every prior a row. The surrogate has seen no text."""
    generator, patterns = np.random.default_rng(0), ("attention", "dense", "attention dense", "dense attention conv")
    networks = [make_network(size, size // 12, own.split()) for size in (768, 1536) for own in patterns]
    texts = [[Point(n, t, 2 + generator.random()) for n in networks[:count] for t in (0.125, 1.0)] for count in (8, 6)]
    points = [(text, point, row % 4 < 2) for text, own in enumerate(texts) for row, point in enumerate(own)]
    terms = {term: (generator.random(), spread) for term, (_, spread) in ALONE.terms.items()}
    surrogate = Surrogate([], networks, prior=(prior := ALONE._replace(terms=terms)))
    known = surrogate.inputs([point.network for _, point, _ in points], [point.share for _, point, _ in points])
    effects = sorted({(text, key) for text, p, _ in points for key in (p.network, p.network[:2])}, key=str)
    columns = []
    for (text, point, full), features in zip(points, known.features, strict=True):
        wrong = full * np.array(misjudged_by_hand(point.network, point.share))
        times = 1.0, np.log(point.share), point.share == 1
        of_text = [time * (text == number) for time in times for number in range(2)]
        own = (text, point.network), (text, point.network[:2])
        columns.append([*features, *wrong, *of_text, *(float(effect in own) for effect in effects)])
    spreads = np.array([*surrogate.spread, *[MISJUDGED] * 8, *[1] * 6, *[prior.own] * len(effects)])
    rows, logs = (
        np.vstack([np.array(columns) / prior.noise, np.diag(1 / spreads)]),
        np.log([p.loss for _, p, _ in points]),
    )
    means = np.append(surrogate.mean, np.zeros(len(spreads) - len(surrogate.mean)))
    wanted = np.concatenate([logs / prior.noise, means / spreads])
    found = Fit([{p: full for text, p, full in points if text == number} for number in range(2)], prior)
    expected = np.linalg.lstsq(rows, wanted, rcond=None)[0][: len(found.names)]
    np.testing.assert_allclose(found.means, expected, atol=1e-6)
    errors = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))[: len(found.names)]
    np.testing.assert_allclose(found.errors, errors, rtol=1e-4)
    columns = np.array(columns)
    covariance = (columns * spreads**2) @ columns.T + prior.noise**2 * np.eye(len(points))
    likelihood = stats.multivariate_normal(columns @ means, covariance).logpdf(logs)
    assert found.likelihood == pytest.approx(likelihood, rel=1e-6)
    assert found.names[-2:] == ["conv", "conv, T"] and len(found.names) == len(surrogate.spread)


def test_the_surrogate_has_the_prior_that_the_fit_gives():
    alone, mixed = read_points()
    sources = [alone[text] for text in SOURCES]
    found = fit_alone(sources).prior(ALONE), prior_of(sources, [mixed[text] for text in COUNTED])
    for prior, expected in zip(found, (ALONE, MIXED), strict=True):
        assert prior.terms.keys() == expected.terms.keys()
        np.testing.assert_allclose([*prior.terms.values()], [*expected.terms.values()], atol=2e-4)


def test_search_and_retrain_of_an_experiment_share_text_and_sizes():
    for name in ("paper", "wikitext2-tensorflow"):
        search, retrain = (load_config(EXPERIMENTS / name / f"{stage}.yaml", []) for stage in ("search", "retrain"))
        assert search.data == retrain.data
        assert search.model.cutoffs == retrain.model.cutoffs
        assert (search.model.d_model, search.model.heads) == (retrain.model.d_model, retrain.model.heads)


def test_the_report_of_demonstrations_compares_predictors(tmp_path, monkeypatch, capsys):
    report, runs = load_script("demo/report"), [tmp_path / str(seed) for seed in (1, 2)]
    for run, (found, usual, alone) in zip(runs, ((0.9, 1.0, 1.5), (1.3, 1.1, 2.5)), strict=True):
        run.mkdir()
        write_yaml(run / "run.yaml", {"seed": int(run.name), "train": {"epochs": 0.5}})
        sizes = {"vocab_size": 2000, "d_model": 64, "blocks": ["attention"], "time_ratio_to_usual": 1.02}
        own = sizes | {"bits_per_byte": found, "network_bits_per_byte": alone}
        others = {"usual": {"bits_per_byte": usual, "network_bits_per_byte": 2.0}, "no-network": {"bits_per_byte": 1.2}}
        write_yaml(run / "summary.yaml", {"found": own, "use": "found", **others})
    monkeypatch.setattr("sys.argv", ["report.py", *map(str, runs)])
    report.main()
    printed = capsys.readouterr().out
    row = "| 1 | 2,000, 64, `a` | 0.5 | 0.9000 | 1.0000 | 1.2000 | -10.0% | -25.0% | -25.0% | 1.02 |"
    assert row in printed and "against usual: found is better in 1 of 2, +4.09% ± 14.09%" in printed
    assert "against no network: found is better in 1 of 2, -8.33% ± 16.67%" in printed


def test_the_report_of_the_frontier_tests_each_cell_and_takes_the_answer_by_valid(tmp_path, monkeypatch, capsys):
    report, results = load_script("frontier/report"), tmp_path / "results"
    results.mkdir()

    def write(name: str, valid: float, test: float, **about) -> None:
        splits = {"valid": valid, "test": test}
        splits = {split: {"bits_per_byte": bits, "word_perplexity": 2 ** (5 * bits)} for split, bits in splits.items()}
        (results / f"{name}.json").write_text(json.dumps(about | splits))

    network = {"vocab_size": 2000, "d_model": 64, "blocks": ["attention"]}
    about = {"network": network, "ratio": 0.9, "network_figures": {"test": {"bits_per_byte": 3.0}}}
    write("speeches,,none,1", 2.0, 2.1, order=5, pieces=4000, network_figures=None)
    for seed, bits in enumerate((1.50, 1.51, 1.52), start=1):
        write(f"speeches,1.0,found,{seed}", bits, bits, **about)
        write(f"speeches,1.0,optuna,{seed}", bits + 0.01, bits + 0.01, **about)
        write(f"speeches,0.4,found,{seed}", 2.01, 1.9, **about)  # on valid no better than no network
        write(f"speeches,0.4,gpt2,{seed}", 3.0, 3.0 + seed / 100, gpt2=[2000, 64, 2], rate=0.003)
        (results / f"speeches,0.1,found,{seed}.json").write_text(json.dumps({"network": None}))
        (results / f"speeches,0.1,gpt2,{seed}.json").write_text(json.dumps({"gpt2": None}))
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path), "--out", str(tmp_path)])
    report.main()
    printed = capsys.readouterr().out
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:5]]
        for line in printed.splitlines()
        if line.startswith("|")
    }
    assert rows["found"] == ["2.100<br>1,448", "2.100<br>1,448", "1.510<br>187.4"]  # exp of the mean of logarithms
    assert rows["GPT-2 of Transformers"] == ["none fits", "3.020<br>35,120", "not run"]
    welch = stats.ttest_ind([1.50, 1.51, 1.52], [1.51, 1.52, 1.53], equal_var=False).pvalue
    assert rows["found against Optuna, trials in the mixture"][2] == f"-0.7%<br>-3.4%<br>p {welch:.2g}<br>missed"
    student = 2 * stats.ttest_1samp([1.50, 1.51, 1.52], 2.1).pvalue  # Holm's correction would need a second test
    assert rows["found against cache and counts, no network"][2].startswith(f"-28.1%<br>-87.1%<br>p {student / 2:.2g}")
    means = json.loads(printed.splitlines()[-1])
    assert means["optuna"]["aim"] == "reached" and means["none"]["words"] == pytest.approx(
        2 ** (5 * -0.59) - 1, abs=1e-4
    )
    assert means["optuna"]["p"] == pytest.approx(10 / 20, abs=0.01)  # of 20 ways to exchange, 10 differ as much
    assert rows["found against cache and counts, no network"][:2] == ["+0.0%<br>+0.0%<br>no seeds<br>missed"] * 2
    table, picture = (tmp_path / "results.csv").read_text(), tmp_path / "frontier.png"
    assert picture.exists() and table.count("cache and counts alone") == 6
    monkeypatch.setattr("sys.argv", ["report.py", "--out", str(tmp_path)])
    report.main()
    assert capsys.readouterr().out == printed and (tmp_path / "results.csv").read_text() == table


def test_holms_correction_is_that_of_the_definition():
    report = load_script("frontier/report")
    assert report.holm([0.01, None, 0.04, 0.03]) == [
        pytest.approx(0.03),
        None,
        pytest.approx(0.06),
        pytest.approx(0.06),
    ]
