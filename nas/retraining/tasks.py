"""Tasks: commands that run in separate processes, several at a time."""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the folder of the scripts
POLL_S = 0.2
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class Task:
    """A command that can be repeated until it has written the file `result`. Its output is appended to `log`."""

    name: str
    command: list[str]
    result: Path
    log: Path


def script_task(name: str, script: str, arguments: list, result: Path, log: Path) -> Task:
    """The task of a script of the four stages."""
    file = ROOT / script
    if file.is_relative_to(Path.cwd()):  # so that the command in provenance.yaml also works in other checkouts
        file = file.relative_to(Path.cwd())
    return Task(name, [sys.executable, str(file), *map(str, arguments)], result, log)


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
    tasks, failed, begun = unfinished(tasks), {}, time.monotonic()
    worker, gpu_cycle, stop = threading.local(), itertools.cycle(gpus or [None]), threading.Event()

    def choose_gpu() -> None:
        worker.gpu = next(gpu_cycle)

    with ThreadPoolExecutor(workers, initializer=choose_gpu) as pool:
        try:
            futures = {pool.submit(run_task, task, worker, stop): task.name for task in tasks}
            for done, future in enumerate(as_completed(futures), start=1):
                name, (reason, seconds) = futures[future], future.result()
                if reason:
                    failed[name] = reason
                outcome = f"FAILED: {reason}" if reason else "finished"
                left = (time.monotonic() - begun) / done * (len(tasks) - done)
                times = f"{timedelta(seconds=round(seconds))}; about {timedelta(seconds=round(left))} left"
                print(f"[{done}/{len(tasks)}] {name} {outcome}, {times}", flush=True)
        finally:
            stop.set()  # after Ctrl-C the pool waits here until the tasks have saved
    return failed


def run_task(task: Task, worker: threading.local, stop: threading.Event) -> tuple[str, float]:
    """Run a task on worker.gpu, if that is not None. Returns why it failed, or an empty text, and the seconds it took.

    If `stop` is set, the task receives Ctrl-C, or does not begin.
    """
    began = time.monotonic()
    if stop.is_set():
        return "interrupted", 0.0
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with open(task.log, "ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            task.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ if worker.gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": worker.gpu},
            preexec_fn=PRCTL and end_with_parent,
            start_new_session=True,  # so that the terminal sends Ctrl-C to this process only, which passes it on once
        )
    while process.poll() is None:
        if stop.wait(POLL_S):
            process.send_signal(signal.SIGINT)
            process.wait()
    reason = "" if task.result.exists() else f"it did not write {task.result}"
    if process.returncode:
        reason = last_line(task.log, log_start) or f"exit status {process.returncode}"
    return reason, time.monotonic() - began


def end_with_parent() -> None:
    """The child asks Linux for SIGTERM when the thread that started it ends, so that the child saves."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def last_line(path: Path, start: int) -> str:
    """The last line with text in a file, from the byte `start` on."""
    text = path.read_bytes()[start:].decode(errors="replace")
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
