"""The run folder: configuration, metrics, log, and provenance (command, versions, hardware, seed, digests of data)."""

import fcntl
import functools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from nas.core.config import EVERY_STAGE, ONLY_SEARCH, RESUME, Config, changes, flat_config, known_values, marked
from nas.core.errors import InputError, nearest, rank, world_size
from nas.core.files import read_jsonl, read_yaml, reason_of, write_jsonl, write_yaml

LOCK, LOCK_S = ".lock", 20  # seconds to wait for it
OTHERS_LOCK_S = 120  # for that of another machine: shared storage keeps the lock of a dead one for about 90 s
CONFIG, METRICS, PI = "config.yaml", "metrics.jsonl", "pi.jsonl"
# Names in a folder where a run may begin; nas.jobs.cluster leaves the last one if it is killed
USABLE = re.compile(rf"\{LOCK}|{CONFIG}\.part|latency\.yaml|\.probe-\w+")
PACKAGES = ("torch", "numpy", "sentencepiece")
DIGESTS = ("data_sha256", "tokenizer_sha256", "vocab_size")
PROVENANCE, CHECKPOINT = "provenance.yaml", "checkpoint.pt"
RESULTS = "results.yaml"  # the last file of a finished training
PATTERN = "pattern.yaml"  # the pattern that derive.py found
OUTCOME = "outcome.yaml"  # the last file of a finished search
LATENCY = "latency.yaml"  # measured costs; search.method=gumbel uses those that its new folder has
FLOPS_TABLE = "flops.yaml"
SUMMARY = "summary.yaml"  # of nas.run: the found and the usual network
MIXTURE = "mixture"  # folder of what stands beside the network
PLAN = "run.yaml"  # of nas.run: the configuration of all stages
SEARCH, FOUND, USUAL, NO_NETWORK = "search", "found", "usual", "no-network"  # its folders
TRIALS, CHOICE = "trials", "trials/choice.yaml"  # the folder of the trials of a search, and what they chose


def trial_file(step: int) -> str:
    """The file of a training with its metrics on valid after a step, at which it stopped."""
    return f"trial-{step}.yaml"


def on_rank_0(method):
    """Run a method only on the first of the processes that torchrun starts."""

    @functools.wraps(method)
    def run(*arguments, **keywords):
        return method(*arguments, **keywords) if rank() == 0 else None

    return run


