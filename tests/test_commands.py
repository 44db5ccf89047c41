"""The commands that users run: whole runs, bad input, kills and interruptions."""

import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from nas.core.pattern import expand, read_pattern
from nas.costs.cost_table import read_costs
from retrain import notice_other_sizes
from tests.processes import ROOT, run_command

pytestmark = pytest.mark.slow

PENALTY = ["search.latency.source=measured", "search.latency.mode=target", "search.latency.target=0.8"]


def run(script, *arguments, cwd=ROOT):
    return run_command([ROOT / f"{script}.py", *arguments], cwd)


def succeed(script, *arguments, **more):
    done = run(script, *arguments, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fail(status, script, *arguments, **more):
    """Run a command that must fail with this status. Returns the only line of stderr."""
    done = run(script, *arguments, **more)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def same_run(one: Path, two: Path, weights_in: str) -> None:
    """Bit for bit the same metrics, history of pi and weights."""
    for name in ("metrics.jsonl", "pi.jsonl"):
        assert (one / name).exists() == (two / name).exists()
        if (one / name).exists():
            assert (one / name).read_bytes() == (two / name).read_bytes()
    first, second = (torch.load(path / "checkpoint.pt", weights_only=True)["phase"][weights_in] for path in (one, two))
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


@pytest.fixture(scope="module")
def searched(tmp_path_factory, small_yaml) -> Path:
    folder = tmp_path_factory.mktemp("searched") / "run"
    succeed("search", small_yaml, "--run", folder)
    return folder


@pytest.fixture(scope="module")
def retrained(tmp_path_factory, small_yaml, pattern) -> Path:
    folder = tmp_path_factory.mktemp("retrained") / "run"
    succeed("retrain", pattern, small_yaml, "--run", folder)
    return folder


def test_the_four_stages_end_to_end(tmp_path, small_yaml):
    """Runs the commands from another folder, with relative paths."""
    (tmp_path / "mine.yaml").write_text(small_yaml.read_text())
    here = {"cwd": tmp_path}
    shown = succeed("search", "mine.yaml", "--run", "out/search", "train.log_every=2", **here)
    assert "likeliest pattern: " in shown
    steps = [line for line in shown.splitlines() if re.match(r"step \d+/24  nll", line)]
    shows_pattern = [bool(re.search(r"  likeliest pattern [adi]{3}  ", line)) for line in steps]
    assert shows_pattern == sorted(shows_pattern)  # from the first step of the logits, after the warm-up
    assert shows_pattern[:3] == [False] * 3 and shows_pattern[-1]
    for name in (
        "config.yaml",
        "provenance.yaml",
        "pi.jsonl",
        "metrics.jsonl",
        "train.log",
        "checkpoint.pt",
        "tensorboard",
    ):
        assert (tmp_path / "out/search" / name).exists()
    history = [json.loads(line) for line in (tmp_path / "out/search/pi.jsonl").read_text().splitlines()]
    assert [line["step"] for line in history] == [0, *range(2, 25, 2)]
    assert history[0]["pi"] == [[pytest.approx(1 / 3)] * 3] * 3
    assert set(history[0]) >= {"step", "temperature", "operations", "pi", "expected_latency_ms"}
    assert history[-1]["temperature"] == pytest.approx(0.1)

    shown = succeed("derive", "out/search", **here)
    assert "block  choice" in shown and "written to out/search/pattern.yaml" in shown
    derived = yaml.safe_load((tmp_path / "out/search/pattern.yaml").read_text())
    assert derived["format"] == "par-pattern/1"
    likeliest = [history[-1]["operations"][row.index(max(row))] for row in history[-1]["pi"]]
    assert derived["blocks"] == likeliest

    shown = succeed("retrain", "out/search/pattern.yaml", "mine.yaml", "--run", "out/retrain", **here)
    assert "valid: perplexity" in shown and "test: perplexity" in shown
    results = yaml.safe_load((tmp_path / "out/retrain/results.yaml").read_text())
    for split in ("valid", "test"):
        about = results[split]
        assert about["perplexity"] == pytest.approx(2.718281828459045 ** (about["nll"] / about["tokens"]))
        assert about["word_perplexity_comparable"]
    wanted = {"parameters", "flops_per_token", "latency", "train_tokens", "train_tokens_per_s", "wall_time_s"}
    assert wanted | {"segment", "memory"} <= results.keys()
    metrics = [json.loads(line) for line in (tmp_path / "out/retrain/metrics.jsonl").read_text().splitlines()]
    assert {line["split"] for line in metrics} == {"train", "valid", "test"}
    assert metrics[-1]["tokens"] == 24 * 4 * 8

    shown = succeed("animate", "out/search", **here)
    assert "9 frames of 13 logged steps" in shown  # pi changes from step 10, so steps 0 to 8 are one frame
    for name in ("pi.gif", "pi.png", "pi_over_time.png", "entropy.png", "learning_curves.png", "pattern.png"):
        assert (tmp_path / "out/search" / name).stat().st_size > 1000
    picture, derived = tmp_path / "out/search/pattern.png", tmp_path / "out/search/pattern.yaml"
    before = picture.read_bytes()
    derived.write_text("format: par-pattern/1\nblocks: [attention, attention, identity]\n")
    succeed("animate", "out/search", **here)
    assert picture.read_bytes() != before  # the picture follows pattern.yaml
    assert "learning_curves.png" in succeed("animate", "out/retrain", **here)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "out"]


