"""Search runs: how derivation reads them, and the check that several are seeds of one search."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nas.core.config import SEEDS, LatencyOptions, flat_config, marked
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.outcome import TIED_MARGIN, read_pi
from nas.core.pattern import read_pattern
from nas.core.run_folder import CHOICE, CONFIG, FLOPS_TABLE, LATENCY, OUTCOME, PATTERN
from nas.costs.budget import as_ratio, likeliest_path
from nas.costs.cost_table import CostTable
from nas.search.network_costs import read_table


@dataclass(frozen=True)
class SearchRun:
    """The results of a search.

    Args:
        content: of config.yaml.
        pi: [N, O] at the last logged step.
    """

    path: Path
    content: dict
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
        """search.latency.target as a ratio to the reference's cost; None if cost played no role."""
        if self.options["search.latency.source"] == "none":
            return None
        return as_ratio(self.options["search.latency.target"], self.costs, len(self.pi))

    @property
    def budget(self) -> float | None:
        """The budget of a search by trials; None: none."""
        return self.target if self.options["search.method"] != "gumbel" else None

    @property
    def costs(self) -> CostTable:
        """The costs that the search used: milliseconds if it measured them, else FLOPs."""
        measured = LatencyOptions(source=self.options["search.latency.source"]).in_milliseconds
        return read_table(self.path / LATENCY, self.options, self.operations) if measured else self.flops


def read_run(path: Path) -> SearchRun:
    """Read a search run. Raises InputError if the folder is not a search run, or is damaged, or if its logits have not
    learned.
    """
    last = read_pi(path)[-1]
    pi, of_steps = np.array(last["pi"]), last.get("of_steps", 0)
    finished = (path / OUTCOME).exists()  # then a uniform pi has learned that no pattern is better than another
    if pi.shape[-1] > 1 and np.ptp(pi) < TIED_MARGIN and not finished:
        raise InputError(
            f"{path}: pi is still uniform at step {last['step']} of {of_steps}, because the logits have not learned; "
            "continue the search with --resume"
        )
    content, names = read_yaml(path / CONFIG), last["operations"]
    flops = read_table(path / FLOPS_TABLE, flat_config(content), names)
    return SearchRun(path, content, names, pi, last["step"], of_steps, flops)


def current_pattern(run: Path) -> list[str]:
    """The pattern of pattern.yaml, else the network that trials chose, else the likeliest pattern."""
    if (run / PATTERN).exists():
        return read_pattern(run / PATTERN)["blocks"]
    if (run / CHOICE).exists():
        return read_yaml(run / CHOICE)["network"]["blocks"]
    search = read_run(run)
    path = likeliest_path(search.pi, search.operations, search.costs, search.budget)
    return [search.operations[index] for index in path]


def check_seeds(runs: list[SearchRun]) -> list[str]:
    """Check that runs are seeds of one search; returns notices about unfinished runs and options that differ.

    Raises InputError, with the first difference, if operations, blocks, models or texts differ.
    """
    first = runs[0]
    if len(runs) > 1 and any(run.options["search.method"] == "trials" for run in runs):
        raise InputError("each search by trials chooses a network of its own: give one RUN_DIR")
    notices = [
        f"{run.path} is not finished: it is at step {run.step} of {run.of_steps}; derive its pattern again at the end"
        for run in runs
        if run.step < run.of_steps
    ]
    for run in runs[1:]:
        if run.path.resolve() == first.path.resolve():
            raise InputError(f"{run.path} is given twice")
        if (run.operations, run.pi.shape) != (first.operations, first.pi.shape):
            raise InputError(
                f"{run.path} searched {len(run.pi)} blocks of {', '.join(run.operations)}, and {first.path} "
                f"{len(first.pi)} of {', '.join(first.operations)}; give seeds of one search"
            )
        for key, value in run.options.items():
            if key in marked(SEEDS) or value == first.options[key]:
                continue
            difference = f"{key} is {value} in {run.path} and {first.options[key]} in {first.path}"
            if key.startswith(("model.", "data.", "search.method")):
                raise InputError(f"{difference}; give seeds of one search")
            notices.append(f"{difference}; the pattern combines two different searches")
        if run.options["seed"] == first.options["seed"]:
            notices.append(f"{run.path} has the same seed as {first.path}, so it adds no evidence")
    return notices
