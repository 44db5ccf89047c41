"""What the benchmarks compute, not their speeds. The notebook and the benchmark of GPUs run with small sizes."""

import json
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from torch.utils.flop_counter import FlopCounterMode

from tests.making import load_script
from tests.processes import ROOT

NOTEBOOK = ROOT / "experiments" / "notebook" / "par.ipynb"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["search_soft", "retrain_adadad", "retrain_adddad"])
def test_flops_of_the_throughput_table_equal_those_of_a_step(name):
    throughput = load_script("bench/throughput")
    workload = throughput.Workload(name, 32, throughput.zipf_corpus(100_000), div_value=1)
    workload.turn()  # fills the memories
    with FlopCounterMode(display=False) as counter:
        tokens = workload.turn()
    # The first block's positions need no gradient, and the shares of the clusters vary from batch to batch.
    assert counter.get_total_flops() / tokens == pytest.approx(workload.flops_per_token, rel=0.02)


@pytest.mark.slow
def test_recipes_are_compared_with_the_first_one(small_yaml, tmp_path, monkeypatch, capsys):
    """Each recipe trains once with each seed, and a training does not depend on the others."""
    quality = load_script("bench/quality")
    monkeypatch.setattr(quality, "CONFIG", small_yaml)
    monkeypatch.setattr(quality, "ROUNDS", 2)
    recipes = ["", "train.muon_lr=0.001", "model.activation=gelu model.d_ffn=8x"]
    options = ["train.steps=6", "train.warmup_steps=1", "--pattern", "a c d d2x", "--seeds", "1", "2"]
    for recipe in recipes:
        options += ["--recipe", recipe]

    def table(*more, out="out") -> dict:
        monkeypatch.setattr("sys.argv", ["quality.py", *options, "--out", str(tmp_path / out), *more])
        quality.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    found = table("--latency")
    results = [
        [json.loads((tmp_path / "out" / f"{quality.job_name(recipe, seed)}.json").read_text()) for seed in (1, 2)]
        for recipe in recipes
    ]
    assert list(found) == ["default", *recipes[1:]] and len({one["nll"] for pair in results for one in pair}) == 6
    means = [sum(one["word_perplexity"] for one in pair) / 2 for pair in results]
    for figures, mean in zip(found.values(), means, strict=True):
        assert figures["word_perplexity"] == pytest.approx(mean, abs=0.01) and figures["latency"] > 0
        assert figures["change"] == pytest.approx(mean / means[0] - 1, abs=1e-4)
    assert found["default"]["latency"] == 1.0 and results[0][0]["parameters"] < results[2][0]["parameters"]
    monkeypatch.setattr(quality, "train", None)  # a second call trains nothing
    assert [one["change"] for one in table().values()] == [one["change"] for one in found.values()]
    monkeypatch.undo()
    monkeypatch.setattr(quality, "CONFIG", small_yaml)
    table("--only", "train.muon-lr-0.001-2", out="alone")
    (alone,) = (json.loads(path.read_text()) for path in (tmp_path / "alone").glob("*-2.json"))
    assert alone["nll"] == results[1][1]["nll"]


def test_the_crossover_with_dense_attention_lies_between_two_lengths():
    crossover = load_script("bench/sequence").crossover
    assert crossover({512: 2.0, 1024: 0.5, 2048: 0.2}) == 724  # 512 * sqrt(2)
    assert crossover({512: 0.9, 1024: 1.1, 2048: 0.5}) > 1024  # for good
    assert crossover({512: 0.9, 1024: 0.5}) == 512 and crossover({512: 0.9, 1024: 1.0}) is None


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
