"""Tasks: commands that run in separate processes, several at a time."""

import itertools
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from nas.core.run_folder import count_cores
from nas.jobs.forks import start_command, wait_for

ROOT = Path(__file__).resolve().parents[2]  # the folder of the scripts


@dataclass(frozen=True)
class Task:
    """What `python ARGUMENTS` runs, until it has written the file `result`. Its output is appended to `log`."""

    name: str
    arguments: list[str]
    result: Path
    log: Path


def script_task(name: str, script: str, arguments: list, result: Path, log: Path) -> Task:
    """The task of a script of the four stages."""
    return Task(name, [str(ROOT / script), *map(str, arguments)], result, log)


def unfinished(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if not task.result.exists()]


def run_tasks(tasks: list[Task], workers: int, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Run the unfinished tasks, at most `workers` at a time. Returns {name: reason} of the tasks that failed.

    A failure does not stop the other tasks. Worker i uses GPU i modulo their number.
    After Ctrl-C this function sends it to the tasks, waits until they have saved, and raises KeyboardInterrupt. If this
    process dies, the tasks save and end.

    Args:
        gpus: names for CUDA_VISIBLE_DEVICES.
    """
    tasks, failed, begun = unfinished(tasks), {}, time.monotonic()
    worker, gpu_cycle, stop = threading.local(), itertools.cycle(gpus or [None]), threading.Event()
    with ThreadPoolExecutor(workers, initializer=lambda: setattr(worker, "gpu", next(gpu_cycle))) as pool:
        try:
            futures = {pool.submit(run_task, task, worker, stop): task.name for task in tasks}
            for done, future in enumerate(as_completed(futures), start=1):
                name, (reason, seconds) = futures[future], future.result()
                if reason:
                    failed[name] = reason
                outcome = f"FAILED: {reason}" if reason else "finished"
                left = timedelta(seconds=round((time.monotonic() - begun) / done * (len(tasks) - done)))
                more = f"; about {left} left" if done < len(tasks) else ""
                print(f"[{done}/{len(tasks)}] {name} {outcome}, {timedelta(seconds=round(seconds))}{more}", flush=True)
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
    log_start = task.log.stat().st_size if task.log.exists() else 0
    environment = os.environ if worker.gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": worker.gpu}
    status = wait_for(start_command(task.arguments, task.log, task.log, environment=environment), stop)
    reason = "" if task.result.exists() else f"it did not write {task.result}"
    if status:
        reason = last_line(task.log, log_start) or f"exit status {status}"
    return reason, time.monotonic() - began


def last_line(path: Path, start: int) -> str:
    """The last line with text in a file, from the byte `start` on."""
    text = path.read_bytes()[start:].decode(errors="replace")
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def workers(context) -> int:
    """Trainings at a time: one on a GPU; on a CPU as many as its cores have room for. context: a DeviceContext."""
    return 1 if context.is_gpu else max(1, count_cores() // context.threads)
