"""Python commands in forks of a server process, which has imported torch once for all of them."""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = ["torch", "torch._dynamo", "torch.utils.tensorboard", "sentencepiece", "omegaconf"]


def start_server() -> None:
    """Start the server unless it runs, and wait until it has imported PRELOADED."""
    process = context().Process(target=os.getpid)
    process.start()
    process.join()


def start_command(
    arguments: Sequence,
    out: Path | None = None,
    errors: Path | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start what `python ARGUMENTS` runs, in a process that receives SIGTERM when this one ends.

    Args:
        arguments: SCRIPT.py or -m MODULE, then its arguments.
        out, errors: files that the output is appended to; they may be the same. None: the output of this process.
        cwd, environment: None for those of this process.
    """
    files = [file and file.absolute() for file in (out, errors)]
    given = [str(argument) for argument in arguments], *files, cwd or Path.cwd()
    process = context().Process(target=run_command, args=(*given, dict(environment or os.environ)))
    process.start()
    return process


def context() -> multiprocessing.context.ForkServerContext:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def run_command(
    arguments: list[str], out: Path | None, errors: Path | None, cwd: Path, environment: dict[str, str]
) -> None:
    """Run a command in the fork. A session of its own keeps away the terminal's Ctrl-C, which the parent passes on."""
    os.setsid()
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
        sys.path[0], sys.argv = str(Path(arguments[0]).parent), arguments
        runpy.run_path(arguments[0], run_name="__main__")


def end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
