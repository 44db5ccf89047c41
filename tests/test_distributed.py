"""Several processes of one run, started by torchrun: results equal to those of one process, stops and failures."""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from nas.core.errors import InputError
from nas.core.files import read_jsonl, read_yaml
from nas.training import distributed
from tests.processes import ROOT, run_command, wait_for

pytestmark = pytest.mark.slow

ALONE = None  # no launcher: one process
SEARCH, RETRAIN = ROOT / "search.py", ROOT / "retrain.py"
LONG = ["train.steps=4000", "train.log_every=40", "train.evaluate_every=0", "train.checkpoint_every=40"]


def torchrun(processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--"]


def start(launcher, program, *arguments) -> subprocess.Popen:
    command, environment = [*launcher, str(program), *map(str, arguments)], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(launcher, program, *arguments) -> subprocess.CompletedProcess:
    if launcher is ALONE:
        return run_command([program, *arguments])
    process = start(launcher, program, *arguments)
    out, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def succeed(*command) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def config(tmp_path_factory, small_yaml) -> Path:
    """A configuration of 40 steps, each logged. It has no dropout, because each rank draws its own random numbers."""
    content = yaml.safe_load(small_yaml.read_text())
    content["model"]["dropout"] = 0.0
    content["train"] |= {"steps": 40, "log_every": 1, "evaluate_every": 25}
    path = tmp_path_factory.mktemp("ranks") / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def assert_same_run(one: Path, two: Path, tolerance: float = 1e-5) -> None:
    """Assert that losses and pi are equal at every step, except for rounding, which on some CPUs is larger in single
    steps: so a loss may differ by twice the tolerance, and the mean by a fifth of it.
    """
    differences = []
    for a, b in zip(*(read_jsonl(run / "metrics.jsonl") for run in (one, two)), strict=True):
        assert [a[key] for key in ("step", "split", "tokens")] == [b[key] for key in ("step", "split", "tokens")]
        differences.append(abs(a["nll"] - b["nll"]))
    assert max(differences) < 2 * tolerance and np.mean(differences) < tolerance / 5, differences
    if (one / "pi.jsonl").exists():
        for a, b in zip(*(read_jsonl(run / "pi.jsonl") for run in (one, two)), strict=True):
            torch.testing.assert_close(torch.tensor(a["pi"]), torch.tensor(b["pi"]), rtol=0, atol=tolerance)


SEARCHES = {
    "four": [],
    "sizes, parts": [
        "search.operations=[attention,window 6,dense,conv,dense 4x]",
        "model.ngram_rows=[13,11]",
        "train.grad_accum_steps=2",
    ],
    "shared": ["search.split=shared", "model.cutoffs=[5,20]"],
    "hard, latency": ["search.sampling=hard", "search.latency.source=flops", "search.latency.target=0.3"],
}


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_a_search_on_two_or_four_processes_equals_that_on_one(options, config, tmp_path):
    alone = [option for option in options if not option.startswith("train.grad_accum_steps")]
    processes = 2 if options else 4
    succeed(ALONE, SEARCH, config, "--run", tmp_path / "one", *alone)
    shown = succeed(torchrun(processes), SEARCH, config, "--run", tmp_path / "several", *options)
    assert shown.count("with the SuperNet's weights on valid: ") == 1
    assert_same_run(tmp_path / "one", tmp_path / "several")
    assert read_yaml(tmp_path / "several" / "provenance.yaml")["processes"] == processes


@pytest.mark.parametrize(
    "options",
    [
        ["model.cutoffs=[5,20]", "model.tie_embeddings=true", "model.ngram_rows=[13,11]"],
        ["model.cutoffs=[5,20]", "model.div_value=2", "train.short_share=0.5"],
    ],
    ids=["tied", "divided, short segments"],
)
def test_a_retraining_on_two_processes_equals_that_on_one(options, config, tmp_path):
    """A single row often has no token of the last tail. Its parameters still need a gradient on each rank.

    Training enlarges rounding errors in fp32: a linear block after attention to 2e-5, so it comes first here, and 50
    steps with short segments to 1.2e-5.
    """
    pattern = tmp_path / "pattern.yaml"
    pattern.write_text("format: par-pattern/2\nblocks: [linear, dense, window, attention]\n")
    succeed(ALONE, RETRAIN, pattern, config, "--run", tmp_path / "one", *options)
    succeed(torchrun(2), RETRAIN, pattern, config, "--run", tmp_path / "two", *options, "train.grad_accum_steps=2")
    assert_same_run(tmp_path / "one", tmp_path / "two")
    one, two = (read_yaml(tmp_path / name / "results.yaml") for name in ("one", "two"))
    assert one["test"]["tokens"] == two["test"]["tokens"] and one["best_step"] == two["best_step"]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    file = folder / "metrics.jsonl"
    try:
        wait_for(lambda: file.exists() and any(line["step"] >= step for line in read_jsonl(file)), process)
    except AssertionError:
        process.terminate()  # torchrun ends its processes too
        raise


def rank_of(process: subprocess.Popen, rank: int) -> int:
    """The process id of one of torchrun's processes."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    own = f"\0RANK={rank}\0".encode()
    return next(int(pid) for pid in children if own in Path(f"/proc/{pid}/environ").read_bytes())


def stop_early(folder, config, options, send: Callable) -> dict:
    """Send a signal to two processes that search. They must tell it once. Returns their checkpoint."""
    process = start(torchrun(2), SEARCH, config, "--run", folder, *options)
    wait_for_step(folder, 20, process)
    send(process)
    _, errors = process.communicate(timeout=60)
    assert errors.count("rerun the same command with --resume to continue") == 1
    assert "terminate called" not in errors and "contact" not in errors
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["step"] >= 20 and len(saved["random"]) == 2
    return saved


def test_a_stopped_run_resumes_with_another_number_of_processes(config, tmp_path):
    """Two processes stop on a signal, and one process resumes. The result equals that of a run without a stop."""
    options = ["train.steps=300", "train.log_every=20", "train.evaluate_every=0"]
    succeed(ALONE, SEARCH, config, "--run", tmp_path / "whole", *options)
    folder = tmp_path / "stopped"
    saved = stop_early(folder, config, options, lambda process: process.send_signal(signal.SIGTERM))
    assert saved["step"] < 300
    shown = succeed(ALONE, SEARCH, config, "--run", folder, *options, "--resume")
    assert f"continuing from step {saved['step']} of 300" in shown and "1 thread, 1 process\n" in shown
    assert_same_run(tmp_path / "whole", folder, tolerance=1e-4)  # 300 steps let rounding grow


def test_two_processes_resume_exactly(small_yaml, tmp_path):
    """With dropout, a run that was stopped and resumed is bit-identical to one that never stopped."""
    options = ["train.steps=120", "train.log_every=10", "train.evaluate_every=0", "model.dropout=0.3"]
    succeed(torchrun(2), SEARCH, small_yaml, "--run", tmp_path / "whole", *options)
    folder = tmp_path / "stopped"
    # A signal to one rank stops all ranks.
    saved = stop_early(folder, small_yaml, options, lambda process: os.kill(rank_of(process, 1), signal.SIGTERM))
    first, second = saved["random"]
    assert saved["step"] < 120 and not torch.equal(first["cpu"], second["cpu"])
    assert "random numbers" not in succeed(torchrun(2), SEARCH, small_yaml, "--run", folder, *options, "--resume")
    for name in ("metrics.jsonl", "pi.jsonl"):
        assert read_jsonl(folder / name) == read_jsonl(tmp_path / "whole" / name)


def test_a_killed_process_ends_the_run_which_can_be_resumed(config, tmp_path):
    folder = tmp_path / "run"
    process = start(torchrun(2), SEARCH, config, "--run", folder, *LONG)
    wait_for_step(folder, 80, process)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    begun = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - begun < 40
    assert "Signal 9 (SIGKILL)" in err
    assert f'Traceback (most recent call last):\n  File "{ROOT / "search.py"}' not in err
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] >= 40


def test_bad_input_is_reported_once_and_writes_nothing(config, tmp_path):
    done = run(torchrun(3), SEARCH, config, "--run", tmp_path / "run")
    assert (
        done.returncode == 1
        and done.stderr.count("error: train.batch_size=4 must be a multiple of the 3 processes\n") == 1
    )
    assert not (tmp_path / "run").exists()


HEAD = """
import os, signal, sys
sys.path.insert(0, {root!r})
sys.argv = ["search.py", {config!r}, "search.method=gumbel", "--run", {folder!r}]
import search, torch, nas.gumbel.gumbel_phase
from nas.core.errors import Interrupted, rank, run_command
from nas.gumbel.gumbel_phase import GumbelPhase
"""


def run_program(text: str, folder: Path, config="", **more) -> subprocess.CompletedProcess:
    """Run a program on two ranks, with the names in braces replaced. Its search writes to folder / "run"."""
    names = {"root": str(ROOT), "config": str(config), "folder": str(folder / "run")}
    (folder / "program.py").write_text(text.format(**names, **more))
    return run(torchrun(2), folder / "program.py")


BROKEN = """
original = GumbelPhase.step
def step(self, number):
    if number == 20 and rank() == 1:
        {fault}
    return original(self, number)
GumbelPhase.step = step
run_command(search.main)
"""
FAULTS = {
    "self.supernet.embedding.weight.data[0, 0] += 1": "must agree but differ in the sums of the weights",
    "self.logits.values.data[0, 0] += 1e-6": "must agree but differ in the logits",
    "torch.rand(1, generator=self.logits.generator)": "must agree but differ in the state of the sampling",
    "raise FloatingPointError('the training loss is nan')": "rank 1: error: step 20: the training loss is nan",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_differs_or_fails_ends_the_run(fault, config, tmp_path):
    """At step 20, the weights, the logits or the sampler of one rank change, or the rank fails."""
    process = run_program(HEAD + BROKEN, tmp_path, config, fault=fault)
    assert process.returncode == 1 and FAULTS[fault] in process.stderr, process.stderr
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"] < 20


APART = """
sys.argv.append("train.steps=22")
original = nas.gumbel.gumbel_phase.build_supernet
def build(*arguments):
    torch.manual_seed(rank())
    return original(*arguments)
nas.gumbel.gumbel_phase.build_supernet = build
run_command(search.main)
"""


def test_ranks_begin_with_equal_weights_from_different_seeds(config, tmp_path):
    done = run_program(HEAD + APART, tmp_path, config)
    assert done.returncode == 0, done.stderr


FUNCTIONS = """
import sys
sys.path.insert(0, {root!r})
import torch
from torch import nn
from nas.training import distributed
with distributed.process_group(torch.device("cpu")):
    me = distributed.rank()
    parameters = [nn.Parameter(torch.zeros(n)) for n in (4, 12, 3, 6, 2)]
    for number, parameter in enumerate(parameters[:-1]):
        parameter.grad = torch.full_like(parameter, float(10 * number + me))
    distributed.all_reduce_gradients(parameters)
    network = nn.Linear(2, 2)
    nn.init.constant_(network.weight, float(me + 1))
    distributed.broadcast_parameters(network)
    rows = distributed.gather_rows(torch.tensor([[me, 0], [me, 1]]))
    found = dict(
        gradients=[None if p.grad is None else sorted(set(p.grad.tolist())) for p in parameters],
        mean=distributed.all_reduce_mean(torch.tensor(float(me))).item(),
        total=distributed.all_reduce_sum(torch.tensor([me, 1.5])).tolist(),
        any_of=[distributed.any_rank(me == 1), distributed.any_rank(False)],
        rows=None if rows is None else rows.tolist(),
        share=str(distributed.rank_rows(8, 2)),
        only=distributed.broadcast_from_main(lambda: me + 7),
        of_all=distributed.all_gather(me),
        shared=network.weight.sum().item(),
    )
    said = distributed.all_gather(found)
if me == 0:
    print(said)
"""


def test_collectives_and_shares_of_rows_on_two_ranks(tmp_path):
    done = run_program(FUNCTIONS, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = ast.literal_eval(done.stdout)
    for found in (first, second):
        assert found["gradients"] == [[0.5], [10.5], [20.5], [30.5], None]
        assert found["mean"] == 0.5 and found["total"] == [1.0, 3.0] and found["any_of"] == [True, False]
        assert found["only"] == 7 and found["of_all"] == [0, 1] and found["shared"] == 4.0
    assert first["rows"] == [[0, 0], [0, 1], [1, 0], [1, 1]] and second["rows"] is None
    assert (first["share"], second["share"]) == ("slice(0, 4, None)", "slice(4, 8, None)")


def test_collectives_do_nothing_in_a_single_process():
    x = torch.tensor([1.0, 2.0])
    assert distributed.world_size() == 1 and distributed.is_main()
    assert distributed.all_reduce_mean(x) is x and distributed.gather_rows(x) is x
    assert distributed.rank_rows(6, 3) == slice(0, 6) and distributed.broadcast_from_main(lambda: 5) == 5
    with pytest.raises(InputError, match=r"multiple of the 1 processes times train.grad_accum_steps=4"):
        distributed.rank_rows(6, 4)


THREADS = """
original = GumbelPhase.step
def step(self, number):
    if number == {stop} and rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])  # may import modules that keep the group
    return original(self, number)
GumbelPhase.step = step
try:
    search.main()
    ended = 0
except Interrupted:
    ended = 20
names = [open("/proc/self/task/" + task + "/comm").read() for task in os.listdir("/proc/self/task")]
assert not [name for name in names if "gloo" in name], names
assert ended == {stop}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("stop", [0, 20], ids=["finished", "interrupted"])
def test_no_thread_of_the_process_group_outlives_it(stop, config, tmp_path):
    """A thread of gloo that still runs when the interpreter ends may abort the process."""
    done = run_program(HEAD + THREADS, tmp_path, config, stop=stop)
    assert done.returncode == 0, done.stderr
