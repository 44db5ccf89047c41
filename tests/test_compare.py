"""nas.compare as a user types it, on a configuration that trains in seconds; what needs a clock has one of its own."""

import csv
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from nas.compare import parse_arguments
from nas.comparison.runner import Comparison, Timer, visible_gpus
from nas.comparison.spec import Contender, given_contenders, pattern_file, read_settings
from nas.comparison.tasks import Share
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.pattern import interleaved, network, read_pattern
from nas.costs.table import MILLISECONDS, CostTable

ROOT = Path(__file__).parents[1]
COMPARISON = {
    "format": "par-comparison/1",
    "search": "small.yaml",
    "retrain": "small.yaml",
    "patterns": ["interleaved", "dense-only", "parameters"],
    "pareto": [2.0],
    "seeds": [1, 2],
}


def compare(*arguments, **options):
    command = [sys.executable, "-m", "nas.compare", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def table(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines()))


def write_comparison_yaml(folder: Path, small_yaml: Path, **changed) -> Path:
    content = yaml.safe_load(small_yaml.read_text())
    content["train"] |= {"steps": 8, "evaluate_every": 0, "warmup_steps": 2, "checkpoint_every": 2}
    content["search"]["warmup_steps"] = 2
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    path = folder / "comparison.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (COMPARISON | changed).items() if v is not None}))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_yaml):
    """A comparison of one search, two rules and what follows from it, two seeds each."""
    folder = tmp_path_factory.mktemp("compare")
    path = write_comparison_yaml(folder, small_yaml)
    done = compare(path, "--run", folder / "run", "--workers", 2)
    assert done.returncode == 0, done.stderr
    return path, folder / "run", done


def test_everything_is_there(finished):
    _, run, done = finished
    rows = table(run / "comparison.csv")
    assert [row["name"] for row in rows] == ["interleaved", "dense-only", "searched", "searched-2", "parameters"]
    for row in rows:
        figures = [
            yaml.safe_load((run / "runs" / f"{row['blocks']}-{seed}" / "results.yaml").read_text()) for seed in (1, 2)
        ]
        perplexities = [about["test"]["word_perplexity"] for about in figures]
        assert float(row["word_perplexity_mean"]) == pytest.approx(np.mean(perplexities), rel=1e-4)
        assert float(row["word_perplexity_se"]) == pytest.approx(abs(np.diff(perplexities)[0]) / 2, rel=1e-4)
        assert float(row["latency_ms"]) > 0 and row["seeds"] == "2"
        assert int(row["parameters"]) == figures[0]["parameters"]
    assert float(rows[0]["latency_ratio"]) == 1.0
    hours = yaml.safe_load((run / "search-1" / "outcome.yaml").read_text())["wall_time_s"] / 3600
    assert [float(row["search_hours"]) > 0 for row in rows] == [False, False, True, True, False]
    assert float(rows[2]["search_hours"]) == pytest.approx(hours, rel=1e-3)
    claims = yaml.safe_load((run / "claims.yaml").read_text())
    assert claims["format"] == "par-claims/1" and all(
        {"claim", "holds", "sentence", "figures"} <= c.keys() for c in claims["claims"]
    )
    assert all(claim["sentence"] in done.stdout for claim in claims["claims"])
    assert (run / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "comparison.md").read_text() in done.stdout


def test_the_searched_pattern_is_that_of_derive(finished):
    _, run, _ = finished
    last = (run / "search-1" / "pi.jsonl").read_text().splitlines()[-1]
    pi = np.array(yaml.safe_load(last)["pi"])
    operations = yaml.safe_load(last)["operations"]
    assert read_pattern(run / "patterns" / "searched.yaml")["blocks"] == [operations[i] for i in pi.argmax(axis=1)]


def test_a_repetition_trains_nothing_and_says_the_same(finished):
    path, run, _ = finished
    before = {file: file.stat().st_mtime_ns for file in run.glob("*/*/checkpoint.pt")}
    before_table = (run / "comparison.csv").read_text()
    again = compare(path, "--run", run)
    assert again.returncode == 0 and "finished" not in again.stdout
    assert {file: file.stat().st_mtime_ns for file in run.glob("*/*/checkpoint.pt")} == before
    assert (run / "comparison.csv").read_text() == before_table


