"""Errors, signals and exit statuses of the commands, and the rank of a process under torchrun."""

import argparse
import difflib
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial, partialmethod
from importlib.util import find_spec
from typing import NoReturn, TextIO

from models.operations.registry import IncompleteOperation

NEW_PARSER, PARSE = argparse.ArgumentParser.__init__, argparse.ArgumentParser.parse_known_args
VALUES = argparse.ArgumentParser._get_values
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
OPTION = re.compile(r"^--(?=\w+\.[\w.]+=)")  # the dashes of --section.key=value, which may be there or not


class InputError(Exception):
    """The input cannot work. The message says what is wrong, then how to correct it. Exit status 2."""


class CannotSearch(InputError):
    """No network can be searched in the given minutes, or on this busy machine; counts alone are still possible."""


class RunError(Exception):
    """A run failed. The message says where, and which files are still usable. Exit status 1."""


class Interrupted(Exception):
    """The user stopped a run. The message says how to continue. Exit status 130."""


def nearest(name, known: Iterable[str], least: float = 0.0) -> str:
    """The known name that is spelled most like `name`; "" if the share of its letters in common is below `least`."""
    return next(iter(difflib.get_close_matches(str(name), known, n=1, cutoff=least)), "")


def check_onnx(*names: str) -> None:
    """Raises InputError if one of these packages is not installed; by default all of the extra."""
    for name in names or ("onnx", "onnxscript", "onnxruntime"):
        check_package(name, "ONNX", "onnx")


def check_package(name: str, use: str, extra: str) -> None:
    if not find_spec(name):
        raise InputError(f"{use} needs the package {name}, which is not installed: pip install -e '.[{extra}]'")


def rank() -> int:
    """Number of this process among all processes of the run; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Number of this process among the processes of the run on this node; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """Number of processes of the run; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def handle_stops(handler: Callable) -> dict:
    """Handle Ctrl-C, SIGTERM and, unless it is ignored as by nohup, SIGHUP. Returns {signal: earlier handler}."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return {number: signal.signal(number, handler) for number in STOPS[: 2 if ignored else 3]}


class StopSignal:
    """Store Ctrl-C, SIGTERM and SIGHUP in a flag that the loop reads between steps.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self):
        self.received = False

    def __enter__(self) -> "StopSignal":
        self.handlers = handle_stops(self.handle)
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is Interrupted and world_size() > 1:
            return  # torchrun sends SIGTERM to rank 0 if another rank ends first, but rank 0 has a message to print
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def handle(self, number, frame) -> None:
        # Under torchrun a second signal may come from torchrun.
        if number == signal.SIGINT and self.received and world_size() == 1:
            raise KeyboardInterrupt
        self.received = True


def interrupt_on_signals() -> None:
    """Let Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, also in background jobs, which else ignore Ctrl-C."""
    handle_stops(signal.default_int_handler)


def refuse_arguments(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """As ArgumentParser.error(), but in one line that names the option that is nearest to an unknown one."""
    unknown = [word.split("=")[0] for word in message.split() if word.startswith("--")]
    known = nearest(unknown[0], parser._option_string_actions, least=0.6) if unknown else ""
    if message.startswith("unrecognized arguments") and known:
        message += f"; the nearest option is {known}"
    elif unknown and "." in unknown[0]:
        message += f"; write {unknown[0][2:]}=VALUE"
    if message.endswith("expected one argument"):
        option = message.split()[1].split("/")[0].rstrip(":")
        message += f"; write {option}=VALUE if the value begins with a dash"
    raise InputError(f"{message}; --help lists the arguments")


def parse_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, namespace=None):
    """As ArgumentParser.parse_known_args(), but section.key=value may have dashes in front, in commands with such
    arguments (`overrides`).
    """
    given = sys.argv[1:] if arguments is None else arguments
    if any(action.dest == "overrides" for action in parser._actions):
        given = [OPTION.sub("", argument) for argument in given]
    return PARSE(parser, given, namespace)


def values_of(parser: argparse.ArgumentParser, action: argparse.Action, given: list[str]):
    """As ArgumentParser._get_values(), which would drop the value of --prompt=--."""
    return "--" if given == ["--"] and action.option_strings else VALUES(parser, action, given)


def go_on_without_reader(stream: TextIO) -> None:
    """Let a stream write to nowhere once its reader has ended, such as `| head`."""

    def safely(function: Callable, *arguments) -> object:
        try:
            return function(*arguments)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    stream.write, stream.flush = partial(safely, stream.write), partial(safely, stream.flush)


def run_command(main: Callable[[], None], only_prints: bool = False) -> None:
    """Run main() of a command; turn the errors above, Ctrl-C and disk errors into one line and an exit status.

    only_prints: the command writes no file, so it ends when the reader of its output ends.
    """
    # By default GNU OpenMP's threads spin while they wait, which makes a step about ten times slower if another process
    # is busy. OpenMP reads the variable when main() imports torch.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if rank() > 0:  # only rank 0 prints
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    argparse.ArgumentParser.error = refuse_arguments
    argparse.ArgumentParser.__init__ = partialmethod(NEW_PARSER, allow_abbrev=False)
    argparse.ArgumentParser.parse_known_args, argparse.ArgumentParser._get_values = parse_options, values_of
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")  # it may be unable to encode a character
        if not only_prints:
            go_on_without_reader(getattr(sys, name))
    try:
        main()
    except (InputError, RunError, IncompleteOperation) as error:
        fail(1 if isinstance(error, RunError) else 2, f"error: {error}")
    except Interrupted as stop:
        fail(130, str(stop))
    except KeyboardInterrupt:
        if multiprocessing.parent_process():  # it has its own advice
            sys.exit(130)
        fail(130, "interrupted; rerun the command; search.py and retrain.py continue a run with --resume")
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has exited, such as `| head`
        sys.exit(1)
    except OSError as error:
        file = error.filename2 or error.filename  # of a copy, the new file
        where = f" ({file})" if file else ""
        short = " requested and " in str(error)  # numpy's words for a file that it cannot write whole
        fail(1, f"error: {'No space left on device' if short else error.strerror or error}{where}")


def fail(status: int, message: str) -> None:
    """Print a message as one line on stderr and exit."""
    if status == 2 and local_rank() > 0:
        # All processes of a node find the same input error. Local rank 0 prints it and exits; then torchrun ends the
        # others. A process that still runs after five seconds is the only one with this error, so it prints it.
        time.sleep(5)
    if status != 130 or rank() == 0:  # an interrupt stops all ranks together
        print((f"rank {rank()}: " if rank() else "") + " ".join(message.split()), file=sys.stderr, flush=True)
    if world_size() > 1:
        sys.stdout.flush()
        os._exit(status)  # without the destructors of gloo's threads, which sometimes abort the process
    sys.exit(status)
