"""The run folder: configuration, provenance, metrics and pi as JSON lines, the log. Imports no torch."""

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path

from nas.core.config import Config, default_of, options
from nas.core.config_checks import settled
from nas.core.config_loading import BUILT_IN_BEFORE
from nas.core.errors import InputError
from nas.core.files import perplexity, read_lines, read_yaml, write_text, write_yaml

FREE_TO_CHANGE = (
    "data.cache",
    "train.device",
    "train.compile",
    "train.grad_accum_steps",
)  # say where and how, not what


CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"


RESULTS, OUTCOME = "results.yaml", "outcome.yaml"  # the last file of a finished training, and of a search


def flat_config(content: dict) -> dict:
    """{dotted key: value} of every option in a run's nested mapping; one that it lacks, being newer, has the value that
    was built in before."""
    flat = {}
    for key, item in options():
        value = content
        for part in key.split("."):
            value = value.get(part, item) if isinstance(value, dict) else item
        flat[key] = BUILT_IN_BEFORE.get(key, default_of(item)) if value is item else value
    # Runs from before these were settled as a run began have null.
    sparse, keys = ("model.stride", "model.summary"), flat["train.segment"] + flat["train.memory"]
    return flat | dict(zip(sparse, settled(*map(flat.get, sparse), keys), strict=True))


class RunFolder:
    """A run's files. Lines are appended one by one, so that a kill loses at most the last."""

    def __init__(self, path: Path, config: Config, stage: str, extra: dict):
        self.path, self.options, self.stage, self.extra = path, config, stage, extra
        self.writes = int(os.environ.get("RANK", 0)) == 0  # of the processes that torchrun starts, the first does
        self.begun = (path / "config.yaml").exists()

    @property
    def config(self) -> dict:
        """What config.yaml is to hold."""
        return {"stage": self.stage, **asdict(self.options), **self.extra}

    def start(self, provenance: dict) -> None:
        """Create the folder, unless it is there, and take it for this process alone."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.path / ".lock", os.O_CREAT | os.O_WRONLY)  # held until the process ends
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                f"--run {self.path} is in use by another process; wait for it, or name another folder"
            ) from None
        if not self.begun:
            if (self.path / "config.yaml").exists():
                raise InputError(f"--run {self.path}: another process began a run there meanwhile; name another folder")
            write_yaml(self.path / "config.yaml", self.config)
        if not (self.path / "provenance.yaml").exists():
            write_yaml(self.path / "provenance.yaml", provenance)
            return
        before = self.check_text(provenance)
        kept = ("command", "git_commit", "device", "processes", "threads")
        again = {key: provenance[key] for key in kept if key in provenance}
        write_yaml(self.path / "provenance.yaml", {**before, "resumed": [*before.get("resumed", []), again]})

    def check_text(self, provenance: dict) -> dict:
        """The run's provenance. Raises InputError where text or tokenizer are not those that the run began with."""
        before = read_yaml(self.path / "provenance.yaml")
        for key in ("data_sha256", "tokenizer_sha256", "vocab_size"):
            if before.get(key) != provenance.get(key):
                raise InputError(
                    f"--run {self.path}: {key} is no longer what the run began with; the text or the tokenizer has "
                    "changed: bring back the old one, or start another run"
                )
        return before

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    def write(self, name: str, content: dict) -> None:
        if self.writes:
            write_yaml(self.path / name, content)

    def append(self, name: str, line: dict) -> None:
        if not self.writes:
            return
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def log(self, text: str) -> None:
        if not self.writes:
            return
        with open(self.path / "train.log", "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def metrics(self, step: int, tokens: int, split: str, nll: float, **more) -> None:
        """A line of metrics.jsonl; nll in nats per token."""
        self.append(
            METRICS,
            {"step": step, "tokens": tokens, "split": split, "nll": nll, "perplexity": perplexity(nll), **more},
        )

    def cut_after(self, step: int) -> None:
        """Drop what a resumed run writes again: the lines after a step, half-written ones, and the final test line."""
        for name in (METRICS, "pi.jsonl"):
            if self.writes and (self.path / name).exists():
                lines = read_lines(self.path / name)
                kept = [line for line in lines if line["step"] <= step and line.get("split") != "test"]
                write_text(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))


def open_run(
    path: str | Path, config: Config, stage: str, resume: bool, extra: dict | None = None, free: tuple[str, ...] = ()
) -> RunFolder:
    """Check that a run may start, or go on, in a folder; nothing is written before RunFolder.start().

    `extra` (a pattern, say) belongs to the configuration; keys that begin with one of `free` may differ on resumption.
    Raises InputError where the folder holds a run and resume is off, where that run was configured otherwise (naming
    the keys that differ), or where it is another stage's.
    """
    path = Path(path)
    run = RunFolder(path, config, stage, extra or {})
    if path.exists() and not path.is_dir():
        raise InputError(f"--run {path} is a file; give a folder")
    if run.begun:
        if not resume:
            raise InputError(f"--run {path} already holds a run; add --resume to go on with it, or name another folder")
        before = read_yaml(path / "config.yaml")
        if config.model.cutoffs == "auto":  # those that the run found when it began, if it has any
            config.model.cutoffs = flat_config(before)["model.cutoffs"] or "auto"
        check_same(run, before, (*FREE_TO_CHANGE, *free))
    elif path.exists() and {entry.name for entry in path.iterdir()} - {".lock", "config.yaml.part"}:
        raise InputError(f"--run {path} is not empty and holds no run; name another folder")
    return run


def check_same(run: RunFolder, before: dict, free: tuple[str, ...]) -> None:
    path = run.path
    if before.get("stage") != run.stage:
        raise InputError(f"--run {path} holds a {before.get('stage')} run, not a {run.stage} run; name another folder")
    old = {**flat_config(before), **{key: before.get(key) for key in run.extra}}
    new = {**flat_config(run.config), **run.extra}
    changed = [f"{key} ({old[key]} -> {new[key]})" for key in new if new[key] != old[key] and not key.startswith(free)]
    if changed:
        raise InputError(
            f"--run {path} was started with another configuration: {', '.join(changed)}; "
            f"its own is {path / 'config.yaml'}, and other options need another run"
        )
