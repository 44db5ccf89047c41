"""The four stages as a user types them: whole runs, and bad input."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from models.operations.registry import OPERATIONS
from nas import load_model
from nas.core.pattern import abbreviate
from retrain import notice_other_sizes
from tests.making import assert_same_run
from tests.processes import ROOT, refuse, run, succeed

pytestmark = pytest.mark.slow


def test_the_four_stages_end_to_end(tmp_path, small_yaml):
    """Runs the commands from another folder, with relative paths."""
    (tmp_path / "mine.yaml").write_text(small_yaml.read_text())
    here = {"cwd": tmp_path}
    shown = succeed("search", "mine.yaml", "--run", "out/search", "train.log_every=2", **here)
    assert re.search(r"likeliest pattern [adi]{3}  [\d,]+ tokens/s", shown)
    files = {"config.yaml", "provenance.yaml", "pi.jsonl", "metrics.jsonl", "train.log", "checkpoint.pt", "tensorboard"}
    assert files <= {path.name for path in (tmp_path / "out/search").iterdir()}
    history = [json.loads(line) for line in (tmp_path / "out/search/pi.jsonl").read_text().splitlines()]
    assert [line["step"] for line in history] == [0, *range(2, 25, 2)]
    assert history[0]["pi"] == [[pytest.approx(1 / 3)] * 3] * 3
    assert set(history[0]) >= {"step", "temperature", "operations", "pi", "expected_cost_ratio"}

    shown = succeed("derive", "out/search", **here)
    assert "block  choice" in shown and "written to out/search/pattern.yaml" in shown
    derived = yaml.safe_load((tmp_path / "out/search/pattern.yaml").read_text())
    assert derived["format"] == "par-pattern/2"
    assert len(derived["blocks"]) == 3

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
    assert "frames of 13 logged steps" in shown
    for name in ("pi.gif", "pi.png", "pi_over_time.png", "learning_curves.png", "pattern.png"):
        assert (tmp_path / "out/search" / name).stat().st_size > 1000
    picture, derived = tmp_path / "out/search/pattern.png", tmp_path / "out/search/pattern.yaml"
    before = picture.read_bytes()
    derived.write_text("format: par-pattern/2\nblocks: [attention, attention, identity]\n")
    succeed("animate", "out/search", **here)
    assert picture.read_bytes() != before  # the picture follows pattern.yaml
    assert "learning_curves.png" in succeed("animate", "out/retrain", **here)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "out"]


def test_four_stages_with_all_candidates_on_bytes(tmp_path, small_yaml):
    """Uses more keys than a dense mask allows, recomputation, the depth-scaled initialisation, and
    measured latencies.
    """
    operations = [*OPERATIONS, "attention key_heads=1", "window 20 heads=4", "dense 4x"]
    sizes = ["data.tokenizer=bytes", "train.segment=160", "train.memory=160", "train.batch_size=2", "train.steps=10"]
    sizes += ["model.init=depth_scaled", "model.activation=gelu", "model.recompute=true", "train.log_every=2"]
    search = tmp_path / "search"
    own = f"search.operations=[{','.join(operations)}]", "search.latency.source=measured"
    shown = succeed("search", small_yaml, "--run", search, *sizes, *own)
    assert all(f"\n{name} " in shown for name in operations)
    (table,) = yaml.safe_load((search / "latency.yaml").read_text())["tables"]
    assert set(table["blocks"]) == set(operations)
    succeed("derive", search, "--pareto", "0.5,1")
    succeed("animate", search)
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(f"format: par-pattern/2\nblocks: [{', '.join(OPERATIONS)}, window 9, ak1]\n")
    shown = succeed("retrain", mixed, small_yaml, "--run", tmp_path / "retrain", *sizes)
    assert f"pattern {abbreviate([*OPERATIONS, 'window 9', 'attention key_heads=1'])}, " in shown
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
    message = refuse("search", small_yaml, "--run", folder, "--train.stepz=3")  # dashes do not matter
    assert message == "error: unknown key 'train.stepz'; the nearest is 'train.steps' (--help lists all)"
    for bad in ("model.heads=3", "data.source=/nowhere", "data.tokenizer=wordpiece", "train.batch_size=9999"):
        refuse("search", small_yaml, "--run", folder, bad)
        refuse("retrain", pattern, small_yaml, "--run", folder, bad)
    message = refuse("search", small_yaml, "--run", folder, "model.cutoffs=[9,99999]")
    assert "must stay below the vocabulary size" in message
    assert "cannot read the pattern" in refuse("retrain", tmp_path / "none.yaml", small_yaml, "--run", folder)
    empty = tmp_path / "empty.yaml"
    empty.write_text("format: par-pattern/2\nblocks: [linear, dense]\n")
    grid = ["data.tokenizer=bytes", "model.grid=[2,3,1]"]
    told = "linear cannot read images; remove it, or model.grid=[2, 3, 1]"
    assert refuse("retrain", empty, small_yaml, "--run", folder, *grid) == f"error: {empty}: block 1: {told}"
    message = refuse("search", small_yaml, "--run", folder, *grid, "search.operations=[linear,dense]")
    assert message == f"error: search.operations: entry 1: {told}"
    empty.write_text("format: par-pattern/2\nblocks: [dense, window 99]\n")
    message = refuse("retrain", empty, small_yaml, "--run", folder)
    told = "window=99 must be at most train.segment + train.memory, which is 16"
    assert message == f"error: {empty}: block 2: window 99: {told}"
    assert not folder.exists()


def test_runs_are_not_overwritten(searched, retrained, small_yaml, pattern):
    before = [(searched / name).read_bytes() for name in ("metrics.jsonl", "outcome.yaml")]
    assert "already holds a run; add --resume" in refuse("search", small_yaml, "--run", searched)
    resume = ["search", small_yaml, "--run", searched, "--resume"]
    assert "another configuration: train.lr" in refuse(*resume, "train.lr=1")
    assert "model.cutoffs ([] -> [" in refuse(*resume, "model.cutoffs=auto")
    assert "holds a search run" in refuse("retrain", pattern, small_yaml, "--run", searched, "--resume")
    shown = succeed(*resume)  # a finished run does not change
    assert "next: python derive.py" in shown and "continuing" not in shown
    assert [(searched / name).read_bytes() for name in ("metrics.jsonl", "outcome.yaml")] == before
    before = (retrained / "metrics.jsonl").read_bytes(), (retrained / "results.yaml").read_bytes()
    assert "test: perplexity" in succeed("retrain", pattern, small_yaml, "--run", retrained, "--resume")
    after = (retrained / "metrics.jsonl").read_bytes(), (retrained / "results.yaml").read_bytes()
    assert before == after


def test_the_config_yaml_of_a_run_repeats_it(searched, tmp_path):
    succeed("search", searched / "config.yaml", "--run", tmp_path / "again")
    assert_same_run(searched, tmp_path / "again", "supernet")


def test_auto_cutoffs_are_resolved_in_search_retrain_and_resumption(small_yaml, tmp_path):
    search, retrain = tmp_path / "search", tmp_path / "retrain"
    auto = ["model.cutoffs=auto", "train.steps=12"]
    succeed("search", small_yaml, "--run", search, *auto)
    settled = yaml.safe_load((search / "config.yaml").read_text())["model"]["cutoffs"]
    assert len(settled) == 2 and 0 < settled[0] < settled[1]
    succeed("derive", search)
    pattern = search / "pattern.yaml"
    assert yaml.safe_load(pattern.read_text())["model"]["cutoffs"] == settled

    succeed("retrain", pattern, small_yaml, "--run", retrain, *auto)
    others = yaml.safe_load((retrain / "config.yaml").read_text())["model"]["cutoffs"]
    assert others == settled
    # The given options and the resolved cutoffs are accepted, but not other cutoffs.
    succeed("retrain", pattern, small_yaml, "--run", retrain, *auto, "--resume")
    succeed("retrain", pattern, retrain / "config.yaml", "--run", retrain, "--resume")
    assert "model.cutoffs" in refuse("search", small_yaml, "--run", search, "train.steps=12", "--resume")


def test_eval_only_at_other_lengths(retrained, small_yaml, pattern, tmp_path):
    before = (retrained / "results.yaml").read_bytes()
    lengths = ["evaluate.segment=5", "evaluate.memory=20"]
    again = "retrain", pattern, small_yaml, "--eval-only", "--run"
    succeed(*again, retrained, *lengths)
    other = yaml.safe_load((retrained / "results-segment5-memory20.yaml").read_text())
    same = yaml.safe_load(before)
    assert (other["segment"], other["memory"]) == (5, 20)
    assert other["test"]["tokens"] == same["test"]["tokens"] and other["test"]["nll"] != same["test"]["nll"]
    assert (retrained / "results.yaml").read_bytes() == before
    assert "another configuration: train.lr" in refuse(*again, retrained, "train.lr=1")
    assert "holds no best.pt" in refuse(*again, tmp_path / "none")


def test_retrain_tells_which_sizes_differ_from_those_of_the_search(small_config, capsys):
    blocks = "NOTICE: the pattern has 2 blocks; model.blocks=3 is not used\n"
    wider = "NOTICE: dense was searched with d_ffn=32; it is trained with 24\n"
    narrow, wide, other = {"dense": {"d_ffn": 24}}, {"dense": {"d_ffn": 32}}, {"attention": {"heads": 4}}
    for count, sizes, told in (
        (2, narrow | other, blocks),
        (3, narrow, ""),
        (2, None, ""),  # no search
        (2, wide, wider + blocks),
        (3, wide | other, wider),
        (3, {"dense 2x": {"d_ffn": 48}}, ""),
    ):
        content = {"blocks": ["dense"] * count} | ({} if sizes is None else {"sizes": sizes})
        notice_other_sizes(content, small_config("model.blocks=3"))
        assert capsys.readouterr().out == told


def test_a_pattern_file_may_give_the_width_of_its_model(small_yaml, tmp_path):
    (path := tmp_path / "wide.yaml").write_text("format: par-pattern/2\nd_model: 32\nblocks: [d2x, {conv: 3}]\n")
    shown = succeed("retrain", path, small_yaml, "--run", tmp_path / "run", "train.steps=4")
    assert "NOTICE: the pattern has" not in shown and "pattern d2x c3, " in shown
    shapes = {name: tuple(weight.shape) for name, weight in load_model(tmp_path / "run").module.named_parameters()}
    assert shapes["blocks.0.operation.expand.weight"] == (64, 32) and shapes["blocks.1.operation.kernel"] == (3, 1, 32)
    shown = succeed("retrain", path, small_yaml, "--run", tmp_path / "own", "train.steps=4", "model.d_model=16")
    assert "NOTICE: the pattern has d_model=32; it is trained with model.d_model=16" in shown


def test_the_prepare_command_prints_its_folder_and_counts(small_yaml):
    shown = succeed("prepare", small_yaml)
    assert "train:" in shown and "words kept" in shown


def test_a_search_warns_if_its_budget_has_no_room_for_attention(small_yaml, tmp_path):
    given = ["train.steps=2", "search.warmup_steps=0", "search.arch_fraction=0.5"]
    given += ["search.latency.source=flops", "search.latency.target=0.4"]
    shown = succeed("search", small_yaml, "--run", tmp_path / "run", *given)
    assert "no pattern within search.latency.target=0.4 has an attention block" in shown


def test_a_text_that_is_too_short_is_reported_before_latencies_are_measured(small_yaml, tmp_path):
    given = ["train.segment=4000", "search.latency.source=measured"]
    done = run("search", small_yaml, "--run", tmp_path / "run", *given)
    assert done.returncode == 2 and "train stream has" in done.stderr and "measuring" not in done.stdout
    assert not (tmp_path / "run").exists()


def test_the_installed_command_calls_scripts_and_modules(tmp_path, small_yaml):
    def call(*arguments):
        command = [str(Path(sys.executable).with_name("par-nas")), *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    done = call("search", small_yaml, "--run", "run")
    assert done.returncode == 0, done.stderr
    assert "search.py" in yaml.safe_load((tmp_path / "run" / "provenance.yaml").read_text())["command"]
    assert call("derive", "run").returncode == 0 and (tmp_path / "run" / "pattern.yaml").exists()
    assert "usage: python -m nas.run" in call("run", "--help").stdout
    done = call("run", small_yaml, "--run", "other", "--minuts", 4)
    told = "error: unrecognized arguments: --minuts 4; the nearest option is --minutes; --help lists the arguments\n"
    assert (done.returncode, done.stderr) == (2, told)
    told = "error: unrecognized arguments: --minutes 4; --help lists the arguments\n"
    assert call("search", small_yaml, "--run", "other", "--minutes", 4).stderr == told
    done = call("sarch", small_yaml)
    assert done.returncode == 2 and done.stderr == "error: par-nas has no command sarch; the nearest is search\n"