def test_four_stages_with_all_candidates_on_bytes(tmp_path, small_yaml):
    """Uses more keys than a dense mask allows, recomputation, the depth-scaled initialisation, and
    measured latencies.
    """
    operations = ["attention", "sparse_strided", "sparse_fixed", "window", "linear", "dense", "identity"]
    sizes = ["data.tokenizer=bytes", "train.segment=160", "train.memory=160", "train.batch_size=2", "train.steps=10"]
    sizes += ["model.init=depth_scaled", "model.activation=gelu", "model.recompute=true", "train.log_every=2"]
    search = tmp_path / "search"
    shown = succeed(
        "search", small_yaml, "--run", search, *sizes, f"search.operations=[{','.join(operations)}]",
        "search.latency.source=measured", "search.warmup_steps=2",
    )  # fmt: skip
    assert all(f"\n{name} " in shown for name in operations)
    assert set(yaml.safe_load((search / "latency.yaml").read_text())["blocks"]) == set(operations)
    succeed("derive", search, "--pareto", "0.5,1")
    succeed("animate", search)
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(
        "format: par-pattern/1\nblocks: [sparse_strided, sparse_fixed, window, linear, dense, attention]\n"
    )
    shown = succeed("retrain", mixed, small_yaml, "--run", tmp_path / "retrain", *sizes, "model.factorization=heads")
    assert "pattern sfwlda, " in shown
    results = yaml.safe_load((tmp_path / "retrain/results.yaml").read_text())
    for split in ("valid", "test"):
        about = results[split]
        assert about["tokens"] == about["bytes"] - 1 and about["bits_per_byte_comparable"]
        assert about["bits_per_byte"] == pytest.approx(about["nll"] / math.log(2) / about["bytes"])


@pytest.mark.parametrize("script", ["search", "derive", "retrain", "animate"])
def test_help_is_quick_and_needs_no_torch(script):
    blocked = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['x', '--help']; "
    code = blocked + f"runpy.run_path('{ROOT / script}.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage" in done.stdout
    if script in ("search", "retrain"):
        assert "train.segment=64" in done.stdout


