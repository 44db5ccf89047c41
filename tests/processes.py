"""Commands in separate processes, as users type them."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nas.jobs.processes import start_command

ROOT = Path(__file__).parents[1]
STAGES = ("search", "derive", "retrain", "animate")


def run_command(arguments: list, cwd: Path = ROOT, timeout: float = 300) -> subprocess.CompletedProcess:
    """Like subprocess.run(["python", *arguments]) with captured text. arguments: SCRIPT.py or -m MODULE, then its
    arguments. Skips the test if the command refuses latencies, because it measured them on a busy machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = start_command(arguments, out, err, cwd)
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout)
        if "error: latencies vary too much" in err.read_text():
            pytest.skip("other programs disturb this machine too much to measure latencies")
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def wait_for(condition: Callable, process: subprocess.Popen | None = None, seconds: float = 180) -> None:
    """Wait until condition() holds. Fails after `seconds`, or if the process ends before."""
    until = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def command_of(name: str, *arguments) -> list[str]:
    """The arguments of Python that run a stage, such as `search`, or a module of nas, such as `generate`."""
    return list(map(str, [*([ROOT / f"{name}.py"] if name in STAGES else ["-m", f"nas.{name}"]), *arguments]))


def start(name: str, *arguments) -> subprocess.Popen:
    """A running command, whose stderr is text."""
    command = [sys.executable, *command_of(name, *arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run(name: str, *arguments, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return run_command(command_of(name, *arguments), cwd)


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
