import json
import math
from collections import defaultdict
from fnmatch import fnmatch
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from nas.comparison.spec import FORMAT as COMPARISON_FORMAT
from nas.comparison.spec import read_contenders, read_settings
from nas.core.config_loading import load_config
from nas.core.files import write_yaml
from nas.core.pattern import FORMAT as PATTERN_FORMAT
from nas.core.pattern import read_pattern
from nas.search.space import NetworkCosts
from tests.making import load_script, results
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


@pytest.mark.parametrize("name", [pytest.param("frontier", marks=pytest.mark.slow), "python"])
def test_a_table_of_the_frontier_is_repeated_by_its_networks(name, tmp_path, monkeypatch, capsys):
    opponents, report = load_script("frontier/opponents"), load_script("frontier/report")
    table = EXPERIMENTS / "frontier" / f"{name}.csv"
    budgets = report.budgets_of(opponents.read_table(table))
    opponents.write_recorded(table, tmp_path, 5)
    for budget, networks in budgets.items():
        file = tmp_path / budget / "compare.yaml"
        found = {one.name: (one.key, len(one.seeds)) for one in read_contenders(read_settings(file, {}), file, [])}
        assert found == {one.name: (one.key, len(one.runs)) for one in networks}
    monkeypatch.setattr("sys.argv", ["report.py", str(table), "--out", str(tmp_path)])
    report.main()
    assert (tmp_path / table.name).read_text() == table.read_text() and (tmp_path / f"{name}.png").exists()
    printed = capsys.readouterr().out.splitlines()
    (_, _, *lines), shown = [line for line in printed if line.startswith("|")], {}
    for line in lines:
        own, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        shown |= {(budget, own): cell for budget, cell in zip(budgets, cells, strict=True) if cell}
    rows = defaultdict(list)
    for row in opponents.read_table(table):
        rows[row["budget"], row["name"]].append(row)
    words = {key: np.array([float(row["test_word_perplexity"]) for row in own]) for key, own in rows.items()}
    assert shown.keys() == rows.keys()
    for (budget, own), values in words.items():
        spread = f" ± {values.std(ddof=1) / len(values) ** 0.5:,.1f}" if len(values) > 1 else ""
        difference = math.expm1(np.log(words[budget, "searched"]).mean() - np.log(values).mean())
        test = "" if own == "searched" else f" ({difference:+.1%}, 95% interval * p ?*)"
        expected = f"{values.mean():,.1f}{spread}{test} at {float(rows[budget, own][0]['time_ratio']):.3f}"
        assert fnmatch(shown[budget, own], expected)
        beyond = [line for line in printed if line.startswith(f"{budget}: beyond 1.05") and f" {own} (" in line]
        assert bool(beyond) == (float(rows[budget, own][0]["time_ratio"]) > 1.05 * float(budget))


def test_a_table_of_the_frontier_has_the_budgets_and_new_times_of_its_folders(tmp_path, monkeypatch):
    report, run = load_script("frontier/report"), tmp_path / "0.65" / "compare"
    networks = {"searched": "300-16-a", "interleaved": "310-32-ad"}
    for name, network in networks.items():
        folder = run / "runs" / f"{network}-1"
        folder.mkdir(parents=True)
        content = results({"searched": 99.0, "interleaved": 101.0}[name], letters=network[7:])
        write_yaml(folder / "results.yaml", content)
        write_yaml(folder / "provenance.yaml", {"vocab_size": 300})
    write_yaml(run / "comparison.yaml", {"patterns": networks, "margin": 0.01})
    times = {name: {"ms_per_1000_bytes": 2.0 + i, "ratio": 0.5 + i} for i, name in enumerate(networks.values())}
    monkeypatch.setattr(report, "measure_networks", lambda names, overrides: {name: times[name] for name in names})
    monkeypatch.setattr("sys.argv", ["report.py", str(run), "--out", str(tmp_path)])
    report.main()
    table = report.read_table(tmp_path / "frontier.csv")
    columns = "budget", "name", "network", "ms_per_1000_bytes", "time_ratio", "test_word_perplexity"
    assert [[row[column] for column in columns] for row in table] == [
        ["0.65", "searched", "300-16-a", "2", "0.5", "99"],
        ["0.65", "interleaved", "310-32-ad", "3", "1.5", "101"],
    ]


def test_named_networks_are_timed_relative_to_the_reference(text_folder, cache, monkeypatch):
    timed = {}

    def text_times(networks, *_):
        timed.update(networks)
        return {name: {"ratio": number} for number, name in enumerate(networks)}

    monkeypatch.setattr("nas.costs.measurement.text_times", text_times)
    options = [f"data.source={text_folder}", f"data.cache={cache}", "data.vocab_size=300", "search.vocab_size=[]"]
    helpers = load_script("helpers")
    assert helpers.measure_networks(["310-16-h2-ad"], options) == {"310-16-h2-ad": {"ratio": 1}}
    (blocks, config, corpus), (own_blocks, own_config, own_corpus) = timed.values()
    assert len(blocks) == 12 and (corpus.vocab_size, config.model.d_model) == (300, 64)
    assert own_blocks == ["attention", "dense"] and (own_corpus.vocab_size, own_config.model.d_model) == (310, 16)
    assert own_config.model.heads == 2


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