def test_bad_options_write_nothing(tmp_path, small_yaml, pattern):
    folder = tmp_path / "run"
    message = fail(2, "search", small_yaml, "--run", folder, "train.stepz=3")
    assert message == "error: unknown key 'train.stepz'; the nearest is 'train.steps' (--help lists all)"
    for bad in (
        "model.heads=3",
        "train.steps=x",
        "data.source=/nowhere",
        "data.tokenizer=wordpiece",
        "train.batch_size=9999",
    ):
        fail(2, "search", small_yaml, "--run", folder, bad)
        fail(2, "retrain", pattern, small_yaml, "--run", folder, bad)
    assert "must stay below the vocabulary size" in fail(
        2, "search", small_yaml, "--run", folder, "model.cutoffs=[9,99999]"
    )
    assert "cannot read the pattern" in fail(2, "retrain", tmp_path / "none.yaml", small_yaml, "--run", folder)
    empty = tmp_path / "empty.yaml"
    empty.write_text("format: par-pattern/1\nblocks: [identity, identity]\n")
    message = fail(2, "retrain", empty, small_yaml, "--run", folder)
    assert message == "error: train.optimizer=muon needs blocks with weights; give train.optimizer=adamw"
    empty.write_text("format: par-pattern/1\nblocks: [linear, dense]\n")
    grid = ["data.tokenizer=bytes", "model.positions=grid", "model.grid=[2,3,1]"]
    message = fail(2, "retrain", empty, small_yaml, "--run", folder, *grid)
    assert message == (
        "error: the operation linear needs model.positions=relative; remove linear from the operations, or the grid"
    )
    assert message == fail(2, "search", small_yaml, "--run", folder, *grid, "search.operations=[linear,dense]")
    assert not folder.exists()


def test_runs_are_not_overwritten(searched, retrained, small_yaml, pattern):
    before = (searched / "metrics.jsonl").read_bytes()
    assert "already holds a run; add --resume" in fail(2, "search", small_yaml, "--run", searched)
    assert "another configuration: train.lr" in fail(
        2, "search", small_yaml, "--run", searched, "--resume", "train.lr=1"
    )
    assert "holds a search run" in fail(2, "retrain", pattern, small_yaml, "--run", searched, "--resume")
    assert (searched / "metrics.jsonl").read_bytes() == before
    shown = succeed("search", small_yaml, "--run", searched, "--resume")  # a finished run does not change
    assert "continuing from step 24 of 24" in shown
    assert (searched / "metrics.jsonl").read_bytes() == before
    before = (retrained / "metrics.jsonl").read_bytes(), (retrained / "results.yaml").read_bytes()
    assert "test: perplexity" in succeed("retrain", pattern, small_yaml, "--run", retrained, "--resume")
    after = (retrained / "metrics.jsonl").read_bytes(), (retrained / "results.yaml").read_bytes()
    assert before == after


def test_the_config_yaml_of_a_run_repeats_it(searched, tmp_path):
    succeed("search", searched / "config.yaml", "--run", tmp_path / "again")
    same_run(searched, tmp_path / "again", "supernet")


def test_auto_cutoffs_are_resolved_in_search_retrain_and_resumption(small_yaml, tmp_path):
    search, retrain = tmp_path / "search", tmp_path / "retrain"
    auto = ["model.cutoffs=auto", "train.steps=12"]
    succeed("search", small_yaml, "--run", search, *auto)
    settled = yaml.safe_load((search / "config.yaml").read_text())["model"]["cutoffs"]
    assert len(settled) == 2 and 0 < settled[0] < settled[1]
    succeed("derive", search)
    pattern = search / "pattern.yaml"
    assert yaml.safe_load(pattern.read_text())["model"]["cutoffs"] == settled

    succeed("retrain", pattern, small_yaml, "--run", retrain, *auto, "model.clusters=4")
    others = yaml.safe_load((retrain / "config.yaml").read_text())["model"]["cutoffs"]
    assert len(others) == 3
    # The given options and the resolved cutoffs are accepted, but not other cutoffs.
    succeed("retrain", pattern, small_yaml, "--run", retrain, *auto, "model.clusters=4", "--resume")
    succeed("retrain", pattern, retrain / "config.yaml", "--run", retrain, "--resume")
    assert "model.cutoffs" in fail(2, "search", small_yaml, "--run", search, "train.steps=12", "--resume")


def test_a_run_with_a_full_softmax_does_not_resume_with_auto_cutoffs(searched, small_yaml):
    assert "model.cutoffs ([] -> auto)" in fail(
        2, "search", small_yaml, "--run", searched, "--resume", "model.cutoffs=auto"
    )


