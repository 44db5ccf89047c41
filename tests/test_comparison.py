"""Comparisons: their specification, their tasks, and python -m nas.compare on runs of a few steps."""

import csv
import fcntl
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from nas.comparison.comparison import Comparison, text_times
from nas.comparison.results import LATENCIES, read_latencies
from nas.comparison.spec import read_contenders, read_settings
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import interleaved
from nas.training.device import Runtime
from tests.making import COMPARISON, compare, write_comparison_yaml
from tests.processes import start, wait_for


@pytest.fixture
def written(tmp_path, small_yaml):
    return partial(write_comparison_yaml, tmp_path, small_yaml)


def test_paths_are_relative_to_the_file_and_the_command_line_wins(written, tmp_path):
    settings = read_settings(written(seeds=[4, 5], margin=0.02), {"seeds": [9]})
    assert (settings.retrain, settings.seeds, settings.once) == (str(tmp_path / "small.yaml"), [9], [])
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
        ({"patterns": [""]}, "patterns=[''] must be different names"),
        ({"patterns": None}, "patterns=None must be different names"),
        ({"once": ["a", "a"]}, "once=['a', 'a'] must be different names"),
        ({"margin": 1}, "margin=1 must be a number above 0 and below 1"),
    ],
)
def test_a_wrong_file_gives_one_line(written, changed, words):
    with pytest.raises(InputError) as error:
        read_settings(written(**changed), {})
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def contenders(written):
    """contenders(**changed keys of COMPARISON.yaml) -> (settings, contenders)"""

    def read(*overrides: str, **changed):
        settings = read_settings(path := written(**changed), {})
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
    shutil.copy(tmp_path / "wide.yaml", tmp_path / "\u00dcbung.yaml")
    assert contenders(patterns=["\u00dcbung.yaml"])[1][0].name == "\u00dcbung"
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

    def measure(models, runtime, rounds):
        calls.append(models)
        return text_times(models, runtime, 2)

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


GIVEN = {"patterns": ["interleaved", "dense-only"], "seeds": [1]}


