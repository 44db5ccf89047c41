import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from experiments.prior.fit import BETWEEN, MISJUDGED, WIDER, fit
from nas.comparison.spec import FORMAT as COMPARISON_FORMAT
from nas.comparison.spec import read_contenders, read_settings
from nas.core.config_loading import load_config
from nas.core.files import write_yaml
from nas.core.pattern import FORMAT as PATTERN_FORMAT
from nas.core.pattern import read_pattern
from nas.search.space import make_network
from nas.search.surrogate import NOISE, OWN, Point, Surrogate
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
    else:
        load_config(path, [])


def misjudged_by_hand(network, share, surrogate) -> list[float]:
    """What full lengths change in a trial of attention: a constant, its blocks, the attending ones and their places."""
    count, places = len(network.blocks), np.linspace(-1, 1, len(network.blocks)) if len(network.blocks) > 1 else [0.0]
    attends = [block == "attention" for block in network.blocks]
    if share == 1 or not any(attends):
        return [0.0] * 8
    own, others = (np.array(places)[np.equal(attends, which)] for which in (True, False))
    later = own.mean() - others.mean() if len(others) else 0.0
    blocks = np.log(count) - surrogate.mean_log_sizes[2]
    wrong = np.array([1.0, blocks, np.log((sum(attends) + 0.5) / (count / 2 + 0.5)), later])
    return [*wrong, *(np.log(share) * wrong)]


def test_the_fit_of_the_prior_is_a_regression_with_effects_of_networks_and_sizes():
    """Least squares in which every effect is a column, and every prior a row. The surrogate has seen no text."""
    generator, patterns = np.random.default_rng(0), ("attention", "dense", "attention dense", "dense attention conv")
    networks = [make_network(size, size // 12, own.split()) for size in (768, 1536) for own in patterns]
    texts = [[Point(n, t, 2 + generator.random()) for n in networks[:count] for t in (0.125, 1.0)] for count in (8, 6)]
    points = [(text, point, row % 4 < 2) for text, own in enumerate(texts) for row, point in enumerate(own)]
    surrogate = Surrogate([], networks, terms={term: (0.0, spread) for term, spread in BETWEEN.items()})
    known = surrogate.inputs([point.network for _, point, _ in points], [point.share for _, point, _ in points])
    effects = sorted({(text, key) for text, p, _ in points for key in (p.network, p.network[:2])}, key=str)
    columns = []
    for (text, point, full), features in zip(points, known.features, strict=True):
        wrong = full * np.array(misjudged_by_hand(point.network, point.share, surrogate))
        times = 1.0, np.log(point.share), point.share == 1
        of_text = [time * (text == number) for time in times for number in range(2)]
        own = (text, point.network), (text, point.network[:2])
        columns.append([*features, *wrong, *of_text, *(float(effect in own) for effect in effects)])
    spreads = np.array([*WIDER * surrogate.spread, *[MISJUDGED] * 8, *[1] * 6, *[OWN] * len(effects)])
    rows = np.vstack([np.array(columns) / NOISE, np.diag(1 / spreads)])
    wanted = np.concatenate([np.log([point.loss for _, point, _ in points]) / NOISE, np.zeros(len(spreads))])
    names, means, errors = fit([{p: full for text, p, full in points if text == number} for number in range(2)])
    expected = np.linalg.lstsq(rows, wanted, rcond=None)[0][: len(names)]
    np.testing.assert_allclose(means, expected, atol=1e-6)
    np.testing.assert_allclose(errors, np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))[: len(names)], rtol=1e-4)
    assert names[-2:] == ["conv", "conv, T"] and len(names) == len(surrogate.spread)


def test_search_and_retrain_of_an_experiment_share_text_and_sizes():
    for name in ("paper", "wikitext2-tensorflow"):
        search, retrain = (load_config(EXPERIMENTS / name / f"{stage}.yaml", []) for stage in ("search", "retrain"))
        assert search.data == retrain.data
        assert search.model.cutoffs == retrain.model.cutoffs
        assert (search.model.d_model, search.model.heads) == (retrain.model.d_model, retrain.model.heads)