class RunFolder:
    """The files of one run. Only rank 0 writes. It appends lines one by one, so a kill loses at most the last line."""

    def __init__(self, path: Path, config: Config, stage: str, extra: dict | None = None, marks: tuple[str, ...] = ()):
        """Checks that a run in the folder has this configuration. Writes nothing.

        extra: keys of config.yaml beside options. marks: of options that may differ beside those of --resume.
        """
        if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
            raise InputError(f"--run {path}: the name is no {sys.getfilesystemencoding()} text; give another one")
        self.path, self.stage, self.extra, self.checkpoint = path, stage, extra or {}, path / CHECKPOINT
        unused = {*marked(ONLY_SEARCH)} - {*marked(EVERY_STAGE)} if stage != "search" else set()
        self.may_differ = {*marked(RESUME, *marks)} | unused  # options that may have another value than those recorded
        self.recorded = read_yaml(path / CONFIG) if (path / CONFIG).exists() else None  # config.yaml of an earlier call
        if self.recorded:
            self.check_config(config)

    @on_rank_0
    def start(self, config: Config, provenance: dict) -> None:
        """Lock the folder; write config.yaml and provenance.yaml, or check them on --resume. config: without auto."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(self.path)
        if self.recorded:
            self.check_config(config)
        elif (self.path / CONFIG).exists():
            raise InputError(f"--run {self.path} was begun by another process meanwhile; use another folder")
        else:
            write_yaml(self.path / CONFIG, {"stage": self.stage, **asdict(config), **self.extra})
        changing = "command", "git_commit", "device", "processes", "threads"
        begun = self.path / TRIALS / PROVENANCE  # of a search, whose own file is written after the trials
        if (self.path / PROVENANCE).exists():
            recorded = check_text(self.path, provenance)
            resumed = {key: provenance[key] for key in changing if key in provenance}
            provenance = {**recorded, "resumed": [*recorded.get("resumed", []), resumed]}
        elif begun.exists():
            provenance |= {key: value for key, value in read_yaml(begun).items() if key in (*changing, "resumed")}
        write_yaml(self.path / PROVENANCE, provenance)

    def resolve_auto(self, config: Config) -> Config:
        """A copy of config with the recorded values in place of auto, if a configuration is recorded."""
        return known_values(config, flat_config(self.recorded)) if self.recorded else config

    def check_config(self, config: Config) -> None:
        """Raises InputError if the run has other options, which the message lists."""
        old = flat_config(self.recorded) | {key: self.recorded.get(key) for key in self.extra}
        new = flat_config(self.resolve_auto(config)) | self.extra
        if different := ", ".join(changes(old, new, self.may_differ)):
            advice = f"use the options of {self.path / CONFIG}, or another folder"
            raise InputError(f"--run {self.path} was started with another configuration: {different}; {advice}")

    @on_rank_0
    def write(self, name: str, content: dict) -> None:
        write_yaml(self.path / name, content)

    @on_rank_0
    def save(self, name: str, content) -> None:
        """Let an object write itself into a folder of the run. content: has a method save(folder)."""
        content.save(self.path / name)

    @on_rank_0
    def append(self, name: str, line: dict) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    @on_rank_0
    def say(self, text: str) -> None:
        """Print a line above a progress bar, and append it to train.log."""
        with open(self.path / "train.log", "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text + "\n")
        tqdm.write(text)

    def metrics(self, step: int, tokens: int, split: str, nll: float, **more) -> None:
        """Append a line to metrics.jsonl; nll in nats per token."""
        finite = math.exp(min(nll, 709))  # the largest power, because JSON has no infinity
        self.append(METRICS, {"step": step, "tokens": tokens, "split": split, "nll": nll, "perplexity": finite, **more})

    @on_rank_0
    def cut_after(self, step: int) -> None:
        """Remove the lines that a resumed run writes again: those after `step`, incomplete lines, and that of test."""
        for path in filter(Path.exists, (self.path / METRICS, self.path / PI)):
            lines = read_jsonl(path)
            write_jsonl(path, [line for line in lines if line["step"] <= step and line.get("split") != "test"])


def check_folder(path: Path, resume: bool, stage: str) -> None:
    """Raises InputError if a run of a stage may neither start nor continue in a folder."""
    if path.exists() and not path.is_dir():
        raise InputError(f"--run {path} is a file; give a folder")
    if resume:
        check_resume(path, has_run)
    if has_run(path):
        other = read_yaml(path / CONFIG).get("stage") if (path / CONFIG).exists() else "search"  # in its trials
        if other != stage:
            raise InputError(f"--run {path} holds a {other or 'foreign'} run, not a {stage} run; use another folder")
        if not resume:
            raise InputError(f"--run {path} already holds a run; add --resume to continue it, or use another folder")
    elif path.exists() and any(not USABLE.fullmatch(entry.name) for entry in path.iterdir()):
        raise InputError(f"--run {path} is not empty, but holds no config.yaml of a run; use another folder")
    if rank() == 0:
        try_writing(path)


def check_resume(path: Path, holds_run: Callable[[Path], bool]) -> None:
    """Raises InputError if a folder does not exist; names the nearest one beside it that holds a run."""
    if not path.exists():
        runs = [str(other) for other in path.parent.glob("*/") if holds_run(other)]
        found = f"; the nearest run is {nearest(str(path), runs)}" if runs else ""
        raise InputError(f"--resume: {path} does not exist{found}; without --resume a new run starts")


def lock_folder(path: Path) -> int:
    """Lock a run folder until this process ends. Raises InputError if another process uses it."""
    # It waits, because trials that a killed search has started save what they have before they end.
    lock, own = os.open(path / LOCK, os.O_CREAT | os.O_RDWR), platform.node().encode()
    most = LOCK_S if os.read(lock, len(own) + 1) in (b"", own) else OTHERS_LOCK_S
    for tenth in range(round(10 * most)):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(lock, 0)
            os.pwrite(lock, own, 0)
            return lock
        if tenth == 10:
            print(f"waiting at most {most} s for the process that uses {path}", flush=True)
        time.sleep(0.1)
    os.close(lock)
    raise InputError(f"--run {path} is in use by another process; wait, or use another folder")


def try_writing(path: Path) -> None:
    """Make a folder, and remove what was made. Raises InputError if it cannot be made or written."""
    made, reason = [folder for folder in (path, *path.parents) if not folder.exists()], "no permission"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = reason_of(error, path)
    usable = os.access(path, os.W_OK)
    for folder in made:
        with suppress(OSError):
            folder.rmdir()
    if not usable:
        raise InputError(f"--run {path} cannot be written: {reason}; give another folder")


def has_run(path: Path) -> bool:
    return (path / CONFIG).exists() or (path / TRIALS).exists()


def run_options(path: Path) -> list:
    """The options of a command that starts the run in a folder, or continues it."""
    return ["--run", path, *["--resume"] * has_run(path)]


def git_commit() -> str | None:
    """Commit of this program, with the suffix "-changed" if tracked files have changed; None outside a checkout."""
    if not (Path(__file__).parents[2] / ".git").exists():  # an archive, perhaps unpacked inside another checkout
        return None
    describe = ["describe", "--always", "--abbrev=40", "--dirty=-changed", "--match="]
    command = ["git", "-C", str(Path(__file__).parent), *describe]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_info(key: str, path: Path = Path("/proc/cpuinfo")) -> str:
    """An entry of the first CPU, such as `flags`; "" if the system does not tell. Only Linux does."""
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def count_cores() -> int:
    """The CPU cores that this process may use: `taskset` limits them on Linux."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    return cpu_info("model name") or platform.processor() or platform.machine()


