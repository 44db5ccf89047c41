"""Python commands in forks of a server process, which has imported torch once."""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from nas.core.errors import STOPS

PRELOADED = ["torch", "torch._dynamo", "torch.utils.tensorboard", "sentencepiece", "numba"]
POLL_S = 0.2
LOCK = threading.Lock()  # multiprocessing polls all children at each start; two polls of one child disturb each other


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
            wait([process.sentinel], POLL_S)
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
