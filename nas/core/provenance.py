"""The content of provenance.yaml: command, versions, hardware, seed and digests of the data."""

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from nas.core.config import Config
from nas.core.errors import InputError, world_size
from nas.core.files import read_yaml

PACKAGES = ("torch", "numpy", "sentencepiece")
PROVENANCE = "provenance.yaml"
DIGESTS = ("data_sha256", "tokenizer_sha256", "vocab_size")


def git_commit() -> str | None:
    """Commit of this program, with the suffix "-changed" if tracked files have changed; None outside a checkout."""
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
    """Name of the CPU."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def command_line() -> str:
    """The arguments of `python`, quoted for a shell in the folder of the scripts."""
    script, *arguments = sys.argv
    folder, package = Path(script).resolve().parent, Path(__file__).resolve().parents[1]
    if folder == package:
        return shlex.join(["-m", f"nas.{Path(script).stem}", *arguments])
    return shlex.join([Path(script).name if folder == package.parent else script, *arguments])


def provenance(config: Config, corpus_meta: dict, context) -> dict:
    """The content of provenance.yaml. corpus_meta: meta.yaml of the corpus; context: a DeviceContext."""
    return {
        "command": command_line(),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "device": context.name,
        "precision": context.precision,
        "processor": processor(),
        "processes": world_size(),
        "threads": context.threads,
        "platform": platform.platform(),
        "seed": config.seed,
        **data_digests(corpus_meta),
    }


def check_text(run: Path, digests: dict) -> dict:
    """The recorded provenance of a run. Raises InputError if its text or tokenizer is not that of data_digests()."""
    recorded = read_yaml(run / PROVENANCE)
    for key in DIGESTS:
        if recorded.get(key) != digests.get(key):
            raise InputError(
                f"{run} was trained on another text: {key} differs from its provenance.yaml; restore the text, or give "
                "the same data options"
            )
    return recorded


def data_digests(corpus_meta: dict) -> dict:
    """The keys of provenance.yaml that identify the text and the tokenizer. corpus_meta: meta.yaml of the corpus."""
    return {  # the keys of DIGESTS
        "data_sha256": {split: facts["sha256"] for split, facts in corpus_meta["splits"].items()},
        "tokenizer_sha256": corpus_meta["tokenizer_sha256"],
        "vocab_size": corpus_meta["vocab_size"],
    }
