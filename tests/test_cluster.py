"""Trials on the nodes of a Ray cluster, in a network namespace of its own."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from tests.making import assert_same_state
from tests.processes import ROOT, succeed

SEARCH = [
    *("search.method=trials", "search.networks=4", "search.batch=4", "train.steps=1600", "train.warmup_steps=10"),
    *("train.checkpoint_every=20", "train.log_every=20", "train.threads=1", "search.latency.source=flops"),
    *("search.latency.target=1.5", "search.d_model=[8,16]", "data.tokenizer=bpe", "data.vocab_size=310"),
]
ALONE = ["unshare", *(["--map-root-user"] if os.geteuid() else []), "--net", "--pid", "--fork", "--mount-proc"]


@cache
def why_not() -> str:
    if not find_spec("ray"):
        return "Ray is not installed"
    command = [*ALONE, "ip", "link", "set", "lo", "up"]
    found = (
        shutil.which("unshare") and shutil.which("ip") and not subprocess.run(command, capture_output=True).returncode
    )
    return "" if found else "there are no network namespaces here"


def on_cluster(scene: str, folder: Path, *command) -> subprocess.CompletedProcess:
    """Play a scene of tests/on_cluster.py; all of its processes end with it."""
    if why_not():
        pytest.skip(why_not())
    program = [*ALONE, "--kill-child", sys.executable, ROOT / "tests" / "on_cluster.py", scene, folder, *command]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # its sockets need a short path
        environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": short}
        return subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
def test_a_search_whose_node_and_driver_are_killed_equals_one_on_this_machine(tmp_path, small_yaml):
    run, local = tmp_path / "run", tmp_path / "local"
    done = on_cluster("killed", tmp_path, ROOT / "search.py", small_yaml, "--run", run, *SEARCH)
    said = (tmp_path / "driver.txt").read_text()
    assert done.returncode == 0, done.stderr + said
    assert done.stdout == "Ctrl-C: status 130, 0 bytes by trainings after that\n"
    assert said.count("2 trainings at a time on 2 nodes") == 3 and " died; it goes on from its last" in said
    assert " finished on one, " in said
    logs = "".join(log.read_text() for log in run.glob("trials/logs/*.txt"))
    assert any(0 < int(step) < 200 for step in re.findall(r"continuing from step (\d+) ", logs))  # of the killed node
    succeed("search", small_yaml, "--run", local, *SEARCH)
    choices = [yaml.safe_load((folder / "trials" / "choice.yaml").read_text()) for folder in (run, local)]
    for choice in choices:
        del choice["trial"]["folder"], choice["trial"]["wall_time_s"], choice["wall_time_s"]
    assert choices[0] == choices[1]
    networks = {path.parent.name for path in local.glob("trials/*/checkpoint.pt")}
    assert len(networks) > 3 and networks == {path.parent.name for path in run.glob("trials/*/checkpoint.pt")}
    for name in networks:
        states = [
            torch.load(folder / "trials" / name / "checkpoint.pt", weights_only=True)["phase"]
            for folder in (run, local)
        ]
        assert_same_state(*states)


@pytest.mark.slow
def test_a_cluster_that_cannot_train_is_refused_in_one_line(tmp_path, small_yaml, text_folder):
    text = shutil.copytree(text_folder, tmp_path / "text")
    options = *SEARCH, f"data.source={text}"
    done = on_cluster("refused", tmp_path, ROOT / "search.py", small_yaml, "--run", tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr
    for case, words in (
        ("nowhere", "jobs.cluster=127.0.0.1:6399: no Ray cluster answers; start it with `ray start --head`"),
        ("torch", f"node two: torch is 9.9, and here {torch.__version__}"),
        ("text", f"node two does not see the text {text}/t"),
        ("gpu", "the cluster has not a CPU and a GPU free; wait for other programs, which `ray status` shows"),
    ):
        said = (tmp_path / f"{case}.txt").read_text()
        lines = [line for line in said.splitlines() if line and "network_util.cc" not in line]
        assert len(lines) == 1 and lines[0].startswith(f"error: {words}"), said
