"""The frame of every command: what a user sees when something is wrong is one line and an exit status, no traceback."""

import os
import sys
import time
from collections.abc import Callable


class InputError(Exception):
    """What the user gave cannot work; the message names what is wrong and what would be right. Exit status 2."""


class RunError(Exception):
    """A run failed on its way; the message says where and what is left usable. Exit status 1."""


class Interrupted(Exception):
    """The user stopped the run; the message says how to go on. Exit status 130."""


def run_command(main: Callable[[], None]) -> None:
    """Run a script's main(); turn the errors above, Ctrl-C and failing disks into one line and an exit status."""
    # GNU OpenMP's threads spin for long while they wait for each other. Beside any other busy process that makes a
    # step some ten times slower. It has to be said before torch is imported, which main() does.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if int(os.environ.get("RANK", 0)) > 0:  # of the processes that torchrun starts the first one speaks for all
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        main()
    except InputError as error:
        fail(2, f"error: {error}")
    except RunError as error:
        fail(1, f"error: {error}")
    except Interrupted as stop:
        fail(130, str(stop))
    except KeyboardInterrupt:
        fail(130, "interrupted; what was saved is whole: the same command with --resume goes on")
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away (`| head`): nothing to tell it
        sys.exit(1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        fail(1, f"error: {error.strerror or error}{where}")


def fail(status: int, message: str) -> None:
    rank = int(os.environ.get("RANK", 0))
    if status == 2 and int(os.environ.get("LOCAL_RANK", 0)) > 0:
        # What is wrong with the input all processes of a machine find. The first one tells it and ends, at which
        # torchrun ends the others; who is still there a second later found it alone.
        time.sleep(1)
    if status != 130 or rank == 0:  # they stop together
        print((f"rank {rank}: " if rank else "") + " ".join(message.split()), file=sys.stderr, flush=True)
    sys.exit(status)
