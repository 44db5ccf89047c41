import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nas.comparison.comparison import Comparison, text_times
from nas.comparison.results import LATENCIES, read_latencies
from nas.comparison.spec import read_contenders, read_settings
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import interleaved
from tests.comparing import write_comparison_yaml

GOOD = {"format": "par-comparison/2", "retrain": "r.yaml", "patterns": ["interleaved"]}


@pytest.fixture
def written(tmp_path):
    def write(**changed) -> Path:
        path = tmp_path / "comparison.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in (GOOD | changed).items() if v is not None}))
        return path

    return write


def test_paths_are_relative_to_the_file_and_the_command_line_wins(written, tmp_path):
    settings = read_settings(written(seeds=[4, 5], margin=0.02), {"seeds": [9]})
    assert (settings.retrain, settings.seeds, settings.once) == (tmp_path / "r.yaml", [9], [])
    assert (settings.margin, read_settings(written(), {}).margin) == (0.02, 0.01)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"format": "par-pattern/1"}, "is no comparison: it needs `format: par-comparison/2`"),
        ({"sedes": [1]}, "unknown key 'sedes'; the nearest is 'seeds'"),
        ({"retrain": None}, "retrain=None must be the name of a configuration file"),
        ({"retrain": 5}, "retrain=5 must be the name of a configuration file"),
        ({"seeds": []}, "seeds=[] must be different whole numbers"),
        ({"seeds": [1, 1]}, "seeds=[1, 1] must be different"),
        ({"seeds": [True]}, "seeds=[True] must be"),
        ({"seeds": 3}, "seeds=3 must be"),
        ({"patterns": [""]}, "patterns=[''] must be at least one of different names"),
        ({"patterns": None}, "patterns=None must be at least one of"),
        ({"once": ["a", "a"]}, "once=['a', 'a'] must be different names"),
        ({"margin": 1}, "margin=1 must be a number between 0 and 1"),
    ],
)
def test_a_wrong_file_gives_one_line(written, changed, words):
    with pytest.raises(InputError) as error:
        read_settings(written(**changed), {})
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def contenders(tmp_path, small_yaml):
    """contenders(**changed keys of COMPARISON.yaml) -> (settings, contenders)"""

    def read(*overrides: str, **changed):
        path = write_comparison_yaml(tmp_path, small_yaml, **changed)
        settings = read_settings(path, {})
        return settings, read_contenders(settings, path, list(overrides))

    return read


def test_contenders_are_rules_and_files_of_any_size_with_different_names(contenders, tmp_path):
    (tmp_path / "a").mkdir()
    for file, more in (("mine.yaml", ""), ("a/par.yaml", ""), ("$x^$.yaml", ""), ("big.yaml", "heads: 5\n")):
        blocks = "[dense, identity, dense 24, dense]"  # 24 is the default of the recipe
        (tmp_path / file).write_text(f"format: par-pattern/2\n{more}blocks: {blocks}\n")
    _, (rule, mine, wide) = contenders(patterns=["interleaved", "mine.yaml"], once=["wide.yaml"])
    assert (rule.name, rule.key, rule.blocks, rule.seeds) == ("interleaved", "16-ada", interleaved(3), [1, 2])
    assert (mine.name, mine.key) == ("mine", "16-didd") and mine.blocks == ["dense", "identity", "dense", "dense"]
    (tmp_path / "heads.yaml").write_text("format: par-pattern/2\nheads: 4\nblocks: [attention]\n")
    assert contenders(patterns=["heads.yaml"])[1][0].key == "16-h4-a"  # another number than its width has usually
    assert (wide.key, wide.seeds, wide.config.model.d_model, wide.config.model.heads) == ("32-ad", [1], 32, 4)
    shutil.copy(tmp_path / "wide.yaml", tmp_path / "a" / "pattern.yaml")
    assert contenders(patterns=["a/pattern.yaml"])[1][0].name == "32-ad"  # all files of derive.py are called so
    assert contenders("model.d_model=32", patterns=["interleaved", "wide.yaml"])[1][0].key == "32-ada"
    with pytest.raises(InputError, match=r"wide.yaml has model.d_model=32, model.heads=4, and an option"):
        contenders("model.d_model=64", patterns=["wide.yaml"])  # would make all networks alike
    for patterns, words in (
        (["interleavd"], r"neither a file nor one of .* the nearest is 'interleaved'"),
        (["par", "a/par.yaml"], "two patterns are called 'par'"),
        (["big.yaml"], "model.heads=5 must divide model.d_model=16"),
        (["$x^$.yaml"], "must begin with a letter or digit"),
        (["missing.yaml"], "cannot read the pattern file"),
    ):
        with pytest.raises(InputError, match=words):
            contenders(patterns=patterns)


@pytest.fixture
def comparison(contenders, tmp_path):
    def make(*overrides: str, **changed) -> Comparison:
        settings, found = contenders(*overrides, **changed)
        recipe = replace(found[0].config, seed=1)
        return Comparison(settings, found, recipe, tmp_path / "run", list(overrides))

    return make


def test_a_network_is_trained_once_with_each_seed(comparison, tmp_path):
    (tmp_path / "same.yaml").write_text("format: par-pattern/2\nblocks: [attention heads=2, dense 24, attention]\n")
    made = comparison(patterns=["interleaved", "same.yaml", "dense-only"], once=["wide.yaml"])
    assert [task.name for task in made.tasks()] == ["16-ada-1", "16-ddd-1", "32-ad-1", "16-ada-2", "16-ddd-2"]
    assert made.tasks()[0].arguments[1].endswith("interleaved.yaml")


def test_a_run_folder_keeps_its_networks(comparison, tmp_path):
    for number, more in enumerate(("blocks: [attention]", "blocks: [attention]\nlatency: {}", "blocks: [dense]")):
        (tmp_path / "own.yaml").write_text(f"format: par-pattern/2\n{more}\n")
        if number < 2:
            (made := comparison(patterns=["own.yaml"])).start()
            os.close(made.run.lock)
    with pytest.raises(InputError, match=r"patterns/own\.yaml differs from 16-d now; rename the pattern"):
        comparison(patterns=["own.yaml"])


def test_latencies_are_measured_again_only_if_conditions_change(comparison, monkeypatch):
    calls = []

    def measure(models, context, rounds):
        calls.append(models)
        return text_times(models, context, 2)

    monkeypatch.setattr("nas.comparison.comparison.text_times", measure)
    made = comparison(patterns=["interleaved", "wide.yaml"])
    made.start()
    for patterns, count in ((["interleaved", "wide.yaml"], 1), (["interleaved", "wide.yaml", "dense-only"], 2)):
        made = comparison(patterns=patterns)
        for _ in range(2):
            made.measure_latencies()
            assert len(calls) == count
    known = read_latencies(made.path)
    assert known["networks"].keys() == {"16-ada", "32-ad", "16-ddd"} == calls[-1].keys()
    assert all(ms > 0 for ms in known["networks"].values())
    write_yaml(made.path / LATENCIES, known | {"holds_for": known["holds_for"] | {"threads": 99}})
    made.measure_latencies()
    assert len(calls) == 3 and read_latencies(made.path)["holds_for"] == known["holds_for"]
