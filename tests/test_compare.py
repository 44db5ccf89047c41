"""python -m nas.compare on runs of a few steps."""

import csv
import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from nas.comparison.runner import visible_gpus
from nas.core.pattern import read_pattern
from tests.comparing import COMPARISON, compare, write_comparison_yaml
from tests.processes import ROOT

pytestmark = pytest.mark.slow


def table(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_tables_claims_and_plots_of_a_comparison_are_complete(finished_comparison):
    _, run, done = finished_comparison
    rows = table(run / "comparison.csv")
    assert [row["name"] for row in rows] == ["interleaved", "dense-only", "searched-2", "parameters"]
    for row in rows:
        figures = [
            yaml.safe_load((run / "runs" / f"{row['blocks']}-{seed}" / "results.yaml").read_text()) for seed in (1, 2)
        ]
        perplexities = [results["test"]["word_perplexity"] for results in figures]
        assert float(row["word_perplexity_mean"]) == pytest.approx(np.mean(perplexities), rel=1e-4)
        assert float(row["word_perplexity_se"]) == pytest.approx(abs(np.diff(perplexities)[0]) / 2, rel=1e-4)
        assert float(row["latency_ms"]) > 0 and row["seeds"] == "2"
        assert int(row["parameters"]) == figures[0]["parameters"]
    assert float(rows[0]["latency_ratio"]) == 1.0
    hours = yaml.safe_load((run / "search-1" / "outcome.yaml").read_text())["wall_time_s"] / 3600
    assert [float(row["search_hours"]) > 0 for row in rows] == [False, False, True, False]
    assert float(rows[2]["search_hours"]) == pytest.approx(hours, rel=1e-3)
    claims = yaml.safe_load((run / "claims.yaml").read_text())
    assert claims["format"] == "par-claims/2" and all(
        {"claim", "verdict", "sentence", "figures"} <= c.keys() for c in claims["claims"]
    )
    assert all(claim["sentence"] in done.stdout for claim in claims["claims"])
    assert {claim["verdict"] for claim in claims["claims"]} <= {"yes", "no", "not shown"}
    assert " are hardly trained: their perplexity per token on valid is above" in done.stdout  # after 8 steps
    assert (run / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "comparison.md").read_text() in done.stdout


def test_a_pattern_within_a_budget_that_never_binds_is_the_argmax_of_pi(finished_comparison):
    _, run, _ = finished_comparison
    last = (run / "search-1" / "pi.jsonl").read_text().splitlines()[-1]
    pi = np.array(yaml.safe_load(last)["pi"])
    operations = yaml.safe_load(last)["operations"]
    assert read_pattern(run / "patterns" / "searched-2.yaml")["blocks"] == [operations[i] for i in pi.argmax(axis=1)]


def test_budgets_are_in_milliseconds_although_the_search_measured_none(finished_comparison):
    _, run, _ = finished_comparison
    assert (run / "search-1" / "latency.yaml").exists()
    latency = read_pattern(run / "patterns" / "searched-2.yaml")["latency"]
    assert latency["predicted_ratio_to_interleaved"] <= 2.0


def test_a_repeated_command_trains_nothing_and_reports_the_same(finished_comparison):
    path, run, _ = finished_comparison
    before = {file: file.stat().st_mtime_ns for file in run.glob("*/*/checkpoint.pt")}
    before_table = (run / "comparison.csv").read_text()
    again = compare(path, "--run", run)
    assert again.returncode == 0 and "finished" not in again.stdout
    assert {file: file.stat().st_mtime_ns for file in run.glob("*/*/checkpoint.pt")} == before
    assert (run / "comparison.csv").read_text() == before_table


def test_more_seeds_train_only_what_is_new(finished_comparison):
    path, run, _ = finished_comparison
    more = compare(path, "--run", run, "--seeds", 1, 2, 3, "--report")
    assert more.returncode == 0 and "runs have not finished: " in more.stdout and "ddd-3" in more.stdout
    assert not (run / "runs" / "ddd-3").exists()


def test_another_recipe_is_refused_before_anything_is_trained(finished_comparison):
    path, run, _ = finished_comparison
    refused = compare(path, "--run", run, "train.lr=0.5")
    assert refused.returncode == 2 and "train.lr (0.003 -> 0.5)" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    path.write_text(yaml.safe_dump(COMPARISON | {"search_seeds": [1, 2]}))
    refused = compare(path, "--run", run)
    path.write_text(yaml.safe_dump(COMPARISON))
    assert refused.returncode == 2 and "search_seeds ([1] -> [1, 2])" in refused.stderr
    refused = compare(path, "--run", run / "search-1")
    assert refused.returncode == 2 and "holds a search run, not a compare run" in refused.stderr


def test_a_budget_that_is_added_later_is_derived(finished_comparison):
    """The new budget comes first in order, but must not reuse the pattern file of the old budget."""
    path, run, _ = finished_comparison
    path.write_text(yaml.safe_dump(COMPARISON | {"budgets": [1.5, 2.0]}))
    more = compare(path, "--run", run, "--seeds", 1)
    path.write_text(yaml.safe_dump(COMPARISON))
    assert more.returncode == 0, more.stderr
    origin = read_pattern(run / "patterns" / "searched-1.5.yaml")["derived_from"]
    assert (origin["method"], origin["latency_budget"]) == ("budget", 1.5)
    assert "searched-1.5" in [row["name"] for row in table(run / "comparison.csv")]
    assert compare(path, "--run", run, "--report").returncode == 0  # restores the report for later tests


def test_a_given_pattern_that_does_not_fit_the_recipe_is_refused_before_anything_is_written(tmp_path, small_yaml):
    path = tmp_path / "compare.yaml"
    path.write_text(f"format: par-comparison/1\nretrain: {small_yaml}\npatterns: [local-global]\n")
    refused = compare(path, "--run", tmp_path / "run", "model.window=9999")
    assert (
        refused.returncode == 2 and "model.window=9999 must be at most train.segment + train.memory" in refused.stderr
    )
    assert not (tmp_path / "run").exists()


def test_wrong_options_are_refused(finished_comparison):
    path, run, _ = finished_comparison
    for arguments, words in (
        (["seed=3"], "seed=3: every pattern is trained with several seeds; give them with --seeds"),
        (
            ["--workers", 2, "train.threads=null"],
            "--workers 2 needs a number of threads for each run: add train.threads=",
        ),
        (["--workers", 0], "--workers 0 must be at least 1"),
    ):
        refused = compare(path, "--run", run, *arguments)
        assert refused.returncode == 2 and words in refused.stderr


def test_match_parameters_trains_at_equal_parameters(finished_comparison, small_config):
    path, run, _ = finished_comparison
    done = compare(path, "--run", run, "--match-parameters", "--workers", 2, "--seeds", 1)
    assert done.returncode == 0, done.stderr
    rows = table(run / "comparison-matched.csv")
    baseline, dense, *_ = (int(row["parameters"]) for row in rows)
    width = (small_config().model.d_model * 2 + 1) * 3  # parameters of one more d_ffn in three dense blocks
    assert abs(dense - baseline) <= width / 2
    (trained,) = (run / "runs").glob("ddd-ffn*-1/config.yaml")
    assert f"ddd-ffn{yaml.safe_load(trained.read_text())['model']['d_ffn']}-1" == trained.parent.name
    assert (run / "comparison.csv").exists() and (run / "claims-matched.yaml").exists()


def test_a_killed_comparison_continues_and_a_failing_run_does_not_stop_the_others(tmp_path, small_yaml):
    """After kill -9 during a training, the training saves and ends by itself, and the same command continues it."""
    given = {"search": None, "budgets": None, "seeds": [1], "patterns": ["interleaved", "dense-only"]}
    path, run = write_comparison_yaml(tmp_path, small_yaml, **given), tmp_path / "run"
    nothing = compare(path, "--run", run, "--report")
    assert nothing.returncode == 2 and "holds no comparison yet" in nothing.stderr
    arguments = [path, "--run", run, "train.steps=300", "train.checkpoint_every=20"]
    process = subprocess.Popen([sys.executable, "-m", "nas.compare", *map(str, arguments)], cwd=ROOT)
    wait_for((run / "runs" / "ada-1" / "checkpoint.pt").exists)
    process.kill()
    process.wait()
    wait_for(lambda: "stopped at step" in (run / "logs" / "ada-1.txt").read_text())
    assert not (run / "runs" / "ada-1" / "results.yaml").exists()
    with (run / "runs" / "ada-1" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a second process with this run folder would do
        done = compare(*arguments)
    assert done.returncode == 1 and "1 of the runs failed; the others are reported: ada-1: error: --run" in done.stderr
    assert "[1/2] ada-1 FAILED: error" in done.stdout and "[2/2] ddd-1 finished" in done.stdout
    assert "| dense-only | ddd | " in done.stdout
    again = compare(*arguments)
    assert again.returncode == 0 and "[1/1] ada-1 finished" in again.stdout and "| interleaved | ada" in again.stdout
    assert "continuing from step" in (run / "logs" / "ada-1.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_save_on_ctrl_c_and_sigterm(number, tmp_path, small_yaml):
    given = {"search": None, "budgets": None, "seeds": [1], "patterns": ["interleaved"]}
    path, run = write_comparison_yaml(tmp_path, small_yaml, **given), tmp_path / "run"
    command = [sys.executable, "-m", "nas.compare", str(path), "--run", str(run), "train.steps=5000"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for((run / "runs" / "ada-1" / "checkpoint.pt").exists)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "repeat the command to continue" in errors and len(errors.splitlines()) == 1
    assert "stopped at step" in (run / "logs" / "ada-1.txt").read_text()


def test_visible_gpus_follow_cuda_visible_devices(small_config, monkeypatch):
    config = small_config("train.device=auto")
    for count, named, gpus in (
        (0, None, []),
        (2, None, ["0", "1"]),
        (2, "3,GPU-ab", ["3", "GPU-ab"]),
        (1, "3,-1,2", ["3"]),
        (0, "", []),
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible_gpus(config) == gpus
    config.train.device = "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert visible_gpus(config) == []


def wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