@pytest.mark.slow
def test_each_number_of_passes_is_trained_once(text_folder, cache, tmp_path, monkeypatch, capsys):
    passes = load_script("passes/run")
    monkeypatch.setattr(passes, "PASSES", (0.5, 1))
    columns = {"dropout 0": ["model.dropout=0"], "dropout 0.5": ["model.dropout=0.5"]}
    monkeypatch.setattr(passes, "COLUMNS", columns)
    options = [f"data.source={text_folder}", f"data.cache={cache}", "data.tokenizer=words", "data.vocab_size=null"]
    options += ["model.d_model=16", "model.d_ffn=16", "model.ngram_rows=[]", "train.weight_decay=0.02"]
    options += ["train.batch_size=2", "train.segment=8", "train.memory=8"]
    monkeypatch.setattr("sys.argv", ["run.py", *options, "--out", str(tmp_path / "out")])
    passes.main()
    first = capsys.readouterr().out
    monkeypatch.setattr(passes, "train", None)  # a second call trains nothing
    passes.main()
    assert capsys.readouterr().out == first
    best = json.loads(first.splitlines()[-1])["best_valid_nll"]
    cells = {f"{column}, {count} passes" for column in columns for count in (0.5, 1)}
    assert best.keys() == cells and len(set(best.values())) == 4
    results = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*-*.json")]
    assert len(results) == 4
    for result in results:
        assert len(result["nlls"]) == passes.EVALUATIONS and result["best"] == min(result["nlls"])


def test_the_report_of_demonstrations_compares_networks_and_names_the_file_that_decides(tmp_path, monkeypatch, capsys):
    report, runs = load_script("demo/report"), [tmp_path / str(seed) for seed in (1, 2)]
    for name, content in (("a.py", "one\ntwo\n"), ("b.py", "three\n"), ("other.py", "four\n")):
        (tmp_path / name).write_text(content)
    (tmp_path / "test.txt").write_text("three\none\ntwo\n")
    bits = {"1/found": [2, 2, 4], "1/usual": [2, 4, 4], "2/found": [6, 2, 4], "2/usual": [2, 4, 4]}  # of each line
    for run, (found, usual) in zip(runs, ((0.9, 1.0), (1.3, 1.1)), strict=True):
        network = {"vocab_size": 2000, "d_model": 64, "blocks": ["attention"], "time_ratio_to_usual": 1.02}
        for name in ("found", "usual"):
            (run / name).mkdir(parents=True)
        write_yaml(run / "run.yaml", {"seed": int(run.name), "train": {"epochs": 0.5}})
        write_yaml(run / "summary.yaml", {"found": network, "use": "found"})
        for name, value in (("found", found), ("usual", usual)):
            splits = {"test": {"bits_per_byte": value}, "valid": {"bits_per_byte": value + 0.1}}
            write_yaml(run / name / "results.yaml", splits | {"train_tokens_per_s": 1.0})

    class Model:
        def __init__(self, path):
            self.nll = np.log(2) * np.array(bits[f"{path.parent.name}/{path.name}"])

        def score(self, text):
            assert text == (tmp_path / "test.txt").read_text()
            return SimpleNamespace(line_nll=lambda: self.nll)

    monkeypatch.setattr("nas.load_model", Model)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("sys.argv", ["report.py", *map(str, runs)])
    report.main()
    printed = capsys.readouterr().out
    assert "| 1 | 2,000, 64, `a` | 0.5 | 0.9000 | 1.0000 | -10.0% | -9.1% | 1.02 |" in printed
    assert "test: found is better in 1 of 2, +4.1% ± 14.1%" in printed
    monkeypatch.setattr("sys.argv", ["report.py", *map(str, runs), "--files", str(tmp_path / "test.txt")])
    report.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "| `" in line or "%," in line]
    assert rows == [
        "| `b.py` | 42.9% | 0.67 | 0.33 | 0.2020 |",  # 6 of 14 bytes; differences of 0 and 4 bits
        "| `a.py` | 57.1% | 0.75 | 1.00 | 0.0000 |",
        "all files: +0.0%, standard deviation 28.3%",  # 8/10 and 12/10
        "without b.py: -25.0%, standard deviation 0.0%",
    ]
