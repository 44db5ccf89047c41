"""Experiments of many parts: what is done is never done twice. Imports no torch.

Jobs are functions whose results are JSON files; tasks are commands, several of them at a time, or in shares.
"""

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import write_text

SETTINGS = "settings.json"


POLL_S, WAIT_S = 0.2, 2.0  # between looks at our own processes, and at the files of others


PR_SET_PDEATHSIG = 1  # prctl(2)


class Jobs:
    """A folder of results, by name, that were all made with the same settings.

    Several processes may share it, each with its own share of the names: `only`, a pattern with wildcards, or several
    with commas between.
    """

    def __init__(self, folder: Path, settings: list[str], only: str = "*"):
        """Raises InputError where the folder holds results of other settings."""
        self.folder, self.only = folder, only.split(",")
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / SETTINGS
        if not kept.exists():
            write_text(kept, json.dumps(sorted(settings)))
        before = json.loads(kept.read_text())
        if before != sorted(settings):
            raise InputError(
                f"{folder} holds results with {' '.join(before) or 'no overrides'}, not with "
                f"{' '.join(sorted(settings)) or 'none'}; name another folder with --out, or give the same"
            )

    def get(self, name: str) -> dict | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def do(self, name: str, work: Callable[[], dict]) -> dict | None:
        """The result of that name, made first where it is missing and among those to be done here; else None."""
        if self.get(name) is None and any(fnmatch(name, pattern) for pattern in self.only):
            write_text(self.folder / f"{name}.json", json.dumps(work()))
        return self.get(name)


@dataclass(frozen=True)
class Task:
    """A command that leaves the file `result` when it has finished, and can be repeated until it has. All that it
    prints is added to the file `log`. By its position in the list of all, processes share them out."""

    name: str
    command: list[str]
    result: Path
    log: Path
    position: int = 0


@dataclass(frozen=True)
class Share:
    """What one of `count` processes does of a list: every count-th task, from the index-th on."""

    index: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """Whether it does what only one process may."""
        return self.index == 0

    @property
    def alone(self) -> bool:
        return self.count == 1

    def has(self, task: Task) -> bool:
        return task.position % self.count == self.index


ALONE = Share()


def unfinished(tasks: list[Task]) -> list[str]:
    return [task.name for task in tasks if not task.result.exists()]


def wait_for(whom: str, missing: Callable[[], list[str]]) -> None:
    """Until nothing is missing that other processes are to make; what is, is said whenever that changes."""
    said = None
    while names := missing():
        if names != said:
            print(f"waiting for {whom}: {', '.join(names)}", flush=True)
        said = names
        time.sleep(WAIT_S)


def run_tasks(tasks: list[Task], workers: int, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Run those that have not finished, so many at a time, each worker on a GPU of its own as far as there are enough.

    gpus: as CUDA_VISIBLE_DEVICES names them. Returns why each failed that did; the others go on. Ctrl-C is handed on to
    them, and raised here once they have saved. Where this process is killed, Linux tells them to end.
    """
    waiting = [task for task in tasks if not task.result.exists()]
    total, begun, running, failed = len(waiting), time.monotonic(), {}, {}
    free = list(range(workers))
    try:
        while waiting or running:
            while waiting and free:
                task, worker = waiting.pop(0), free.pop(0)
                told = task.log.stat().st_size if task.log.exists() else 0  # by earlier calls
                process = start(task, gpus[worker % len(gpus)] if gpus else None)
                running[process] = task, worker, time.monotonic(), told
            time.sleep(POLL_S)
            for process in [process for process in running if process.poll() is not None]:
                task, worker, started, told = running.pop(process)
                free.append(worker)
                if process.returncode:
                    failed[task.name] = last_line(task.log, told) or f"exit status {process.returncode}"
                elif not task.result.exists():
                    failed[task.name] = f"it left no {task.result}"
                done = total - len(waiting) - len(running)
                words = f"FAILED: {failed[task.name]}" if task.name in failed else "finished"
                left = (time.monotonic() - begun) / done * (total - done)
                taken = clock(time.monotonic() - started)
                print(f"[{done}/{total}] {task.name} {words}, {taken}; about {clock(left)} left", flush=True)
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
            preexec_fn=ending_with_parent(),
            start_new_session=True,  # Ctrl-C comes to this process alone, which hands it on once
        )


def ending_with_parent() -> Callable[[], object] | None:
    """What a child of ours calls so that Linux sends it SIGTERM, at which a run saves, when we end in whatever way."""
    try:
        prctl = ctypes.CDLL("libc.so.6").prctl  # looked up here: between fork and exec little is safe
    except (OSError, AttributeError):
        return None
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def last_line(path: Path, start: int) -> str:
    """Of what stands in a file from a byte on."""
    text = path.read_bytes()[start:].decode(errors="replace")
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def clock(seconds: float) -> str:
    """h:mm:ss"""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
