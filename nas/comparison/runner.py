"""The stages of a comparison: search, derive, choose baselines, train, measure latencies."""

import os
from collections.abc import Sequence

import torch

from nas.comparison.baselines import choose_baselines, match_parameters
from nas.comparison.comparison import Comparison
from nas.comparison.results import known_latencies, write_contenders
from nas.comparison.spec import MATCHED, RANDOM, SEARCHED, UNMATCHED, Contender, contenders_file, pattern_file
from nas.comparison.tasks import run_tasks, unfinished
from nas.core.config import Config
from nas.core.files import read_yaml
from nas.core.pattern import read_pattern
from nas.core.run_folder import LATENCY, OUTCOME, find_weights_run


def visible_gpus(config: Config) -> list[str]:
    """The GPUs for runs, as CUDA_VISIBLE_DEVICES names them; none if the runs use the CPU."""
    if config.train.device == "cpu":
        return []
    count, names = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA ignores the names from the first invalid one on, such as -1; device_count() counts those before it.
    return [str(number) for number in range(count)] if names is None else names.split(",")[:count]


def run_stages(comparison: Comparison, suffix: str, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """Search, derive, choose baselines and train. Returns {name: reason} of the tasks that failed.

    Derivations run one by one, because they may measure latencies. Patterns that need no search train
    in parallel with the searches.
    """
    searches = comparison.search_tasks()
    given = comparison.training_tasks(comparison.given if suffix == UNMATCHED else [])
    failed = run_tasks(searches + given, workers, gpus)
    if searches and not unfinished(searches):
        measure_tables(comparison)
        failed |= run_tasks(comparison.derivation_tasks(), 1, gpus)
        choose_baselines(comparison)
    trainings = comparison.training_tasks(find_contenders(comparison, suffix))
    return failed | run_tasks([task for task in trainings if task.name not in failed], workers, gpus)


def measure_tables(comparison: Comparison) -> None:
    """Give each search a table of latencies if there are budgets, because derive.py would else count them in FLOPs."""
    for folder in comparison.search_folders.values() if comparison.settings.budgets else ():
        if not (folder / LATENCY).exists():
            comparison.timer.table(folder / LATENCY)


def find_contenders(comparison: Comparison, suffix: str) -> list[Contender]:
    """The contenders that are known now. With MATCHED, only those that can reach the interleaved
    pattern's parameters.
    """
    known = comparison.known_contenders()
    if suffix == MATCHED:
        return [matched for contender in known if (matched := match_parameters(comparison, contender))]
    return known


def record_contenders(comparison: Comparison, contenders: list[Contender], suffix: str, measure: bool) -> None:
    """Write the contenders with their latencies. measure: whether to measure outdated latencies again."""
    path = contenders_file(comparison.path, suffix)
    latencies = known_latencies(path)
    if measure:
        latencies = comparison.timer.measure_or_reuse(contenders, latencies)
    hours = {contender.name: search_hours(comparison, contender) for contender in contenders}
    settings = comparison.settings
    write_contenders(path, contenders, settings.seeds, hours, latencies, settings.seeds_of(RANDOM))


def search_hours(comparison: Comparison, contender: Contender) -> float:
    """The time of all searches, and of relearning pi for the contender; 0 for contenders without a search."""
    if contender.kind != SEARCHED:
        return 0.0
    searches = set(comparison.search_folders.values())
    searches |= set(map(find_weights_run, searches))  # with search.weights_from, another search trained the weights
    seconds = [read_yaml(folder / OUTCOME)["wall_time_s"] for folder in searches]
    origin = read_pattern(pattern_file(comparison.path, contender.name))["derived_from"]
    return (sum(seconds) + origin.get("seconds", 0)) / 3600
