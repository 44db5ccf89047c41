"""Tasks: Python commands in forks of a server process, which has imported torch once, several at a time."""

import itertools
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from nas.core.errors import STOPS
from nas.core.run_folder import count_cores

PRELOADED = ["torch", "torch._dynamo", "torch.utils.tensorboard", "sentencepiece", "numba"]
POLL_S = 0.2
LOCK = threading.Lock()  # multiprocessing polls all children at each start; two polls of one child disturb each other
ROOT = Path(__file__).resolve().parents[2]  # the folder of the scripts


def start_server() -> None:
    """Start the server unless it runs, and wait until it has imported PRELOADED."""
    wait_for(start(os.getpid))


def start_command(
    arguments: Sequence,
    out: Path | None = None,
    errors: Path | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start what `python ARGUMENTS` runs, in a process that receives SIGTERM when this one ends.

    arguments: SCRIPT.py or -m MODULE, then its arguments. out, errors: files, or one, that the output is appended to;
    None: that of this process when it started the server. cwd, environment: None for those of this process. Variables
    that torch reads while it is imported, such as OMP_NUM_THREADS, are those of the server.
    """
    files = [file and file.absolute() for file in (out, errors)]
    given = [str(argument) for argument in arguments], *files, cwd or Path.cwd()
    return start(run_command, *given, dict(environment or os.environ))


def start(function: Callable, *arguments) -> BaseProcess:
    """Start a function in a fork of the server, which is started first. Signals to our process group do not end it.

    Signals of this process are blocked only until the server runs, not while it imports PRELOADED.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with LOCK:
        resource_tracker.ensure_running()  # its start unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            forkserver.ensure_running()  # the server inherits the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        process = context.Process(target=function, args=arguments)
        process.start()
    return process


def wait_for(process: BaseProcess, stop: threading.Event | None = None) -> int:
    """Wait for a process, and hand on each Ctrl-C. Returns its exit status; after a Ctrl-C raises KeyboardInterrupt.

    stop: as a Ctrl-C, for threads; then nothing is raised.
    """
    interrupted, stopped = False, False
    while True:
        try:
            with LOCK:
                if not process.is_alive():
                    break
            time.sleep(POLL_S)
            if stop and stop.is_set() and not stopped:
                stopped = True
                interrupt(process)
        except KeyboardInterrupt:
            interrupted = True
            interrupt(process)
    if interrupted:
        raise KeyboardInterrupt
    return process.exitcode


def interrupt(process: BaseProcess) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)


def run_command(arguments: list[str], out: Path | None, errors: Path | None, cwd: Path, environment: dict) -> None:
    """Run a command in the fork. A session of its own keeps away the terminal's Ctrl-C, which the parent passes on."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    for file, descriptor in ((out, 1), (errors, 2)):
        if file:
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if arguments[0] == "-m":
        sys.path[0], sys.argv = str(cwd), arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        script, sys.argv = Path(cwd, arguments[0]).resolve(), arguments
        sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")


def end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Task:
    """What `python ARGUMENTS` runs, until it has written the file `result`. Its output is appended to `log`."""

    name: str
    arguments: list[str]
    result: Path
    log: Path


def script_task(name: str, script: str, arguments: list, result: Path, log: Path) -> Task:
    return Task(name, [str(ROOT / script), *map(str, arguments)], result, log)


def unfinished(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if not task.result.exists()]


def run_tasks(tasks: list[Task], workers: int, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Run the unfinished tasks, at most `workers` at a time. Returns {name: reason} of those that failed.

    A failure does not stop the others. Worker i uses GPU i modulo their number. gpus: names for CUDA_VISIBLE_DEVICES.
    After Ctrl-C the tasks get it, and save; KeyboardInterrupt is raised. If this process dies, the tasks save and end.
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
    """Run a task on worker.gpu (None: any). Returns why it failed, or an empty text, and seconds. stop: as a Ctrl-C."""
    began = time.monotonic()
    if stop.is_set():
        return "interrupted", 0.0
    task.log.parent.mkdir(parents=True, exist_ok=True)
    log_start = task.log.stat().st_size if task.log.exists() else 0
    environment = os.environ if worker.gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": worker.gpu}
    status = wait_for(start_command(task.arguments, task.log, task.log, environment=environment), stop)
    reason = "" if task.result.exists() else f"it did not write {task.result}"
    if status:
        said = task.log.read_bytes()[log_start:].decode(errors="replace").splitlines()
        reason = next((line.strip() for line in reversed(said) if line.strip()), f"exit status {status}")
    return reason, time.monotonic() - began


def workers(runtime) -> int:
    """Trainings at a time: one on a GPU; on a CPU as many as its cores have room for. runtime: a Runtime."""
    return 1 if runtime.is_gpu else max(1, count_cores() // runtime.threads)
