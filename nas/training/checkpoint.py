"""Exact state, written so that it is never half there: temporary file, fsync, rename. State dicts only."""

import os
import pickle
import zipfile
from pathlib import Path

import torch

from nas.core.errors import InputError, RunError

FORMAT = "par-checkpoint/1"


def save_checkpoint(path: Path, state: dict) -> None:
    """Replace `path` by a state of tensors and plain values; a crash at any moment leaves the previous file whole.

    Raises RunError where it cannot be written (a full disk, say); the previous file is then untouched.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        kept = "the previous one is untouched" if path.exists() else "there is no earlier one"
        raise RunError(f"cannot write {path}: {reason}; {kept}; free space and go on with --resume") from None


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: Path, holds: str) -> dict:
    """Read a state that has the key `holds` onto the CPU; no code in the file is run.

    Raises InputError where the file is damaged or another's.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile):
        raise InputError(f"{path} is damaged or no checkpoint of this program; move it away and start anew") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or holds not in state:
        raise InputError(f"{path} is no {FORMAT} with `{holds}`; it was written by another program, version or stage")
    return state
