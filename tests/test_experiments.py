import json
from pathlib import Path

import pytest
import yaml

from nas.comparison.spec import FORMAT as COMPARISON_FORMAT
from nas.comparison.spec import given_contenders, read_settings
from nas.core.config_checks import simplify
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.pattern import FORMAT as PATTERN_FORMAT
from nas.core.pattern import read_pattern
from tests.making import load_script
from tests.processes import succeed

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
FOLDERS = ["demo", "hybrid", "inherit", "paper", "wikitext2", "wikitext2-best", "wikitext2-tensorflow"]


@pytest.mark.parametrize(
    "path", sorted(EXPERIMENTS.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_every_yaml_loads(path):
    content = yaml.safe_load(path.read_text())
    if content.get("format") == PATTERN_FORMAT:
        read_pattern(path)
    elif path.name.startswith("expected"):
        assert content["format"] == "par-expected/1"
    elif content.get("format") == COMPARISON_FORMAT:
        settings = read_settings(path, {})
        recipe = load_config(settings.retrain, [])
        blocks = (load_config(settings.search, []) if settings.search else recipe).model.blocks
        for contender in given_contenders(settings, path, blocks, recipe):
            simplify(contender.blocks, recipe, path)
    else:
        load_config(path, [])


def test_search_and_retrain_of_an_experiment_share_text_and_sizes():
    for name in FOLDERS:
        search, retrain = (load_config(EXPERIMENTS / name / f"{stage}.yaml", []) for stage in ("search", "retrain"))
        assert search.data == retrain.data
        assert search.model.cutoffs == retrain.model.cutoffs
        assert (search.model.d_model, search.model.heads) == (retrain.model.d_model, retrain.model.heads)


def test_each_number_of_passes_is_trained_once_and_evaluated_with_several_memories(
    text_folder, cache, tmp_path, monkeypatch, capsys
):
    passes = load_script("passes/run")
    monkeypatch.setattr(passes, "PASSES", (0.5, 1))
    columns = {"dropout 0": ["model.dropout=0"], "dropout 0.5": ["model.dropout=0.5"]}
    monkeypatch.setattr(passes, "COLUMNS", columns)
    monkeypatch.setattr(passes, "SETTINGS", {"weight decay 0.5": ["train.weight_decay=0.5"]})
    monkeypatch.setattr(passes, "SETTINGS_PASSES", 1)
    options = [f"data.source={text_folder}", f"data.cache={cache}", "data.tokenizer=words", "data.vocab_size=null"]
    options += ["model.d_model=16", "model.d_ffn=16", "model.ngram_rows=[]"]
    options += ["train.batch_size=2", "train.segment=8", "train.memory=8"]
    monkeypatch.setattr("sys.argv", ["run.py", *options, "--out", str(tmp_path / "out")])
    passes.main()
    first = capsys.readouterr().out
    monkeypatch.setattr(passes, "train", None)  # a second call trains nothing
    passes.main()
    assert capsys.readouterr().out == first
    best = json.loads(first.splitlines()[-1])["best_valid_nll"]
    cells = {f"{column}, {count} passes" for column in columns for count in (0.5, 1)}
    assert best.keys() == cells | {"weight decay 0.5"} and len(set(best.values())) == 5
    results = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*-*.json")]
    assert len(results) == 5
    for result in results:
        assert len(result["nlls"]) == passes.EVALUATIONS and result["best"] == min(result["nlls"])
        # The last weights are evaluated with the memory of training too, and with others.
        assert result["memory"]["0"] != result["memory"]["32"]


def test_inherited_weights_start_below_random_ones_and_differ_by_search(
    small_yaml, text_folder, cache, tmp_path, monkeypatch, capsys
):
    inherit = load_script("inherit/run")
    monkeypatch.setattr(inherit, "PATTERNS", ("adi",))
    searches = [tmp_path / "search-1", tmp_path / "search-2"]
    for seed, search in enumerate(searches, start=1):
        succeed("search", small_yaml, "--run", search, "model.dropout=0", "model.ngram_rows=[13,11]", f"seed={seed}")
    options = [f"data.source={text_folder}", f"data.cache={cache}", "model.d_model=16", "model.heads=2"]
    options += ["model.d_ffn=24", "model.blocks=3", "model.ngram_rows=[13,11]"]
    options += ["train.batch_size=4", "train.segment=8", "train.memory=8"]
    arguments = ["--out", str(tmp_path / "out"), "train.steps=20", *options, "--searches", *map(str, searches)]
    monkeypatch.setattr("sys.argv", ["run.py", *arguments])
    inherit.main()
    printed = capsys.readouterr().out.splitlines()
    losses = {path.stem: json.loads(path.read_text())["nlls"] for path in (tmp_path / "out").glob("adi-*.json")}
    starts = {name: nlls[0] for name, nlls in losses.items()}
    inherited = {start for name, start in starts.items() if "inherited" in name}
    assert len(inherited) == 2 and len(set(starts.values())) == 4  # two searches, two seeds from scratch
    assert min(starts[f"adi-scratch-{seed}"] for seed in (1, 2)) > max(inherited) + 0.1
    final = json.loads(printed[-1])["nll"]["adi"]
    for start, nll in final.items():
        assert nll == pytest.approx(sum(losses[f"adi-{start}-{seed}"][-1] for seed in (1, 2)) / 2, abs=1e-4)
    assert final.keys() == inherit.COLOURS.keys()
    difference = float(printed[2].split(" | ")[3])
    assert difference == pytest.approx(final["inherited"] - final["scratch"], abs=2e-4)
    assert (tmp_path / "out" / "curves.png").exists()
    monkeypatch.setattr("sys.argv", ["run.py", *arguments[:-1], str(searches[0])])
    with pytest.raises(InputError, match="holds results with"):  # of other searches
        inherit.main()
    monkeypatch.setattr("sys.argv", ["run.py", *arguments, "train.steps=2"])
    with pytest.raises(InputError, match="is not a finished search; options come before --searches"):
        inherit.main()
