"""Runs that are killed, interrupted, or run out of disk."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from nas.core.errors import Interrupted, StopSignal
from nas.core.run_folder import run_options
from tests.making import assert_same_run
from tests.processes import ROOT, refuse, start, succeed, wait_for

pytestmark = pytest.mark.slow


def test_damaged_and_foreign_checkpoints_are_refused(searched, small_yaml, tmp_path):
    folder = shutil.copytree(searched, tmp_path / "run")
    (folder / "outcome.yaml").unlink()
    whole = (folder / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    message = refuse("search", small_yaml, "--run", folder, "--resume")
    assert "checkpoint.pt is damaged or not a checkpoint of this program" in message


def kill_at_random(command, folder: Path, seconds: tuple[float, float], number=signal.SIGKILL) -> tuple[int, str]:
    """Start a command and end it at a random moment after it has begun to log. Returns its status and its stderr."""
    process = start(*command)
    wait_for((folder / "metrics.jsonl").exists, process)
    time.sleep(random.uniform(*seconds))
    assert process.poll() is None, "the run ended before the signal; increase its steps"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


LONG = ["train.steps=700", "train.checkpoint_every=20", "train.evaluate_every=150", "train.log_every=7"]
LONG += ["model.dropout=0.2"]


@pytest.fixture(scope="module")
def whole_search(tmp_path_factory, small_yaml) -> Path:
    """The run folder of a long search that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    succeed("search", small_yaml, "--run", folder, *LONG)
    return folder


@pytest.mark.parametrize("stage", ["search", "retrain"])
def test_resume_after_kill_9_at_random_moments_is_exact(stage, tmp_path, small_yaml, pattern, request):
    first = [stage] if stage == "search" else [stage, pattern]
    mixture = ["mixture.states=20", "mixture.cache=[1,2]", "mixture.counts=3"] if stage == "retrain" else []

    def command(folder):
        return [*first, small_yaml, *run_options(folder), *LONG, *mixture]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    if stage == "search":
        whole = request.getfixturevalue("whole_search")
    else:
        succeed(*command(whole))
    for _ in range(2):
        status, _ = kill_at_random(command(killed), killed, (0.0, 0.7))
        assert status == -signal.SIGKILL
    succeed(*command(killed))
    assert_same_run(whole, killed, "supernet" if stage == "search" else "model")
    if stage == "retrain":
        one, two = (yaml.safe_load((folder / "results.yaml").read_text()) for folder in (whole, killed))
        assert one["test"] == two["test"] and one["train_tokens"] == two["train_tokens"]
        first_best, second_best = (torch.load(f / "best.pt", weights_only=True)["model"] for f in (whole, killed))
        assert all(torch.equal(first_best[key], second_best[key]) for key in first_best)
        (killed / "results.yaml").unlink()  # as if it was killed after the mixture had been written
        succeed(*command(killed))
        assert yaml.safe_load((killed / "results.yaml").read_text())["test"] == one["test"] != one["network"]["test"]
        assert (whole / "mixture/mixture.json").read_bytes() == (killed / "mixture/mixture.json").read_bytes()