def command_line() -> str:
    """The arguments of `python`, quoted for a shell in the folder of the scripts."""
    script, *arguments = sys.argv
    folder, package = Path(script).resolve().parent, Path(__file__).resolve().parents[1]
    if folder == package:
        return shlex.join(["-m", f"nas.{Path(script).stem}", *arguments])
    return shlex.join([Path(script).name if folder == package.parent else script, *arguments])


def provenance(config: Config, corpus_meta: dict, runtime) -> dict:
    """The content of provenance.yaml. corpus_meta: meta.yaml of the corpus; runtime: a Runtime."""
    return {
        "command": command_line(),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "device": runtime.name,
        "precision": runtime.precision,
        "processor": processor(),
        "processes": world_size(),
        "threads": runtime.threads,
        "platform": platform.platform(),
        "seed": config.seed,
        **data_digests(corpus_meta),
    }


def check_text(run: Path, digests: dict) -> dict:
    """The recorded provenance of a run. Raises InputError if its text or tokenizer is not that of data_digests()."""
    recorded, advice = read_yaml(run / PROVENANCE), "restore the text, or give the same data options"
    for key in DIGESTS:
        if recorded.get(key) != digests.get(key):
            raise InputError(f"{run} was trained on another text: {key} differs from its {PROVENANCE}; {advice}")
    return recorded


def data_digests(corpus_meta: dict) -> dict:
    """The keys of provenance.yaml that identify the text and the tokenizer. corpus_meta: meta.yaml of the corpus."""
    return {  # the keys of DIGESTS
        "data_sha256": {split: facts["sha256"] for split, facts in corpus_meta["splits"].items()},
        "tokenizer_sha256": corpus_meta["tokenizer_sha256"],
        "vocab_size": corpus_meta["vocab_size"],
    }
