"""nas.derivation.runs."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nas.core.config import flat_config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.metrics import read_pi
from nas.costs.table import CostTable, read_costs
from nas.derivation.confidence import MAY_DIFFER


@dataclass(frozen=True)
class SearchRun:
    """What a search left in its folder: pi [N, O] at the last logged step, and what it ran with."""

    path: Path
    content: dict  # of config.yaml
    operations: list[str]
    pi: np.ndarray
    step: int
    of_steps: int
    flops: CostTable

    @cached_property
    def options(self) -> dict:
        """{dotted key: value}"""
        return flat_config(self.content)

    @property
    def target(self) -> float | None:
        """The ratio to the interleaved pattern's cost that the search aimed at; None where it had no such aim."""
        aimed = self.options["search.latency.source"] != "none" and self.options["search.latency.mode"] == "target"
        return self.options["search.latency.target"] if aimed else None


def read_run(path: Path) -> SearchRun:
    """Raises InputError where the folder is no search run, or damaged."""
    last = read_pi(path)[-1]
    content, names = read_yaml(path / "config.yaml"), last["operations"]
    flops = read_costs(path / "flops.yaml", names)
    return SearchRun(path, content, names, np.array(last["pi"]), last["step"], last.get("of_steps", 0), flops)


def check_seeds(runs: list[SearchRun]) -> list[str]:
    """That runs are seeds of one search: notices of what else differs between them.

    Raises InputError where their operations, blocks, models or texts differ, naming the first difference.
    """
    first, found = runs[0], []
    for run in runs[1:]:
        if run.path.resolve() == first.path.resolve():
            raise InputError(f"{run.path} is given twice")
        if (run.operations, run.pi.shape) != (first.operations, first.pi.shape):
            raise InputError(
                f"{run.path} searched {len(run.pi)} blocks of {', '.join(run.operations)}, and {first.path} "
                f"{len(first.pi)} of {', '.join(first.operations)}: give seeds of one search"
            )
        for key, value in run.options.items():
            if key in MAY_DIFFER or value == first.options[key]:
                continue
            difference = f"{key} is {value} in {run.path} and {first.options[key]} in {first.path}"
            if key.startswith(("model.", "data.")):
                raise InputError(f"{difference}: give seeds of one search")
            found.append(f"{difference}: what follows mixes two ways to search")
        if run.options["seed"] == first.options["seed"]:
            found.append(f"{run.path} has the seed of {first.path}: it adds no evidence")
    return found


def target_notice(run: SearchRun, ratio: float) -> str | None:
    """What a user who gave a target must know of a pattern that costs something else."""
    target = run.target
    if target is None or run.options["search.latency.weight"] == 0 or abs(ratio / target - 1) < 0.1:
        return None
    return (
        f"the search aimed at {target:g} of the interleaved pattern's cost, this pattern costs {ratio:.2f}: a target "
        "holds for the expectation over pi, of which a pattern keeps one operation per block"
    )
