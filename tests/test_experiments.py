import json
from pathlib import Path

import pytest
import yaml

from nas.comparison.spec import FORMAT as COMPARISON_FORMAT
from nas.comparison.spec import read_contenders, read_settings
from nas.core.config_loading import load_config
from nas.core.pattern import FORMAT as PATTERN_FORMAT
from nas.core.pattern import read_pattern
from nas.networks.costs import NetworkCosts
from tests.making import load_script

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FOLDERS = ["paper", "wikitext2-tensorflow"]


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


@pytest.mark.parametrize("name", ["frontier", "python"])
def test_a_table_of_the_frontier_is_repeated_by_its_networks(name, tmp_path, monkeypatch, capsys):
    opponents, report = load_script("frontier/opponents"), load_script("frontier/report")
    table = EXPERIMENTS / "frontier" / f"{name}.csv"
    budgets = report.budgets_of(opponents.read_table(table))
    opponents.write_recorded(table, tmp_path, 5)
    for budget, results in budgets.items():
        file = tmp_path / budget / "compare.yaml"
        found = {one.name: (one.key, len(one.seeds)) for one in read_contenders(read_settings(file, {}), file, [])}
        assert found == {one.name: (one.key, len(one.runs)) for one in results}
    monkeypatch.setattr("sys.argv", ["report.py", str(table), "--out", str(tmp_path)])
    report.main()
    assert (tmp_path / table.name).read_text() == table.read_text() and (tmp_path / f"{name}.png").exists()
    assert "| searched | " in capsys.readouterr().out


def test_search_and_retrain_of_an_experiment_share_text_and_sizes():
    for name in FOLDERS:
        search, retrain = (load_config(EXPERIMENTS / name / f"{stage}.yaml", []) for stage in ("search", "retrain"))
        assert search.data == retrain.data
        assert search.model.cutoffs == retrain.model.cutoffs
        assert (search.model.d_model, search.model.heads) == (retrain.model.d_model, retrain.model.heads)


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
