"""Tasks: commands that run in separate processes, several at a time."""

import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class Task:
    """A command that can be repeated until it has written the file `result`. Its output is appended to `log`."""

    name: str
    command: list[str]
    result: Path
    log: Path

    @property
    def shell_line(self) -> str:
        """The command for a shell in any working directory."""
        return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(self.command)}"


def unfinished(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if not task.result.exists()]


def run_tasks(tasks: list[Task], workers: int, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Run the unfinished tasks, at most `workers` at a time. Returns {name: reason} of the tasks that failed.

    A failure does not stop the other tasks. Worker i uses GPU i modulo their number.
    After Ctrl-C this function sends it to the tasks, waits until they have saved, and raises KeyboardInterrupt. If this
    process dies, Linux ends the tasks.

    Args:
        gpus: names for CUDA_VISIBLE_DEVICES.
    """
    waiting, running, failed = unfinished(tasks), {}, {}
    total, begun, free = len(waiting), time.monotonic(), list(range(workers))
    try:
        while waiting or running:
            while waiting and free:
                task, worker = waiting.pop(0), free.pop(0)
                log_start = task.log.stat().st_size if task.log.exists() else 0
                process = start(task, gpus[worker % len(gpus)] if gpus else None)
                running[process] = task, worker, time.monotonic(), log_start
            time.sleep(POLL_S)
            for process in [process for process in running if process.poll() is not None]:
                task, worker, started, log_start = running.pop(process)
                free.append(worker)
                if process.returncode:
                    failed[task.name] = last_line(task.log, log_start) or f"exit status {process.returncode}"
                elif not task.result.exists():
                    failed[task.name] = f"it did not write {task.result}"
                done = total - len(waiting) - len(running)
                outcome = f"FAILED: {failed[task.name]}" if task.name in failed else "finished"
                taken, left = time.monotonic() - started, (time.monotonic() - begun) / done * (total - done)
                print(f"[{done}/{total}] {task.name} {outcome}, {clock(taken)}; about {clock(left)} left", flush=True)
    except KeyboardInterrupt:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()
        raise
    return failed


def start(task: Task, gpu: str | None) -> subprocess.Popen:
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with open(task.log, "a", encoding="utf-8") as log:
        return subprocess.Popen(
            task.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=None if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
            preexec_fn=end_with_parent(),
            start_new_session=True,  # so that the terminal sends Ctrl-C to this process only, which passes it on once
        )


def end_with_parent() -> Callable[[], object] | None:
    """A function that the child process runs first. It asks Linux for SIGTERM when the parent ends, so that the child
    saves.
    """
    try:
        prctl = ctypes.CDLL("libc.so.6").prctl  # loaded here, because few calls are safe between fork and exec
    except (OSError, AttributeError):
        return None
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def last_line(path: Path, start: int) -> str:
    """The last line with text in a file, from the byte `start` on."""
    text = path.read_bytes()[start:].decode(errors="replace")
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def clock(seconds: float) -> str:
    """h:mm:ss"""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
