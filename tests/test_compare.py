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


GIVEN = {"search": None, "budgets": None, "seeds": [1]}


def start(*arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "nas.compare", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def table(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_report_of_a_comparison_is_complete(finished_comparison):
    _, run, done = finished_comparison
    rows = table(run / "comparison.csv")
    assert tuple(rows[0]) == (
        "name", "blocks", "seeds", "parameters", "flops_per_token", "latency_ms", "latency_ratio", "nll_mean", "nll_se",
        "valid_nll_mean", "word_perplexity_mean", "word_perplexity_se", "search_hours", "train_hours",
    )  # fmt: skip
    assert sorted(row["name"] for row in rows) == ["dense-only", "interleaved", "searched-2"]
    assert rows == sorted(rows, key=lambda row: float(row["word_perplexity_mean"]))
    for row in rows:
        files = [run / "runs" / f"{row['blocks']}-{seed}" / "results.yaml" for seed in (1, 2)]
        splits = [yaml.safe_load(file.read_text())["test"] for file in files]
        perplexities = [split["word_perplexity"] for split in splits]
        assert float(row["nll_mean"]) == pytest.approx(np.mean([s["nll_per_token"] for s in splits]), rel=1e-4)
        assert float(row["word_perplexity_mean"]) == pytest.approx(np.mean(perplexities), rel=1e-4)
        assert float(row["word_perplexity_se"]) == pytest.approx(abs(np.diff(perplexities)[0]) / 2, rel=1e-4)
        assert float(row["latency_ms"]) > 0 and row["seeds"] == "2"
        assert (float(row["search_hours"]) > 0) == (row["name"] == "searched-2")
        assert (float(row["latency_ratio"]) == 1) == (row["name"] == "interleaved")
    claims = yaml.safe_load((run / "claims.yaml").read_text())
    assert claims["format"] == "par-claims/3"
    for claim in claims["claims"]:
        assert claim["verdict"] in ("yes", "no", "not shown") and claim["figures"]
        assert f"{claim['claim']}. {claim['sentence']}" in done.stdout
    assert "WARNING: hardly trained: " in done.stdout  # after 8 steps
    assert (run / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "comparison.md").read_text() in done.stdout
    searched = read_pattern(run / "patterns" / "searched-2.yaml")
    assert (run / "search-1" / "latency.yaml").exists()  # for the budget, although the search measured nothing
    assert searched["latency"]["predicted_ratio_to_interleaved"] <= 2.0


def test_a_repeated_command_trains_only_what_is_new(finished_comparison):
    """The new budget comes first in order, but must not reuse the pattern file of the old budget."""
    path, run, _ = finished_comparison
    before = {file: file.stat().st_mtime_ns for file in run.glob("*/*/checkpoint.pt")}
    before_table = (run / "comparison.csv").read_text()
    again = compare(path, "--run", run)
    assert again.returncode == 0 and "finished" not in again.stdout
    assert (run / "comparison.csv").read_text() == before_table
    more = compare(path, "--run", run, "--seeds", 1, 2, 3, "--report")
    assert more.returncode == 0 and "runs have not finished: " in more.stdout and "ddd-3" in more.stdout
    assert not (run / "runs" / "ddd-3").exists()
    path.write_text(yaml.safe_dump(COMPARISON | {"budgets": [1.5, 2.0]}))
    more = compare(path, "--run", run, "--seeds", 1)
    path.write_text(yaml.safe_dump(COMPARISON))
    assert more.returncode == 0, more.stderr
    origin = read_pattern(run / "patterns" / "searched-1.5.yaml")["derived_from"]
    assert origin["latency_budget"] == 1.5
    assert "searched-1.5" in [row["name"] for row in table(run / "comparison.csv")]
    assert compare(path, "--run", run, "--report").returncode == 0  # restores the report for later tests
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_wrong_options_and_other_settings_are_refused_before_anything_is_written(finished_comparison, tmp_path):
    path, run, _ = finished_comparison
    threads = "--workers 2 needs a number of threads for each run: add train.threads="
    (path.parent / "wide.yaml").write_text("format: par-pattern/2\nblocks: [window 9999, dense, dense]\n")
    window, new = {"patterns": ["wide.yaml"]}, tmp_path / "new"
    for changed, arguments, words in (
        ({}, ["train.lr=0.5"], "train.lr (0.003 -> 0.5)"),
        ({"search_seeds": [1, 2]}, [], "search_seeds ([1] -> [1, 2])"),
        ({}, ["--run", run / "search-1"], "holds a search run, not a compare run"),
        (window, ["--run", new], "wide: block 1: window 9999: window=9999 must be at most train.segment"),
        ({}, ["seed=3"], "seed=3: every pattern is trained with several seeds; give them with --seeds"),
        ({}, ["--workers", 2, "train.threads=null"], threads),
        ({}, ["--workers", 0], "--workers 0 must be at least 1"),
    ):
        path.write_text(yaml.safe_dump(COMPARISON | changed))
        refused = compare(path, "--run", run, *arguments)
        path.write_text(yaml.safe_dump(COMPARISON))
        assert refused.returncode == 2 and words in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert not new.exists()


def test_a_killed_comparison_continues_and_a_failing_run_does_not_stop_the_others(tmp_path, small_yaml):
    """After kill -9 during a training, the training saves and ends by itself, and the same command continues it."""
    path, run = write_comparison_yaml(tmp_path, small_yaml, **GIVEN), tmp_path / "run"
    nothing = compare(path, "--run", run, "--report")
    assert nothing.returncode == 2 and "holds no comparison yet" in nothing.stderr
    # Enough steps that the training is not finished when this test, on a busy machine, sees its first checkpoint.
    arguments = [path, "--run", run, "train.steps=1200", "train.checkpoint_every=20", "train.log_every=100"]
    process = start(*arguments)
    wait_for((run / "runs" / "ada-1" / "checkpoint.pt").exists)
    process.kill()
    process.communicate()
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
    path, run = write_comparison_yaml(tmp_path, small_yaml, **GIVEN), tmp_path / "run"
    process = start(path, "--run", run, "train.steps=5000")
    wait_for((run / "runs" / "ada-1" / "checkpoint.pt").exists)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "repeat the command to continue" in errors and len(errors.splitlines()) == 1
    assert "stopped at step" in (run / "logs" / "ada-1.txt").read_text()
    assert [log.name for log in (run / "logs").iterdir()] == ["ada-1.txt"]  # the waiting run has not begun


def test_visible_gpus_follow_cuda_visible_devices(small_config, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, named, gpus in ((2, None, ["0", "1"]), (2, "3,GPU-ab", ["3", "GPU-ab"]), (1, "3,-1,2", ["3"])):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        if named:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible_gpus(small_config("train.device=auto")) == gpus
        assert visible_gpus(small_config("train.device=cpu")) == []


def wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