def table(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.slow
def test_the_report_of_a_comparison_is_complete(finished_comparison):
    _, run, done = finished_comparison
    rows = table(run / "comparison.csv")
    assert tuple(rows[0]) == (
        "name", "network", "seed", "valid_word_perplexity", "valid_bits_per_byte", "test_word_perplexity",
        "test_bits_per_byte", "parameters", "flops_per_token", "ms_per_1000_bytes", "latency_ratio",
        "network_test_bits_per_byte", "train_hours",
    )  # fmt: skip
    networks = {"interleaved": "16-ada", "dense-only": "16-ddd", "wide": "32-ad"}
    assert {(row["name"], row["network"], row["seed"]) for row in rows} == {
        (name, key, seed) for name, key in networks.items() for seed in "12"
    }
    means = {name: np.mean([float(r["test_word_perplexity"]) for r in rows if r["name"] == name]) for name in networks}
    order = list(dict.fromkeys(row["name"] for row in rows))
    assert order == ["interleaved", *sorted(["dense-only", "wide"], key=means.get)]  # the control, and then the best
    for row in rows:
        results = yaml.safe_load((run / "runs" / f"{row['network']}-{row['seed']}" / "results.yaml").read_text())
        for split in ("valid", "test"):
            for key in ("word_perplexity", "bits_per_byte"):
                assert float(row[f"{split}_{key}"]) == pytest.approx(results[split][key], rel=1e-4)
        assert float(row["ms_per_1000_bytes"]) > 0 and float(row["train_hours"]) > 0
        assert (float(row["latency_ratio"]) == 1) == (row["name"] == "interleaved")
    claims = yaml.safe_load((run / "claims.yaml").read_text())
    assert claims["format"] == "par-claims/5" and {c["pattern"] for c in claims["claims"]} == {"dense-only", "wide"}
    for claim in claims["claims"]:
        assert claim["verdict"] in ("better", "worse", "no worse", "not shown") and claim["evidence"]
        assert f"- {claim['sentence']}" in done.stdout
    assert "WARNING: hardly trained: " in done.stdout  # after 8 steps
    assert (run / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "comparison.md").read_text() in done.stdout


@pytest.mark.slow
def test_a_repeated_command_trains_only_what_is_new(finished_comparison):
    path, run, _ = finished_comparison
    before = {file: file.stat().st_mtime_ns for file in run.glob("*/*/checkpoint.pt")}
    before_table = (run / "comparison.csv").read_text()
    again = compare(path, "--run", run)
    assert again.returncode == 0 and "finished" not in again.stdout
    assert (run / "comparison.csv").read_text() == before_table
    more = compare(path, "--run", run, "--seeds", 1, 2, 3, "--report")
    assert more.returncode == 0 and "runs have not finished: " in more.stdout and "16-ddd-3" in more.stdout
    assert not (run / "runs" / "16-ddd-3").exists()
    path.write_text(yaml.safe_dump(COMPARISON | {"once": ["par"]}))
    more = compare(path, "--run", run)
    path.write_text(yaml.safe_dump(COMPARISON))
    assert more.returncode == 0, more.stderr
    rows = [row for row in table(run / "comparison.csv") if row["name"] == "par"]
    assert [(row["network"], row["seed"]) for row in rows] == [("16-add", "1")]
    assert compare(path, "--run", run).returncode == 0  # restores the report for later tests
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.mark.slow
def test_wrong_options_and_other_settings_are_refused_before_anything_is_written(finished_comparison, tmp_path):
    path, run, _ = finished_comparison
    threads = "jobs.workers=2 needs a number of threads for each: add train.threads="
    (path.parent / "window.yaml").write_text("format: par-pattern/2\nblocks: [window 9999, dense, dense]\n")
    window, new = {"patterns": ["window.yaml"]}, tmp_path / "new"
    for changed, arguments, words in (
        ({}, ["train.lr=0.5"], "train.lr (0.003 -> 0.5)"),
        ({}, ["--run", run / "runs" / "16-ddd-1"], "holds a retrain run, not a compare run"),
        (window, ["--run", new], "window: block 1: window 9999: window=9999 must be at most train.segment"),
        ({}, ["seed=3"], "seed=3: every network is trained with several seeds; give them with --seeds"),
        ({}, ["--run", new, "jobs.workers=2", "train.threads=null"], threads),
    ):
        path.write_text(yaml.safe_dump(COMPARISON | changed))
        refused = compare(path, "--run", run, *arguments)
        path.write_text(yaml.safe_dump(COMPARISON))
        assert refused.returncode == 2 and words in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert not new.exists()


@pytest.mark.slow
def test_a_killed_comparison_continues_and_a_failing_run_does_not_stop_the_others(tmp_path, small_yaml):
    """After kill -9 during a training, the training saves and ends by itself, and the same command continues it."""
    path, run = write_comparison_yaml(tmp_path, small_yaml, **GIVEN), tmp_path / "run"
    nothing = compare(path, "--run", run, "--report")
    assert nothing.returncode == 2 and "holds no comparison yet" in nothing.stderr
    # Enough steps that the training is not finished when this test, on a busy machine, sees its first checkpoint.
    arguments = [path, "--run", run, "train.steps=1200", "train.checkpoint_every=20", "train.log_every=100"]
    arguments.append("jobs.workers=1")
    process = start("compare", *arguments)
    wait_for((run / "runs" / "16-ada-1" / "checkpoint.pt").exists, process)
    process.kill()
    process.communicate()
    wait_for(lambda: "stopped at step" in (run / "logs" / "16-ada-1.txt").read_text())
    assert not (run / "runs" / "16-ada-1" / "results.yaml").exists()
    with (run / "runs" / "16-ada-1" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a second process with this run folder would do
        done = compare(*arguments)
    assert done.returncode == 1
    assert "1 of the runs failed; the others are reported: 16-ada-1: error: --run" in done.stderr
    assert "[1/2] 16-ada-1 FAILED: error" in done.stdout and "[2/2] 16-ddd-1 finished" in done.stdout
    assert "| dense-only | ddd | " in done.stdout
    again = compare(*arguments)
    assert again.returncode == 0 and "[1/1] 16-ada-1 finished" in again.stdout and "| interleaved | ada" in again.stdout
    assert "continuing from step" in (run / "logs" / "16-ada-1.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_save_on_ctrl_c_and_sigterm(number, tmp_path, small_yaml):
    path, run = write_comparison_yaml(tmp_path, small_yaml, **GIVEN), tmp_path / "run"
    process = start("compare", path, "--run", run, "train.steps=5000", "jobs.workers=1")
    wait_for((run / "runs" / "16-ada-1" / "checkpoint.pt").exists, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "repeat the command to continue" in errors and len(errors.splitlines()) == 1
    assert "stopped at step" in (run / "logs" / "16-ada-1.txt").read_text()
    assert [log.name for log in (run / "logs").iterdir()] == ["16-ada-1.txt"]  # the waiting run has not begun


def test_visible_gpus_follow_cuda_visible_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, named, gpus in ((2, None, ["0", "1"]), (2, "3,GPU-ab", ["3", "GPU-ab"]), (1, "3,-1,2", ["3"])):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        if named:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert Runtime(torch.device("cuda", 0), "fp32", False, 1).gpus == gpus
    assert Runtime(torch.device("cpu"), "fp32", False, 1).gpus == []
