"""Tasks: trainings in processes of their own, several at a time, on this machine or on the nodes of a cluster."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

from nas.core.run_folder import run_options

ROOT = Path(__file__).resolve().parents[2]  # the folder of the scripts
TRIES, LOST = 3, 255  # of a task that dies; the exit status of one whose server has died


@dataclass(frozen=True)
class Task:
    """What `python ARGUMENTS` runs, until it has written the file `result`. Its output is appended to `log`.

    run: the run folder that it starts or, after it has died, continues; None: it has none.
    """

    name: str
    arguments: list[str]
    result: Path
    log: Path
    run: Path | None = None

    @property
    def command(self) -> list[str]:
        return [*self.arguments, *map(str, run_options(self.run) if self.run else ())]


def training_task(name: str, arguments: list, run: Path, result: str, log: Path) -> Task:
    """retrain.py with a run folder. result: the name of its last file there."""
    return Task(name, [str(ROOT / "retrain.py"), *map(str, arguments)], run / result, log, run)


class Ended(NamedTuple):
    """How a process of a task ended, and on which node; "": here.

    status: its exit status, negative if a signal or a lost node ended it.
    """

    status: int
    node: str = ""

    @property
    def died(self) -> bool:
        return self.status < 0 or self.status == LOST


class Engine(Protocol):
    """Starts tasks. places: what each task that runs at the same time gets, such as the name of a GPU."""

    places: list[str | None]

    def warm_up(self) -> None:
        """Make the first task as fast as the others."""

    def run(self, task: Task, place: str | None, stop: threading.Event) -> Ended:
        """Run a task to its end. stop: it gets a Ctrl-C, and saves."""


def unfinished(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if not is_finished(task)]


def is_finished(task: Task) -> bool:
    """Whether the result is there. Reading the folders first makes NFS look again for what it did not find before."""
    for folder in (task.result.parent.parent, task.result.parent):
        with suppress(OSError):
            list(folder.iterdir())
    return task.result.exists()


def run_tasks(tasks: list[Task], engine: Engine | None) -> dict[str, str]:
    """Run the unfinished tasks, if any, one at each place at a time. Returns {name: reason} of those that failed.

    A failure does not stop the others. A task that dies, or whose node does, goes on from its last checkpoint, up to
    TRIES times in all. After Ctrl-C the tasks get it, and save; KeyboardInterrupt is raised. If this process dies, the
    tasks save and end.
    """
    tasks, failed, begun = unfinished(tasks), {}, time.monotonic()
    if not tasks:
        return {}
    worker, places, stop = threading.local(), iter(engine.places), threading.Event()
    with ThreadPoolExecutor(len(engine.places), initializer=lambda: setattr(worker, "place", next(places))) as pool:
        try:
            futures = {pool.submit(run_task, task, engine, worker, stop): task.name for task in tasks}
            for done, future in enumerate(as_completed(futures), start=1):
                name, (reason, node, seconds) = futures[future], future.result()
                if reason:
                    failed[name] = reason
                outcome = (f"FAILED: {reason}" if reason else "finished") + (f" on {node}" if node else "")
                left = timedelta(seconds=round((time.monotonic() - begun) / done * (len(tasks) - done)))
                more = f"; about {left} left" if done < len(tasks) else ""
                print(f"[{done}/{len(tasks)}] {name} {outcome}, {timedelta(seconds=round(seconds))}{more}", flush=True)
        finally:
            stop.set()  # after Ctrl-C the pool waits here until the tasks have saved
    return failed


def run_task(task: Task, engine: Engine, worker: threading.local, stop: threading.Event) -> tuple[str, str, float]:
    """Run a task at worker.place. Returns why it failed, or an empty text, its node, and seconds. stop: as a Ctrl-C."""
    began, log_start, tried, ended = time.monotonic(), 0, 0, Ended(0)
    task.log.parent.mkdir(parents=True, exist_ok=True)
    for tried in range(1, TRIES + 1):
        if stop.is_set():
            return "interrupted", "", 0.0
        log_start = task.log.stat().st_size if task.log.exists() else 0
        ended = engine.run(task, worker.place, stop)
        if not ended.died or stop.is_set() or tried == TRIES:
            break
        where = f" on {ended.node}" if ended.node else ""
        print(f"NOTICE: {task.name} died{where}; it goes on from its last checkpoint", flush=True)
    reason = "" if is_finished(task) else f"it did not write {task.result}"
    if ended.status:
        said = task.log.read_bytes()[log_start:].decode(errors="replace").splitlines() if task.log.exists() else []
        reason = last_words(said) or f"exit status {ended.status}"
        reason = (
            f"it died {tried} times; its last line: {last_words(said)}" if ended.died and not stop.is_set() else reason
        )
    return reason, ended.node, time.monotonic() - began


def last_words(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