def test_eval_only_at_other_lengths(retrained, small_yaml, pattern, tmp_path):
    before = (retrained / "results.yaml").read_bytes()
    lengths = ["evaluate.segment=5", "evaluate.memory=20"]
    succeed("retrain", pattern, small_yaml, "--run", retrained, "--eval-only", *lengths)
    other = yaml.safe_load((retrained / "results-segment5-memory20.yaml").read_text())
    same = yaml.safe_load(before)
    assert (other["segment"], other["memory"]) == (5, 20)
    assert other["test"]["tokens"] == same["test"]["tokens"] and other["test"]["nll"] != same["test"]["nll"]
    assert (retrained / "results.yaml").read_bytes() == before
    assert "another configuration: train.lr" in fail(
        2, "retrain", pattern, small_yaml, "--run", retrained, "--eval-only", "train.lr=1"
    )
    assert "holds no best.pt" in fail(2, "retrain", pattern, small_yaml, "--run", tmp_path / "none", "--eval-only")


@pytest.mark.parametrize(("blocks", "searched", "told"), [(2, True, True), (3, True, False), (2, False, False)])
def test_retrain_tells_that_model_blocks_is_not_used(blocks, searched, told, small_config, capsys):
    content = {"blocks": ["dense"] * blocks} | ({"model": {"d_model": 16}} if searched else {})
    notice_other_sizes(content, small_config("model.blocks=3"))
    notice = "NOTICE: the pattern has 2 blocks; model.blocks=3 is not used\n"
    assert capsys.readouterr().out == (notice if told else "")


def test_derive_and_animate_report_missing_runs(tmp_path, retrained, searched):
    assert "is not a run folder" in fail(2, "derive", tmp_path / "none")
    assert "is the folder of a retrain run, which has no pi.jsonl" in fail(2, "derive", retrained)
    (tmp_path / "pi.jsonl").write_text((searched / "pi.jsonl").read_text().splitlines()[0] + "\n")
    assert "pi has not changed until step 0" in fail(2, "animate", tmp_path)
    incomplete = shutil.copytree(searched, tmp_path / "incomplete")
    (incomplete / "pi.jsonl").unlink()
    assert "pi.jsonl of this search run is missing" in fail(2, "animate", incomplete)
    assert "must end in .gif" in fail(2, "animate", searched, "--out", tmp_path / "x.mp4")


def test_derive_makes_a_pattern_for_a_deeper_model(searched, tmp_path):
    pattern, deeper = tmp_path / "mine.yaml", tmp_path / "mine-8-stretch.yaml"
    pattern.write_text(
        f"format: par-pattern/1\nblocks: [attention, dense, identity]\nderived_from: {{runs: [{searched}]}}\n"
    )
    shown = succeed("derive", pattern, "--blocks", 8, "--by", "stretch")
    assert "pattern aaadddii: 8 blocks, stretched from the 3 blocks adi" in shown
    assert "attention         1 of 3 (33%) ->   3 of 8 (38%)" in shown
    assert f"written to {deeper}" in shown
    costs = read_costs(searched / "flops.yaml", ["attention", "dense", "identity"])
    ratio = costs.ratio(expand("aaadddii"))
    assert f"{ratio:.2f} of the interleaved pattern with 8 blocks" in shown
    content = read_pattern(deeper)
    assert content["blocks"] == expand("aaadddii")
    assert content["resized_from"] == {"file": str(pattern), "blocks": expand("adi"), "by": "stretch"}
    shown = succeed("derive", pattern, "--blocks", 5, "--by", "stack", "--out", tmp_path / "other.yaml")
    assert read_pattern(tmp_path / "other.yaml")["blocks"] == expand("adiad")
    bad = {
        ("--blocks", 3, "--by", "stack"): f"--blocks 3 must be more than the 3 blocks of {pattern}",
        ("--blocks", 0, "--by", "stack"): f"--blocks 0 must be more than the 3 blocks of {pattern}",
        ("--blocks", 8): "--blocks and --by belong together: --blocks 24 --by stretch or stack",
        ("--blocks", 8, "--by", "stack", "--trials"): "--blocks takes one pattern file",
        (): f"{pattern} is a file; give the --run folder of a search, or --blocks N --by stretch|stack",
    }
    for arguments, message in bad.items():
        assert message in fail(2, "derive", pattern, *arguments)
    assert f"{searched} is a folder" in fail(2, "derive", searched, "--blocks", 8, "--by", "stack")


