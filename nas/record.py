"""The run folder: configuration, provenance, metrics and pi as JSON lines, the log. Imports no torch."""

import fcntl
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import yaml

from nas.config import BUILT_IN_BEFORE, Config, default_of, options, settled
from nas.errors import InputError

PACKAGES = ("torch", "numpy", "sentencepiece", "omegaconf")
FREE_TO_CHANGE = ("data.cache", "train.device", "train.compile", "train.accumulate")  # say where and how, not what
CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"
RESULTS, OUTCOME = "results.yaml", "outcome.yaml"  # the last file of a finished training, and of a search


def perplexity(nll: float) -> float:
    """exp(nll per token); the largest float rather than an overflow."""
    return math.exp(min(nll, 709.0))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_yaml(path: Path, content: dict) -> None:
    write_text(path, yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120))


def read_yaml(path: Path) -> dict:
    """Raises InputError where the file is missing or no mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError):
        raise InputError(f"{path} is damaged: not YAML") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged: not a mapping")
    return content


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


def read_lines(path: Path) -> list[dict]:
    """The lines of a JSON lines file; a last one that a kill cut short is left out.

    Raises InputError where another line is damaged.
    """
    texts, lines = path.read_text(encoding="utf-8", errors="replace").splitlines(), []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number < len(texts):
                raise InputError(f"{path} is damaged: line {number} is not JSON") from None
    return lines


def read_pi(run: Path) -> list[dict]:
    """The lines of pi.jsonl. Raises InputError where the folder is no search run."""
    if not run.is_dir():
        raise InputError(f"{run} is no run folder: give the --run folder of a search")
    lines = read_lines(run / "pi.jsonl") if (run / "pi.jsonl").is_file() else []
    if not lines:
        raise InputError(
            f"{run} holds no pi.jsonl with a logged step: give the --run folder of a search, not of a retrain"
        )
    for number, line in enumerate(lines, start=1):
        if (
            not is_pi_line(line)
            or line["operations"] != lines[0]["operations"]
            or len(line["pi"]) != len(lines[0]["pi"])
        ):
            raise InputError(
                f"{run / 'pi.jsonl'} is damaged: line {number} lacks step, temperature, operations or a fitting pi"
            )
    return lines


def is_pi_line(line) -> bool:
    if not isinstance(line, dict) or not {"step", "temperature", "operations", "pi"} <= line.keys():
        return False
    rows, names = line["pi"], line["operations"]
    if not (isinstance(rows, list) and isinstance(names, list) and rows and names):
        return False
    return all(isinstance(row, list) and len(row) == len(names) for row in rows)


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


def git_commit() -> str | None:
    """The commit of this program, with a mark where files have changed since; None outside a checkout."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty=-changed",
        "--match=",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def command_line() -> str:
    """What was typed after `python`, with quotes where a shell needs them."""
    script, *arguments = sys.argv
    module = Path(script).resolve()
    started = ["-m", f"nas.{module.stem}"] if module.parent == Path(__file__).resolve().parent else [script]
    return shlex.join([*started, *arguments])


def provenance(config: Config, corpus_meta: dict, machine) -> dict:
    """What is needed to know where a run's figures come from. machine: a nas.device.Machine."""
    return {
        "command": command_line(),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "device": machine.name,
        "precision": machine.precision,
        "compiled": machine.compile,
        "processor": processor(),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "threads": machine.threads,
        "platform": platform.platform(),
        "seed": config.seed,
        "data_sha256": {split: about["sha256"] for split, about in corpus_meta["splits"].items()},
        "tokenizer_sha256": corpus_meta["tokenizer_sha256"],
        "vocab_size": corpus_meta["vocab_size"],
    }