def test_a_training_that_stops_at_a_step_goes_on_exactly(tmp_path, small_yaml, pattern):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ["train.steps=12", "train.evaluate_every=3", "train.log_every=3", "model.dropout=0.2"]
    succeed("retrain", pattern, small_yaml, "--run", whole, *more)
    for until in (["--until", "3"], ["--until", "9"], []):
        assert not (parts / "results.yaml").exists()
        succeed("retrain", pattern, small_yaml, *run_options(parts), *until, *more)
    assert_same_run(whole, parts, "model")
    results, same = (yaml.safe_load((folder / "results.yaml").read_text()) for folder in (whole, parts))
    assert results["test"] == same["test"]
    trial = yaml.safe_load((parts / "trial-9.yaml").read_text())
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    (nll,) = (line["nll"] for line in lines if line["split"] == "valid" and line["step"] == 9)
    assert trial["step"] == 9 and trial["of_steps"] == 12 and trial["averaged_steps"] == 5
    succeed("retrain", pattern, small_yaml, "--run", tmp_path / "at-once", "--until", "9", *more)
    assert yaml.safe_load((tmp_path / "at-once/trial-9.yaml").read_text())["valid"] == trial["valid"]
    assert trial["valid"] == trial["network"]["valid"]  # there is no mixture
    assert trial["valid"]["nll_per_token"] != nll  # that of the last weights
    assert "--until 0 must be a step from 1" in refuse("retrain", pattern, small_yaml, "--run", whole, "--until", "0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_saves_and_prints_how_to_resume(tmp_path, small_yaml, number, whole_search):
    stopped, more = tmp_path / "stopped", [*LONG, "train.checkpoint_every=100000"]
    status, errors = kill_at_random(["search", small_yaml, "--run", stopped, *more], stopped, (0.0, 0.3), number)
    assert status == 130
    assert "progress is saved; rerun the same command with --resume to continue" in errors
    assert len(errors.strip().splitlines()) == 1
    succeed("search", small_yaml, "--run", stopped, "--resume", *more)
    assert_same_run(whole_search, stopped, "supernet")


def test_only_a_second_ctrl_c_interrupts_at_once():
    """Linux sends several SIGTERM after the death of a parent with several threads."""
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.received
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.received
    signal.signal(signal.SIGHUP, before)


def test_an_early_ctrl_c_ends_a_command_and_the_server_that_still_imports(tmp_path, small_yaml):
    """The server is in the group of processes that Ctrl-C reaches."""
    options = ["search.method=trials", "search.operations=[attention,dense]", "train.steps=100000"]
    command = [sys.executable, "search.py", small_yaml, "--run", tmp_path / "run", *options]
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        shown = (tmp_path / "out.txt").read_text
        wait_for(lambda: "at first; trials take" in shown(), process)  # the server is the next
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
    wait_for(lambda: subprocess.run(["pgrep", "-s", str(process.pid)], stdout=subprocess.DEVNULL).returncode)
    assert "interrupted; rerun the command" in shown() and "Traceback" not in shown()


def test_rank_0_survives_the_sigterm_that_follows_an_interrupted_rank(monkeypatch):
    """torchrun sends it as soon as one rank has ended; rank 0 may not have printed its message yet."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for processes in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", processes)
        with pytest.raises(Interrupted), StopSignal():
            raise Interrupted
        assert (signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]) == (processes == "1")
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, small_yaml):
    """A limit on the size of files simulates the full disk. Checkpoints exceed it, but lines of metrics do not."""
    folder = tmp_path / "run"
    more = ["train.steps=40", "train.checkpoint_every=10"]
    code = (
        "import sys, runpy, nas.training.trainer as t; original = t.Trainer.save\n"
        "def save(self):\n"
        "    original(self)\n"
        "    import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "t.Trainer.save = save\n"
        f"sys.argv = ['search.py', {str(small_yaml)!r}, '--run', {str(folder)!r}, *{more!r}]\n"
        "runpy.run_path('search.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and "File too large; the previous one is unchanged" in done.stderr
    assert not (folder / "checkpoint.pt.part").exists()
    succeed("search", small_yaml, "--run", folder, "--resume", *more)
    whole = tmp_path / "whole"
    succeed("search", small_yaml, "--run", whole, *more)
    assert_same_run(whole, folder, "supernet")


def test_a_loss_that_is_not_finite_is_reported_in_one_line(tmp_path, small_yaml, pattern):
    more = ["train.lr=1e30", "train.warmup_steps=0", "train.clip=0"]
    message = refuse("retrain", pattern, small_yaml, "--run", tmp_path / "run", *more, status=1)
    assert message.startswith("error: step ") and "no checkpoint yet" in message
