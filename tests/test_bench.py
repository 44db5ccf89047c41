"""What the benchmarks compute, not their speeds. The notebook and the benchmark of GPUs run with small sizes."""

import json
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.making import load_script
from tests.processes import ROOT

NOTEBOOK = ROOT / "experiments" / "notebook" / "par.ipynb"


@pytest.mark.slow
def test_the_benchmark_of_generation_has_rates_of_both_commits_and_a_bound(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["generation.py", "--rounds", "1", "--lengths", "4", "--before", "HEAD"])
    load_script("bench/generation").main()
    *rows, last = capsys.readouterr().out.splitlines()
    rates = json.loads(last)["tokens_per_s"]
    assert list(rates) == [f"{short}, 4, {count}" for short in ("adadad", "wdwdwd", "ldldld") for count in (1, 16)]
    assert all(list(row) == ["now", "before", "bound"] and min(row.values()) > 0 for row in rates.values())
    assert rows[0] == "| pattern | segment = memory |  | tokens/s | before | times | bound | times the bound |"
    assert len(rows) == 2 + len(rates)


@pytest.mark.slow
def test_every_part_runs_and_prints_its_figures(tmp_path, text_folder):
    command = [sys.executable, ROOT / "experiments" / "bench" / "gpu.py", "--small", "--seconds", "0.1"]
    options = [f"data.cache={tmp_path}", "train.device=cpu", "train.threads=1", "train.batch_size=2"]
    done = subprocess.run([*command, "--source", text_folder, *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "cpu" and found["small"] and found["options"] == options
    assert found["a"]["steps_done"] == found["a"]["of_steps"] == 60 and found["a"]["seconds"] > 0
    assert found["b"]["utilisation"] > 0 and found["b"]["peak_mb"] > 0
    assert found["c"]["hard_over_retrain_step"] > 0 and found["c"]["soft_over_retrain_step"] > 0
    assert len(found["d"]["pattern"]) == 6 and found["d"]["retrain_s"] > 0
    assert "aim" not in done.stdout  # aims apply to a GPU at full size


def test_the_notebook_is_committed_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path, text_folder):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (settings,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    small = {"RUNS": str(tmp_path), "MINUTES": None, "BLOCKS": 3, "D_MODEL": 16, "VOCAB_SIZE": 310, "TOKENS": 8}
    options = ["train.epochs=0.5", "train.segment=8", "search.vocab_size=[310]", "search.d_model=[16]"]
    small |= {"OPTIONS": [*options, f"data.cache={tmp_path}"], "TEXT": str(text_folder), "TARGET": 0.95}
    settings.source += "".join(f"\n{name} = {value!r}" for name, value in small.items())
    where = {"metadata": {"path": NOTEBOOK.parent}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert "image/gif" in shown and "image/png" in shown and any("<iframe" in str(output) for output in outputs)
    assert len(outputs[-1]["text"]) > len("The ")
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "found against usual: " in printed and (tmp_path / "whole" / "found" / "results.yaml").exists()