def test_derive_does_not_replace_an_edited_pattern(searched, tmp_path):
    out = tmp_path / "mine.yaml"
    succeed("derive", searched, "--out", out)
    succeed("derive", searched, "--out", out)  # the same pattern may be written again
    edited = out.read_text().replace("blocks:", "# my own choice\nblocks:")
    out.write_text(edited)
    assert "exists and differs" in fail(2, "derive", searched, "--out", out)
    assert out.read_text() == edited
    succeed("derive", searched, "--out", out, "--force")
    assert out.read_text() != edited


@pytest.fixture(scope="module")
def seeds(tmp_path_factory, small_yaml) -> list[Path]:
    """Three seeds of a search with a penalty on measured latency."""
    folder = tmp_path_factory.mktemp("seeds")
    runs = [folder / f"seed{seed}" for seed in (1, 2, 3)]
    for seed, run_dir in enumerate(runs, start=1):
        succeed("search", small_yaml, "--run", run_dir, *PENALTY, f"seed={seed}")
    return runs


def test_a_search_with_measured_latency_keeps_its_table_and_resumes_with_it(seeds, small_yaml, tmp_path):
    table = yaml.safe_load((seeds[0] / "latency.yaml").read_text())
    assert table["unit"] == "ms" and table["blocks"].keys() == {"attention", "dense", "identity"}
    assert (table["holds_for"]["batch_size"], table["holds_for"]["segment"], table["holds_for"]["memory"]) == (16, 8, 8)
    first = json.loads((seeds[0] / "pi.jsonl").read_text().splitlines()[0])
    assert first["expected_latency_ms"] == pytest.approx(table["overhead"] + sum(table["blocks"].values()))
    stopped = tmp_path / "stopped"
    shutil.copytree(seeds[0], stopped)
    for name in ("checkpoint.pt", "pi.jsonl", "metrics.jsonl"):
        (stopped / name).unlink()
    shown = succeed("search", small_yaml, "--run", stopped, "--resume", *PENALTY)  # from the start, with the same table
    assert "measuring again" not in shown
    same_run(seeds[0], stopped, "supernet")


def test_deriving_from_three_seeds_gives_one_pattern_with_agreement_and_latency(seeds, tmp_path):
    out = tmp_path / "three.yaml"
    shown = succeed("derive", *seeds, "--out", out)
    assert "agree" in shown.splitlines()[0] and "measured" in shown and "predicted" in shown
    content = yaml.safe_load(out.read_text())
    last = [json.loads((run / "pi.jsonl").read_text().splitlines()[-1])["pi"] for run in seeds]
    for block, about in enumerate(content["confidence"]):
        for index, name in enumerate(["attention", "dense", "identity"]):
            assert about["pi"][name] == pytest.approx(sum(pi[block][index] for pi in last) / 3, abs=1e-6)
        assert about["operation"] == max(about["pi"], key=about["pi"].get)
        assert round(3 * about["agreement"]) in (0, 1, 2, 3)
    assert content["latency"]["median_ms"] > 0 and content["latency"]["predicted_ms"] > 0
    assert content["derived_from"]["runs"] == [str(run) for run in seeds]
    succeed("derive", *seeds, "--out", out)  # again: only the measurement differs
    succeed("derive", *seeds)
    assert (seeds[0] / "pattern-of-3-seeds.yaml").exists()


