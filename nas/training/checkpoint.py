"""Checkpoints: dictionaries of tensors and plain values, written atomically and read without running code."""

import pickle
import zipfile
from pathlib import Path

import torch

from nas.core.errors import InputError, RunError
from nas.core.files import atomic_write

FORMAT = "par-checkpoint/5"


def save_checkpoint(path: Path, state: dict) -> None:
    """Write a state to `path`. After a crash at any moment the file holds either the previous or the new state.

    Raises RunError if the file cannot be written, on a full disk for example.
    """
    try:
        with atomic_write(path) as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as error:
        causes = error, error.__context__  # PyTorch hides the error of the disk behind its own
        reason = next((one.strerror for one in causes if isinstance(one, OSError)), str(error).splitlines()[0])
        kept = "the previous one is unchanged" if path.exists() else "there is no earlier one"
        raise RunError(f"cannot write {path}: {reason}; {kept}; free space and continue with --resume") from None


def load_checkpoint(path: Path, key: str) -> dict:
    """Read a state that has `key` onto the CPU, without running code from the file.

    Raises InputError if the file is missing or damaged, or holds something else.
    """
    if not path.exists():
        raise InputError(f"{path} is missing; the stage that writes it has not finished, or the file was removed")
    damaged = OSError, RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError
    with open(path, "rb") as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (*damaged, pickle.UnpicklingError, zipfile.BadZipFile):
            raise InputError(
                f"{path} is damaged or not a checkpoint of this program; move it away and repeat the command with "
                "--resume, which writes best.pt from checkpoint.pt, and starts anew without checkpoint.pt"
            ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or key not in state:
        raise InputError(f"{path} is not a {FORMAT} with `{key}`; another program, version or stage wrote it")
    return state
