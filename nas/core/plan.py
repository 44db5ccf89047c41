"""The plan of nas.run: run.yaml, the configuration of all stages, in a folder that one process works in."""

from dataclasses import asdict
from pathlib import Path

from nas.core.config import Config, changes, flat_config
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.run_folder import CONFIG, LOCK, PLAN, SEARCH, TRIALS, lock_folder, try_writing

REPORT = "report.html"
PLANNED = "train.epochs", "train.steps", "train.warmup_steps", "train.evaluate_every"  # --minutes sets them


def open_plan(folder: Path, minutes: float | None, config: Config) -> Config | None:
    """Lock the folder. Returns the plan of an earlier call; None if its first trial has not begun.

    Raises InputError if that call had another configuration, or if the folder holds other things.
    """
    file, trials = folder / PLAN, folder / SEARCH / TRIALS / CONFIG
    if file.exists() and trials.exists():
        lock_folder(folder)
        return read_plan(folder, minutes, config)
    if folder.exists() and {entry.name for entry in folder.iterdir()} - {SEARCH, LOCK, PLAN}:
        if file.exists():
            raise InputError(f"{trials} is missing, so the search cannot go on; use another folder")
        raise InputError(f"--run {folder} is not empty, but holds no {PLAN} of this command; use another folder")
    try_writing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock_folder(folder)
    return None


def read_plan(folder: Path, minutes: float | None, config: Config) -> Config:
    """The plan of an earlier call with the same minutes and configuration. Raises InputError if they differ."""
    plan, planned = load_config(folder / PLAN, []), read_yaml(folder / PLAN)["minutes"]
    if minutes != planned:
        begun = "without --minutes" if planned is None else f"with --minutes {planned:g}"
        raise InputError(f"--run {folder} was begun {begun}: repeat the command so, or use another folder")
    given, recorded = flat_config(asdict(config)), flat_config(asdict(plan))
    if changed := ", ".join(changes(recorded, given, PLANNED if minutes else ())):
        raise InputError(f"--run {folder} has another configuration: {changed}; use another folder")
    return plan
