"""A training that goes on from its trial."""

import shutil
from pathlib import Path

from nas.core.config import TRIAL, Config, changes, flat_config, marked
from nas.core.files import read_yaml
from nas.core.pattern import abbreviate
from nas.core.run_folder import CHECKPOINT, CONFIG, DIGESTS, METRICS, PROVENANCE, RunFolder
from nas.retraining.phase import BEST
from nas.training.distributed import is_main


def continue_trial(pattern_file: dict, config: Config, run: RunFolder, record: dict, total_steps: int) -> None:
    """Copy the trial of a derived pattern into a new run, which then goes on where the trial ended.

    record: provenance of the run. Prints why not, if pattern, text, options or steps differ from the trial's.
    """
    given = (pattern_file.get("derived_from") or {}).get("trial")
    if not given or run.checkpoint.exists() or not is_main():
        return
    trial, anew = Path(given), f"NOTICE: the training starts anew, and does not continue the trial {given}:"
    if not (trial / CHECKPOINT).exists():
        missing = "this folder is not here; paths are relative to the directory of the command"
        print(f"{anew} {f'its {CHECKPOINT} is missing' if trial.exists() else missing}")
        return
    recorded, origin = read_yaml(trial / CONFIG), read_yaml(trial / PROVENANCE)
    old, new = flat_config(recorded), flat_config(config)
    different = changes(old, new, run.may_differ | {*marked(TRIAL)})
    if recorded["pattern"] != pattern_file["blocks"]:
        different.append(f"blocks ({abbreviate(recorded['pattern'])} -> {abbreviate(pattern_file['blocks'])})")
    if old["train.steps"] != total_steps:
        different.append(f"steps ({old['train.steps']} -> {total_steps})")
    if any(origin.get(key) != record.get(key) for key in DIGESTS):
        different.append("the text or its tokenizer")
    if different:
        print(f"{anew} different are {', '.join(different)}")
        return
    for name in (METRICS, BEST, CHECKPOINT):  # the checkpoint last, because it makes the run go on
        if (trial / name).exists():
            Path(shutil.copy(trial / name, run.path / f"{name}.part")).replace(run.path / name)
    print(f"going on from the trial {given}")
