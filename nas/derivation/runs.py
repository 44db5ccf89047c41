"""Search runs: how derivation reads them, and the check that several are seeds of one search."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

import numpy as np

from nas.core.config import flat_config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.metrics import read_pi
from nas.core.pattern import abbreviate, read_pattern
from nas.core.run_folder import FLOPS_TABLE, LATENCY, OUTCOME, PATTERN, can_evaluate_patterns, find_weights_run
from nas.costs.budget import likeliest_path
from nas.costs.cost_table import CostTable, read_costs
from nas.search.pi_statistics import TIE

MAY_DIFFER = (
    "seed",
    "data.cache",
    "train.threads",
    "search.weights_from",
)  # options that may differ between seeds of one search
UNIFORM_WEIGHTS = (
    "weights that trained on uniform paths: a checkpoint in {} of a search with search.schedule=sequential and "
    "search.sampling=hard"
)
TARGET_TOLERANCE = 0.1  # relative distance from the search's target that needs no notice


@dataclass(frozen=True)
class SearchRun:
    """The results of a search: pi [seeds of the logits, N, O] at their last logged steps, and the configuration."""

    path: Path
    content: dict  # the content of config.yaml
    operations: list[str]
    seed_pi: np.ndarray
    step: int
    of_steps: int
    flops: CostTable

    @cached_property
    def options(self) -> dict:
        """{dotted key: value}"""
        return flat_config(self.content)

    @cached_property
    def weights_run(self) -> Path:
        """The folder of the search that trained the weights: another one with search.weights_from."""
        return find_weights_run(self.path)

    @property
    def can_evaluate_patterns(self) -> bool:
        """Whether the weights were trained on uniform paths."""
        return can_evaluate_patterns(self.path)

    @property
    def pi(self) -> np.ndarray:
        """pi [N, O], averaged over the seeds of the logits."""
        return self.seed_pi.mean(axis=0)

    @property
    def budget(self) -> float | None:
        """The budget within which the search drew its patterns; None if it had none."""
        return self.limit("budget")

    @property
    def costs(self) -> CostTable:
        """The costs that the search used: milliseconds if it measured them, else FLOPs."""
        measured = self.options["search.latency.source"] == "measured"
        return read_costs(self.path / LATENCY, self.operations) if measured else self.flops

    def limit(self, mode: str) -> float | None:
        """search.latency.target, a ratio to the interleaved pattern's cost; None if the search had another mode."""
        options = self.options
        used = options["search.latency.source"] != "none" and options["search.latency.mode"] == mode
        return options["search.latency.target"] if used else None


def average_pi(runs: list[SearchRun]) -> np.ndarray:
    """pi [N, O], averaged over runs."""
    return np.mean([run.pi for run in runs], axis=0)


def read_run(path: Path) -> SearchRun:
    """Read a search run. Raises InputError if the folder is not a search run, or is damaged, or if its logits have not
    learned.
    """
    lines = {line.get("logits_seed", 1): line for line in read_pi(path)}  # the last line of each seed
    last = list(lines.values())[-1]
    pi, of_steps = np.array([line["pi"] for line in lines.values()]), last.get("of_steps", 0)
    finished = (path / OUTCOME).exists()  # then a uniform pi has learned that no pattern is better than another
    if pi.shape[-1] > 1 and np.ptp(pi[-1]) < TIE and not finished:
        raise InputError(
            f"{path}: pi is still uniform at step {last['step']} of {of_steps}, because the logits have not learned; "
            "continue the search with --resume"
        )
    content, names = read_yaml(path / "config.yaml"), last["operations"]
    flops = read_costs(path / FLOPS_TABLE, names)
    return SearchRun(path, content, names, pi, last["step"], of_steps, flops)


