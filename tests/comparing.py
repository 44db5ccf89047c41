"""A small COMPARISON.yaml for tests, and nas.compare in a separate process."""

from functools import partial
from pathlib import Path

import yaml

from tests.processes import run

WIDE = "format: par-pattern/2\nd_model: 32\nheads: 4\nblocks: [attention, dense]\n"
COMPARISON = {
    "format": "par-comparison/2",
    "retrain": "small.yaml",
    "patterns": ["interleaved", "dense-only", "wide.yaml"],
    "seeds": [1, 2],
}


compare = partial(run, "compare")


def write_comparison_yaml(folder: Path, small_yaml: Path, **changed) -> Path:
    """A comparison of runs of 8 steps; keys that are changed to None are omitted."""
    content = yaml.safe_load(small_yaml.read_text())
    content["train"] |= {"steps": 8, "evaluate_every": 0, "warmup_steps": 2, "checkpoint_every": 2}
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    (folder / "wide.yaml").write_text(WIDE)
    path = folder / "comparison.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (COMPARISON | changed).items() if v is not None}))
    return path