def test_each_budget_gives_a_pattern_and_all_give_a_table(seeds, small_yaml, tmp_path):
    out = tmp_path / "p.yaml"
    shown = succeed("derive", seeds[0], "--pareto", "0.7,1,0.85", "--out", out)
    table = yaml.safe_load((seeds[0] / "latency.yaml").read_text())
    usual = table["overhead"] + 2 * table["blocks"]["attention"] + table["blocks"]["dense"]
    for budget in ("0.7", "0.85", "1"):
        content = yaml.safe_load((tmp_path / f"p-{budget}.yaml").read_text())
        cost = table["overhead"] + sum(table["blocks"][name] for name in content["blocks"])
        assert cost <= float(budget) * usual * (1 + 1e-9)
        assert content["derived_from"]["latency_budget"] == float(budget)
    assert "| budget | pattern |" in shown and "| 0.85 |" in (tmp_path / "p-pareto.md").read_text()
    single = tmp_path / "single.yaml"
    succeed("derive", seeds[0], "--latency-budget", "0.7", "--out", single)
    assert (
        yaml.safe_load(single.read_text())["blocks"] == yaml.safe_load((tmp_path / "p-0.7.yaml").read_text())["blocks"]
    )
    shown = succeed("retrain", single, small_yaml, "--run", tmp_path / "retrain")
    results = yaml.safe_load((tmp_path / "retrain" / "results.yaml").read_text())
    assert results["latency"]["predicted_ms"] == yaml.safe_load(single.read_text())["latency"]["predicted_ms"]
    assert "measured" in shown and "predicted" in shown


def test_derive_by_perturbation(seeds, tmp_path):
    out = tmp_path / "p.yaml"
    shown = succeed("derive", seeds[0], seeds[1], "--method", "perturbation", "--out", out)
    assert "with one operation removed" in shown
    for about in yaml.safe_load(out.read_text())["confidence"]:
        losses = about["removal"]["nll_without"]
        assert about["operation"] == max(losses, key=losses.get)


def test_derive_reports_wrong_options_in_one_line(seeds, searched, small_yaml, tmp_path):
    assert "no pattern fits a budget of 0.01: the cheapest costs" in fail(
        2, "derive", seeds[0], "--latency-budget", "0.01"
    )
    assert "is not a budget" in fail(2, "derive", seeds[0], "--pareto", "0.5,x")
    assert "must be one ratio" in fail(2, "derive", seeds[0], "--latency-budget", "0.5,1")
    assert "--method budget needs --latency-budget or --pareto" in fail(2, "derive", seeds[0], "--method", "budget")
    assert "--method argmax takes no budget" in fail(
        2, "derive", seeds[0], "--method", "argmax", "--latency-budget", "1"
    )
    other = tmp_path / "other"
    succeed("search", small_yaml, "--run", other, "search.operations=[attention,dense]")
    assert "3 blocks of attention, dense, and" in fail(2, "derive", seeds[0], other)
    (other / "checkpoint.pt").unlink()
    assert "holds no checkpoint.pt with the SuperNet's weights" in fail(2, "derive", other, "--method", "perturbation")
    too_low = ["search.latency.source=measured", "search.latency.target=0.01"]
    assert "no pattern fits a budget of 0.01: the cheapest costs" in fail(
        2, "search", small_yaml, "--run", tmp_path / "run", *too_low
    )
    assert not (tmp_path / "run").exists()


def test_the_latency_command_prints_and_writes_a_table(searched, small_yaml, tmp_path):
    command = ["-m", "nas.latency", small_yaml, "--out", tmp_path / "latency.yaml"]
    done = run_command(command)
    assert done.returncode == 0, done.stderr
    assert "embedding and output layer" in done.stdout and "interleaved, 3 blocks" in done.stdout
    assert run_command(command).returncode == 2  # a table is not replaced
    shutil.copytree(searched, tmp_path / "run")
    before = succeed("derive", tmp_path / "run", "--out", tmp_path / "a.yaml")
    (tmp_path / "latency.yaml").rename(tmp_path / "run" / "latency.yaml")
    after = succeed("derive", tmp_path / "run", "--out", tmp_path / "b.yaml")
    assert "predicted" not in before and "predicted" in after


