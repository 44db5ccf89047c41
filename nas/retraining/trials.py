"""Trials: the first parts of trainings, which retrain.py runs in processes of their own, and can continue."""

import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nas.core.config import Config, flat_config
from nas.core.errors import RunError
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import FORMAT
from nas.core.run_folder import CHECKPOINT, METRICS, RunFolder, trial_file
from nas.retraining.phase import BEST
from nas.retraining.tasks import Task, run_tasks, script_task
from nas.training.device import DeviceContext

MAY_DIFFER = ("model.blocks", "train.steps", "train.epochs", "train.threads", "evaluate.")  # in a trial
MAY_DIFFER += ("train.evaluate_every", "train.log_every", "train.checkpoint_every")


@dataclass(frozen=True)
class Trial:
    """A training of `steps` steps that stops after `until` of them. options: section.key=value."""

    name: str
    blocks: list[str]
    steps: int
    until: int
    options: list[str] = field(default_factory=list)


def run_trials(trials: list[Trial], config: Path, folder: Path, context: DeviceContext) -> dict[str, dict]:
    """{name: figures on valid after the trial}. On a CPU as many run at a time as there are cores for their threads.

    Each trial has a run folder below `folder`; those that have run already are read. Raises RunError if one fails.
    """
    (folder / "patterns").mkdir(parents=True, exist_ok=True)
    tasks = [trial_task(trial, config, folder) for trial in trials]
    workers = 1 if context.is_gpu else max(1, (os.cpu_count() or 1) // context.threads)
    if failed := run_tasks(tasks, workers):
        raise RunError("; ".join(f"the trial {name} failed: {reason}" for name, reason in failed.items()))
    return {task.name: read_yaml(task.result)["valid"] for task in tasks}


def trial_task(trial: Trial, config: Path, folder: Path) -> Task:
    pattern, run = folder / "patterns" / f"{trial.name}.yaml", folder / trial.name
    if not pattern.exists():
        write_yaml(pattern, {"format": FORMAT, "blocks": trial.blocks})
    arguments = [pattern, config, "--run", run, "--resume", "--until", trial.until, f"train.steps={trial.steps}"]
    arguments += ["train.evaluate_every=0", *trial.options]
    log = folder / "logs" / f"{trial.name}.txt"
    return script_task(trial.name, "retrain.py", arguments, run / trial_file(trial.until), log)


def continue_trial(pattern_file: dict, config: Config, run: RunFolder, total_steps: int) -> None:
    """Copy the trial of a derived pattern into a new run, which then goes on where the trial ended, bit for bit.

    Prints why not, if the run's options differ from the trial's.
    """
    given = (pattern_file.get("derived_from") or {}).get("trial")
    if not given or run.begun or not (Path(given) / CHECKPOINT).exists():
        return
    old, new = flat_config(read_yaml(Path(given) / "config.yaml")), flat_config(asdict(config))
    different = [f"{key} ({old.get(key)} -> {new[key]})" for key in new if new[key] != old.get(key)]
    different = [text for text in different if not text.startswith((*run.may_change, *MAY_DIFFER))]
    if old["train.steps"] != total_steps:
        different.append(f"steps ({old['train.steps']} -> {total_steps})")
    if different:
        print(f"NOTICE: the training does not go on from {given}, because other options differ: {', '.join(different)}")
        return
    for name in (METRICS, BEST, CHECKPOINT):  # the checkpoint last, because it makes the run go on
        if (Path(given) / name).exists():
            shutil.copy(Path(given) / name, run.path / name)
    print(f"going on from the trial {given}")
