"""The GPU benchmark runs on a CPU at tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_every_part_runs_and_prints_its_figures(tmp_path, text_folder):
    command = [sys.executable, ROOT / "experiments" / "bench" / "gpu.py", "--small", "--seconds", "0.1"]
    options = [f"data.cache={tmp_path}", "train.device=cpu", "train.threads=1"]
    done = subprocess.run([*command, "--source", text_folder, *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "cpu" and found["small"] and found["options"] == options
    assert found["a"]["steps_done"] == found["a"]["of_steps"] == 60 and found["a"]["seconds"] > 0
    assert found["b"]["utilisation"] > 0 and found["b"]["peak_mb"] > 0
    assert found["c"]["hard_over_retrain_step"] > 0 and found["c"]["soft_over_retrain_step"] > 0
    assert len(found["d"]["pattern"]) == 6 and found["d"]["retrain_s"] > 0
    assert "aim" not in done.stdout  # aims apply to a GPU at full size