def test_damaged_and_foreign_checkpoints_are_refused(searched, small_yaml, tmp_path):
    folder = tmp_path / "run"
    succeed("search", small_yaml, "--run", folder)
    whole = (folder / "checkpoint.pt").read_bytes()
    (folder / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    message = fail(2, "search", small_yaml, "--run", folder, "--resume")
    assert "checkpoint.pt is damaged or not a checkpoint of this program" in message


def kill_at_random(arguments, folder: Path, seconds: tuple[float, float], number=signal.SIGKILL) -> None:
    """Start a command and end it at a random moment after it has begun to log."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.uniform(*seconds))
    assert process.poll() is None, "the run ended before the signal; increase its steps"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    kill_at_random.status, kill_at_random.errors = process.returncode, errors.decode()


LONG = ["train.steps=700", "train.checkpoint_every=20", "train.evaluate_every=150", "train.log_every=7"]


@pytest.mark.parametrize("stage", ["search", "retrain"])
def test_resume_after_kill_9_at_random_moments_is_exact(stage, tmp_path, small_yaml, pattern):
    first = ["search.py"] if stage == "search" else ["retrain.py", str(pattern)]

    def arguments(folder):
        return [*first, str(small_yaml), "--run", str(folder), "--resume", "model.dropout=0.2", *LONG]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_command(arguments(whole)).returncode == 0
    for _ in range(2):
        kill_at_random(arguments(killed), killed, (0.0, 0.7))
        assert kill_at_random.status == -signal.SIGKILL
    assert run_command(arguments(killed)).returncode == 0
    same_run(whole, killed, "supernet" if stage == "search" else "model")
    if stage == "retrain":
        one, two = (yaml.safe_load((folder / "results.yaml").read_text()) for folder in (whole, killed))
        assert one["test"] == two["test"] and one["train_tokens"] == two["train_tokens"]
        first_best, second_best = (torch.load(f / "best.pt", weights_only=True)["model"] for f in (whole, killed))
        assert all(torch.equal(first_best[key], second_best[key]) for key in first_best)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_prints_how_to_resume(tmp_path, small_yaml, number):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    more = [*LONG, "train.checkpoint_every=100000"]
    succeed("search", small_yaml, "--run", whole, *more)
    command = ["search.py", str(small_yaml), "--run", str(stopped), *more]
    kill_at_random(command, stopped, (0.0, 0.3), number)
    assert kill_at_random.status == 130
    assert "progress is saved; rerun the same command with --resume to continue" in kill_at_random.errors
    assert len(kill_at_random.errors.strip().splitlines()) == 1
    succeed("search", small_yaml, "--run", stopped, "--resume", *more)
    same_run(whole, stopped, "supernet")


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
    same_run(whole, folder, "supernet")


def test_a_loss_that_is_not_finite_is_reported_in_one_line(tmp_path, small_yaml, pattern):
    more = ["train.lr=1e30", "train.warmup_steps=0", "train.clip=0"]
    message = fail(1, "retrain", pattern, small_yaml, "--run", tmp_path / "run", *more)
    assert message.startswith("error: step ") and "no checkpoint yet" in message


def test_the_prepare_command_prints_its_folder_and_counts(small_yaml):
    done = subprocess.run(
        [sys.executable, "-m", "nas.prepare", str(small_yaml)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "train:" in done.stdout and "words kept" in done.stdout


def test_a_search_warns_if_its_budget_has_no_room_for_attention(small_yaml, tmp_path):
    given = ["search.schedule=sequential", "search.warmup_steps=null", "train.steps=2", "search.logits_steps=1"]
    given += ["search.latency.source=flops", "search.latency.target=0.4"]
    shown = succeed("search", small_yaml, "--run", tmp_path / "run", *given)
    assert "no pattern within search.latency.target=0.4 has an attention block" in shown


def test_a_text_that_is_too_short_is_reported_before_latencies_are_measured(small_yaml, tmp_path):
    given = ["train.segment=4000", "search.latency.source=measured"]
    done = run("search", small_yaml, "--run", tmp_path / "run", *given)
    assert done.returncode == 2 and "train stream has" in done.stderr and "measuring" not in done.stdout
    assert not (tmp_path / "run").exists()
