"""nas.core.provenance."""

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from nas.core.config import Config

PACKAGES = ("torch", "numpy", "sentencepiece", "omegaconf")


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
        return platform.processor() or platform.context()


def command_line() -> str:
    """What was typed after `python`, with quotes where a shell needs them."""
    script, *arguments = sys.argv
    module = Path(script).resolve()
    started = ["-m", f"nas.{module.stem}"] if module.parent == Path(__file__).resolve().parents[1] else [script]
    return shlex.join([*started, *arguments])


def provenance(config: Config, corpus_meta: dict, context) -> dict:
    """What is needed to know where a run's figures come from. machine: a nas.device.Machine."""
    return {
        "command": command_line(),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "device": context.name,
        "precision": context.precision,
        "compiled": context.compile,
        "processor": processor(),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "threads": context.threads,
        "platform": platform.platform(),
        "seed": config.seed,
        "data_sha256": {split: about["sha256"] for split, about in corpus_meta["splits"].items()},
        "tokenizer_sha256": corpus_meta["tokenizer_sha256"],
        "vocab_size": corpus_meta["vocab_size"],
    }
