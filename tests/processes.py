"""Commands in separate processes, which need not import torch each time.

A server process imports the modules that commands need, and each command runs in a fork of it. A command cannot change
the state of the server or of the tests.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = ("search", "derive", "retrain", "animate")
PRELOADED = ["torch", "torch._dynamo", "torch.utils.tensorboard", "sentencepiece", "omegaconf", "imageio.v3"]


def run_command(arguments: list, cwd: Path = ROOT, timeout: float = 300) -> subprocess.CompletedProcess:
    """Like subprocess.run(["python", *arguments]) with captured text. arguments: SCRIPT.py or -m MODULE, then its
    arguments. Skips the test if the command refuses latencies, because it measured them on a busy machine.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    arguments = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = context.Process(target=work, args=(arguments, cwd, out, err))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout)
        if "error: latencies vary too much" in err.read_text():
            pytest.skip("other programs disturb this machine too much to measure latencies")
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def run(name: str, *arguments, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run a stage, such as `search`, or a module of nas, such as `generate`."""
    return run_command([*([ROOT / f"{name}.py"] if name in STAGES else ["-m", f"nas.{name}"]), *arguments], cwd)


def succeed(name: str, *arguments, **more) -> str:
    """What a command prints, which must succeed."""
    done = run(name, *arguments, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(name: str, *arguments, status: int = 2, **more) -> str:
    """The only line of stderr of a command that must fail with this status."""
    done = run(name, *arguments, **more)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def work(arguments: list[str], cwd: Path, out: Path, err: Path) -> None:
    """Run in the fork what `python ARGUMENTS` runs."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
    os.chdir(cwd)
    if arguments[0] == "-m":
        sys.path[0], sys.argv = str(cwd), arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(arguments[0]).parent), arguments
        runpy.run_path(arguments[0], run_name="__main__")