def test_more_seeds_train_only_what_is_new(finished):
    path, run, _ = finished
    more = compare(path, "--run", run, "--seeds", 1, 2, 3, "--report")
    assert more.returncode == 0 and "runs have not finished: " in more.stdout and "ddd-3" in more.stdout
    assert not (run / "runs" / "ddd-3").exists()


def test_another_recipe_is_refused_before_anything_is_trained(finished):
    path, run, _ = finished
    refused = compare(path, "--run", run, "train.lr=0.5")
    assert refused.returncode == 2 and "train.lr (0.003 -> 0.5)" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    path.write_text(yaml.safe_dump(COMPARISON | {"search_seeds": [1, 2]}))
    refused = compare(path, "--run", run)
    path.write_text(yaml.safe_dump(COMPARISON))
    assert refused.returncode == 2 and "search_seeds ([1] -> [1, 2])" in refused.stderr
    refused = compare(path, "--run", run / "search-1")
    assert refused.returncode == 2 and "holds a search run, not a compare run" in refused.stderr


def test_a_budget_that_joins_later_is_derived(finished):
    """It comes before the one that is there, whose file must not be taken for its own."""
    path, run, _ = finished
    path.write_text(yaml.safe_dump(COMPARISON | {"pareto": [1.5, 2.0]}))
    more = compare(path, "--run", run, "--seeds", 1)
    path.write_text(yaml.safe_dump(COMPARISON))
    assert more.returncode == 0, more.stderr
    about = read_pattern(run / "patterns" / "searched-1.5.yaml")["derived_from"]
    assert (about["method"], about["latency_budget"]) == ("budget", 1.5)
    assert "searched-1.5" in [row["name"] for row in table(run / "comparison.csv")]
    assert compare(path, "--run", run, "--report").returncode == 0  # as it was, for the tests that follow


def test_a_seed_or_several_workers_without_threads_are_refused(finished):
    path, run, _ = finished
    path.write_text(yaml.safe_dump(COMPARISON | {"method": "evolution"}))
    refused = compare(path, "--run", run)
    path.write_text(yaml.safe_dump(COMPARISON))
    assert refused.returncode == 2
    assert "searched-2.yaml was derived by budget without trials, not by evolution without trials" in refused.stderr
    for arguments, words in (
        (["seed=3"], "seed=3: every pattern is trained with several seeds; give them as --seeds"),
        (["--workers", 2, "train.threads=null"], "--workers 2 needs the threads of each: add train.threads="),
        (["--workers", 0], "--workers 0 must be at least 1"),
        (["--share", "2/2"], "--share 2/2 must be I/N, I from 0 to N-1"),
        (["--share", "1"], "--share 1 must be I/N, I from 0 to N-1"),
        (["--share", "0/2", "--report"], "--report is of all shares; leave --share out"),
    ):
        refused = compare(path, "--run", run, *arguments)
        assert refused.returncode == 2 and words in refused.stderr


def test_at_equal_parameters(finished, small_config):
    path, run, _ = finished
    done = compare(path, "--run", run, "--match-parameters", "--workers", 2, "--seeds", 1)
    assert done.returncode == 0, done.stderr
    rows = table(run / "comparison-matched.csv")
    usual, dense, *_ = (int(row["parameters"]) for row in rows)
    width = (small_config().model.d_model * 2 + 1) * 3  # parameters of one more d_ffn in three dense blocks
    assert abs(dense - usual) <= width / 2
    (trained,) = (run / "runs").glob("ddd-ffn*-1/config.yaml")
    assert f"ddd-ffn{yaml.safe_load(trained.read_text())['model']['d_ffn']}-1" == trained.parent.name
    assert (run / "comparison.csv").exists() and (run / "claims-matched.yaml").exists()


