"""Neural architecture search for Transformer-XL language models."""

import runpy
import sys
from pathlib import Path

SCRIPTS = "search", "derive", "retrain", "animate"  # in the root of the repository
MODULES = "run", "compare", "report", "generate", "score", "export", "prepare", "cutoffs", "latency"


def load_model(path, device: str = "auto"):
    """Load the model of a run folder of retrain.py or of an exported folder. See nas.inference.language_model."""
    from nas.inference.language_model import load_model  # imports torch

    return load_model(path, device)


def main() -> None:
    """The command par-nas: `par-nas search` is `python search.py`, and `par-nas run` is `python -m nas.run`."""
    from nas.core.errors import fail, nearest

    usage, name = f"usage: par-nas {{{','.join(SCRIPTS + MODULES)}}} ...", "".join(sys.argv[1:2])
    if name in ("", "-h", "--help"):
        print(usage)
        return
    script = Path(__file__).parents[1] / f"{name}.py"
    if name not in SCRIPTS + MODULES:
        fail(2, f"error: par-nas has no command {name}; the nearest is {nearest(name, SCRIPTS + MODULES)}")
    elif name in SCRIPTS and not script.exists():
        fail(2, f"error: {script} is missing: install par-nas from a clone, by `pip install --editable .`")
    sys.argv[:2] = [str(script)]
    if name in MODULES:
        runpy.run_module(f"nas.{name}", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(script), run_name="__main__")