def describe_spread(runs: list[SearchRun], choose: Callable[[np.ndarray], list[int]]) -> list[str]:
    """Lines about the patterns that each seed of pi and each SuperNet choose, and how much they differ.

    Runs whose weights come from the same search count as seeds of pi.

    Args:
        choose: pi [N, O] -> the operation of each block.
    """
    chosen = [[choose(pi) for pi in run.seed_pi] for run in runs]
    lines = [
        f"{run.path}: " + ", ".join(abbreviate([run.operations[index] for index in path]) for path in paths)
        for run, paths in zip(runs, chosen, strict=True)
    ]
    supernets: dict[Path, list[int]] = {}
    for index, run in enumerate(runs):
        supernets.setdefault(run.weights_run.resolve(), []).append(index)
    paths_of = [[path for index in same for path in chosen[index]] for same in supernets.values()]
    means = [choose(average_pi([runs[index] for index in same])) for same in supernets.values()]
    within = [different_blocks(one, two) for paths in paths_of for one, two in combinations(paths, 2)]
    between = [different_blocks(one, two) for one, two in combinations(means, 2)]
    for kind, counts in (("seeds of pi with the same weights", within), ("SuperNets", between)):
        if counts:
            lines.append(f"{np.mean(counts):.1f} of {len(means[0])} blocks differ between two {kind}")
    return lines


def different_blocks(one: list[int], two: list[int]) -> int:
    return sum(a != b for a, b in zip(one, two, strict=True))


def current_pattern(run: Path) -> list[str]:
    """The pattern of pattern.yaml, or else of outcome.yaml, or else the likeliest one of an unfinished search."""
    if (run / PATTERN).exists():
        return read_pattern(run / PATTERN)["blocks"]
    if (run / OUTCOME).exists():
        return read_yaml(run / OUTCOME)["pattern"]
    search = read_run(run)
    path = likeliest_path(search.seed_pi[-1], search.operations, search.costs, search.budget)
    return [search.operations[index] for index in path]


def check_seeds(runs: list[SearchRun]) -> list[str]:
    """Check that runs are seeds of one search; returns notices about options that differ between them.

    Raises InputError, with the first difference, if operations, blocks, models or texts differ.
    """
    first, notices = runs[0], []
    for run in runs[1:]:
        if run.path.resolve() == first.path.resolve():
            raise InputError(f"{run.path} is given twice")
        if (run.operations, run.pi.shape) != (first.operations, first.pi.shape):
            raise InputError(
                f"{run.path} searched {len(run.pi)} blocks of {', '.join(run.operations)}, and {first.path} "
                f"{len(first.pi)} of {', '.join(first.operations)}; give seeds of one search"
            )
        for key, value in run.options.items():
            if key in MAY_DIFFER or value == first.options[key]:
                continue
            difference = f"{key} is {value} in {run.path} and {first.options[key]} in {first.path}"
            if key.startswith(("model.", "data.")):
                raise InputError(f"{difference}; give seeds of one search")
            notices.append(f"{difference}; the pattern combines two different searches")
        if run.options["seed"] == first.options["seed"]:
            notices.append(f"{run.path} has the same seed as {first.path}, so it adds no evidence")
        elif run.weights_run.resolve() == first.weights_run.resolve():
            notices.append(f"{run.path} has the weights of {first.path}, so it shows the spread of pi alone")
    return notices


def target_notice(run: SearchRun, ratio: float) -> str | None:
    """A message if the relative cost of the derived pattern is far from the target of the search."""
    target = run.limit("target")
    if target is None or run.options["search.latency.weight"] == 0 or abs(ratio / target - 1) < TARGET_TOLERANCE:
        return None
    return (
        f"the search's target is {target:g} of the interleaved pattern's cost, and this pattern costs {ratio:.2f}. The "
        "target applies to the average over pi; a derived pattern may cost more or less."
    )


def costs_of_origin(pattern: dict) -> CostTable | None:
    """The costs in the search folder from which a pattern file comes: milliseconds, else FLOPs. None without one.

    If the pattern comes from several seeds, the first folder that still exists counts.
    """
    for run in map(Path, (pattern.get("derived_from") or {}).get("runs", [])):
        for name in (LATENCY, FLOPS_TABLE):
            if (run / name).exists():
                return read_costs(run / name, pattern["blocks"])
    return None