def test_a_failing_run_is_told_and_the_rest_goes_on(tmp_path, small_yaml):
    given = {"search": None, "pareto": None, "seeds": [1], "patterns": ["dense-only", "interleaved"]}
    path, run = write_comparison_yaml(tmp_path, small_yaml, **given), tmp_path / "run"
    nothing = compare(path, "--run", run, "--report")
    assert nothing.returncode == 2 and "holds no comparison yet" in nothing.stderr
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"patterns": ["interleaved"]}))
    assert compare(path, "--run", run).returncode == 0
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"patterns": ["dense-only", "interleaved"]}))
    (run / "runs" / "ddd-1").mkdir()
    with (run / "runs" / "ddd-1" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process is at this run
        done = compare(path, "--run", run)
    assert done.returncode == 1
    assert "1 failed, the rest is reported: ddd-1: error: --run" in done.stderr and "in use by another" in done.stderr
    assert "ddd-1 FAILED: error" in done.stdout and "| interleaved | ada | " in done.stdout
    again = compare(path, "--run", run)
    assert again.returncode == 0 and "| dense-only | ddd | " in again.stdout and "ada-1 finished" not in again.stdout


def test_killed_and_repeated_it_goes_on(tmp_path, small_yaml):
    """kill -9 in the middle of a training: the command it had under way saves and ends by itself."""
    given = {"search": None, "pareto": None, "seeds": [1], "patterns": ["interleaved"]}
    path, run = write_comparison_yaml(tmp_path, small_yaml, **given), tmp_path / "run"
    arguments = [path, "--run", run, "train.steps=600"]
    process = subprocess.Popen([sys.executable, "-m", "nas.compare", *map(str, arguments)], cwd=ROOT)
    wait_for((run / "runs" / "ada-1" / "checkpoint.pt").exists)
    process.kill()
    process.wait()
    wait_for(lambda: "stopped at step" in (run / "logs" / "ada-1.txt").read_text())
    assert not (run / "runs" / "ada-1" / "results.yaml").exists()
    again = compare(*arguments)
    assert again.returncode == 0 and "[1/1] ada-1 finished" in again.stdout
    assert "continuing from step" in (run / "logs" / "ada-1.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_the_end_of_a_job_let_runs_save(number, tmp_path, small_yaml):
    given = {"search": None, "pareto": None, "seeds": [1], "patterns": ["interleaved"]}
    path, run = write_comparison_yaml(tmp_path, small_yaml, **given), tmp_path / "run"
    command = [sys.executable, "-m", "nas.compare", str(path), "--run", str(run), "train.steps=5000"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for((run / "runs" / "ada-1" / "checkpoint.pt").exists)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in said and len(said.splitlines()) == 1
    assert "stopped at step" in (run / "logs" / "ada-1.txt").read_text()


@pytest.fixture
def begin():
    """compare() that does not wait for the end."""
    begun = []

    def start(*arguments) -> subprocess.Popen:
        command = [sys.executable, "-m", "nas.compare", *map(str, arguments)]
        begun.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for process in begun:
        with process:  # closes what is read from it
            process.kill()


def test_shares_side_by_side_do_what_one_process_does(begin, tmp_path, small_yaml):
    """With nothing to compare that a clock decides."""
    changed = {"patterns": ["interleaved", "dense-only"], "pareto": None, "search_seeds": [1, 2]}
    path, run, alone = write_comparison_yaml(tmp_path, small_yaml, **changed), tmp_path / "run", tmp_path / "alone"
    second = begin(path, "--run", run, "--share", "1/2")
    assert second.stdout.readline() == f"waiting for share 0: {run / 'config.yaml'}\n"
    first = begin(path, "--run", run, "--share", "0/2")
    said = [process.communicate(timeout=120) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert said[1][0].endswith("share 1 of 2 is done; share 0 reports\n")
    done = compare(path, "--run", alone, "--workers", 2)
    assert done.returncode == 0, done.stderr

    ran = [
        [line.split()[1] for line in out.splitlines() if " finished, " in line]
        for out in (said[0][0], said[1][0], done.stdout)
    ]
    assert sorted(ran[0] + ran[1]) == sorted(ran[2])
    (searched,) = {name[:-2] for name in ran[2] if name[-2:] == "-1"} - {"search", "ada", "ddd"}
    assert ran[0] == ["search-1", "derive-searched", "ada-1", f"{searched}-1", "ddd-2"]
    assert ran[1] == ["search-2", "ddd-1", "ada-2", f"{searched}-2"]
    assert not any("continuing from step" in log.read_text() for log in (run / "logs").iterdir())
    measured = {"latency_ms", "latency_ratio", "search_hours", "train_hours"}
    tables = [
        [{k: v for k, v in row.items() if k not in measured} for row in table(folder / "comparison.csv")]
        for folder in (run, alone)
    ]
    assert tables[0] == tables[1] and len(tables[0]) == 3


def test_a_share_that_fails_is_waited_for_until_all_is_repeated(begin, tmp_path, small_yaml):
    given = {"search": None, "pareto": None, "seeds": [1], "patterns": ["interleaved", "dense-only"]}
    path, run = write_comparison_yaml(tmp_path, small_yaml, **given), tmp_path / "run"
    first = begin(path, "--run", run, "--share", "0/2")
    wait_for((run / "comparison.yaml").exists)
    (run / "runs" / "ddd-1").mkdir(parents=True, exist_ok=True)
    with (run / "runs" / "ddd-1" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = compare(path, "--run", run, "--share", "1/2", timeout=60)
    assert second.returncode == 1 and "error: 1 failed, the rest is done: ddd-1: error: --run" in second.stderr
    assert "[1/1] ada-1 finished" in first.stdout.readline()
    assert first.stdout.readline() == "waiting for other shares: ddd-1\n"
    first.send_signal(signal.SIGTERM)  # the time limit
    assert "the same command goes on" in first.communicate(timeout=60)[1] and first.returncode == 130
    second = compare(path, "--run", run, "--share", "1/2", timeout=60)
    assert second.returncode == 0 and "[1/1] ddd-1 finished" in second.stdout
    first = compare(path, "--run", run, "--share", "0/2", timeout=60)
    assert first.returncode == 0 and "finished" not in first.stdout and "| dense-only | ddd | " in first.stdout


def test_the_slurm_file_gives_each_job_its_share(tmp_path, monkeypatch):
    file = ROOT / "experiments" / "compare" / "slurm.sh"
    assert subprocess.run(["bash", "-n", file]).returncode == 0
    stub = tmp_path / "srun"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    slurm = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_CPUS_PER_TASK": "4"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm}
    given = ["comparison.yaml", "--run", "a folder", "train.steps=8"]
    done = subprocess.run(["bash", file, *given], env=environment, capture_output=True, text=True, check=True)
    started = done.stdout.splitlines()
    monkeypatch.setattr(sys, "argv", started[started.index("nas.compare") :])
    arguments = parse_arguments()
    assert arguments.share == Share(3, 8) and arguments.run == Path("a folder")
    assert arguments.overrides == ["train.steps=8"]


def test_the_gpus_are_those_that_are_visible(small_config, monkeypatch):
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


COSTS = CostTable(MILLISECONDS, 1.0, {"attention": 4.0, "dense": 1.0, "identity": 0.0})


@pytest.fixture
def comparison(tmp_path, small_yaml, monkeypatch):
    """A comparison of 6 blocks with a clock of the test's own: a pattern takes what the table says, and 10% more where
    it begins with dense."""

    def measure(self, contenders, rounds):
        times = {c.key: COSTS.pattern(c.blocks) * (1.1 if c.blocks[0] == "dense" else 1.0) for c in contenders}
        return {key: {"median_ms": ms, "ratio_to_interleaved": ms / 16} for key, ms in times.items()}

    monkeypatch.setattr(Timer, "table", lambda self, kept: COSTS)
    monkeypatch.setattr(Timer, "measure", measure)

    def make(**changed) -> Comparison:
        path = write_comparison_yaml(tmp_path, small_yaml, **changed)
        settings, config = read_settings(path, {}), load_config(tmp_path / "small.yaml", ["model.blocks=6"])
        given = given_contenders(settings, path, 6)
        comparison = Comparison(settings, given, config, config, tmp_path / "run", ["model.blocks=6"])
        comparison.start(path.read_text())
        return comparison

    return make


SEARCHED = Contender("searched", "searched", ["attention", "dense", "dense", "identity", "attention", "dense"])  # 12 ms


def test_random_patterns_have_the_searched_ones_latency_as_measured(comparison):
    made = comparison(random=4, patterns=["interleaved"], pareto=None)
    made.write_pattern(SEARCHED)
    made.choose_rivals()
    drawn = [contender for contender in made.known() if contender.kind == "random"]
    assert [contender.name for contender in drawn] == [f"random-{n}" for n in range(1, 5)]
    assert len({network(c.blocks) for c in [SEARCHED, *drawn]}) == 5
    for contender in drawn:
        assert COSTS.pattern(contender.blocks) == 12.0 and contender.blocks[0] != "dense"
        about = read_pattern(pattern_file(made.path, contender.name))["derived_from"]
        assert about == {"method": "random", "at_latency_of": "addiad", "predicted_ratio": 1.0, "measured_ratio": 1.0}


def test_random_patterns_that_were_drawn_stay_and_more_can_join(comparison):
    made = comparison(random=2, patterns=["interleaved"], pareto=None)
    made.write_pattern(SEARCHED)
    made.choose_rivals()
    before = [contender.blocks for contender in made.known()]
    os.close(made.run.lock)
    more = comparison(random=4, patterns=["interleaved"], pareto=None)
    more.choose_rivals()
    assert [contender.blocks for contender in more.known()][: len(before)] == before
    assert len({network(contender.blocks) for contender in more.known()}) == len(before) + 2


def test_among_shares_what_was_not_found_is_awaited_no_longer(comparison):
    made = comparison(random=2, patterns=["interleaved"], pareto=None)
    assert made.awaited() == ["searched", "random-1", "random-2"]
    made.write_pattern(Contender("searched", "searched", ["dense"] * 6))  # with the clock here, no other takes as long
    made.choose_rivals()
    assert made.awaited() == [] and [contender.name for contender in made.known()] == ["interleaved", "searched"]


def test_positions_hold_whatever_has_been_found(comparison):
    made = comparison(random=2, patterns=["interleaved", "dense-only"], pareto=None)
    before = {task.name: task.position for task in made.training(made.known())}
    made.write_pattern(SEARCHED)
    made.write_pattern(Contender("random-1", "random", ["dense"] * 6))  # as dense-only, whose run it shares
    after = {task.name: task.position for task in made.training(made.known())}
    assert len(set(after.values())) == len(after) == 6 and before.items() <= after.items()


def test_most_parameters_within_the_latency(comparison):
    made = comparison(patterns=["parameters"], pareto=None)
    made.write_pattern(SEARCHED)
    made.choose_rivals()
    (richest,) = [contender for contender in made.known() if contender.kind == "parameters"]
    assert COSTS.pattern(richest.blocks) <= 12.0
    sizes = {name: made.parameters([name]) for name in COSTS.blocks}
    assert sizes["attention"] > sizes["dense"]  # at these widths, so attention where it can be paid
    assert sorted(richest.blocks) == ["attention"] * 1 + ["dense"] * 5 or COSTS.pattern(richest.blocks) == 12.0


def test_another_pattern_under_a_known_name_is_refused(comparison):
    made = comparison(patterns=["interleaved"], pareto=None)
    with pytest.raises(InputError, match=r"interleaved\.yaml is another pattern than dddddd"):
        made.write_pattern(Contender("interleaved", "given", ["dense"] * 6))


def test_latencies_are_measured_again_only_where_they_do_not_hold(comparison, monkeypatch):
    made, calls = comparison(patterns=["interleaved"], pareto=None), []
    monkeypatch.setattr(
        Timer, "measure", lambda self, contenders, rounds: calls.append(1) or {c.key: {} for c in contenders}
    )
    usual, other = Contender("interleaved", "given", interleaved(6)), Contender("other", "given", ["dense"] * 6)
    known = made.timer.measure_once([usual], {})
    assert made.timer.measure_once([usual], known) is known and len(calls) == 1
    both = made.timer.measure_once([usual, other], known)
    assert len(calls) == 2 and made.timer.measure_once([usual], both) is both
    made.timer.measure_once([usual], known | {"holds_for": known["holds_for"] | {"threads": 99}})
    assert len(calls) == 3
