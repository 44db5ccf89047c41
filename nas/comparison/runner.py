"""The stages of a comparison: search, derive, draw random patterns, train, measure latencies."""

import os
from collections.abc import Sequence
from itertools import islice

import torch

from nas.comparison.comparison import Comparison
from nas.comparison.spec import RANDOM, SAME_LATENCY, SEARCHED, Contender, is_random_of, pattern_file, random_names
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.pattern import file_name, network
from nas.core.run_folder import LATENCY
from nas.costs.baselines import random_patterns
from nas.retraining.tasks import run_tasks, unfinished
from nas.training.device import count_cores

BATCH, TRIES = 2, 10  # patterns timed in a round for each missing one; the highest number of rounds


def visible_gpus(config: Config) -> list[str]:
    """The GPUs for runs, as CUDA_VISIBLE_DEVICES names them; none if the runs use the CPU."""
    if config.train.device == "cpu":
        return []
    count, names = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA ignores the names from the first invalid one on, such as -1; device_count() counts those before it.
    return [str(number) for number in range(count)] if names is None else names.split(",")[:count]


def choose_workers(config: Config, workers: int | None) -> tuple[int, list[str]]:
    """The number of runs at a time, by default one on each GPU, and the GPUs.

    Raises InputError if several runs on the CPU lack a number of threads.
    """
    gpus = visible_gpus(config)
    workers = workers or max(1, len(gpus))
    if not gpus and workers > 1 and config.train.threads is None:
        share = max(1, count_cores() // workers)
        raise InputError(f"--workers {workers} needs a number of threads for each run: add train.threads={share}")
    return workers, gpus


def run_stages(comparison: Comparison, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """Search, derive, draw random patterns and train. Returns {name: reason} of the tasks that failed.

    Derivations run one by one, because they may measure latencies. Patterns that need no search train in parallel with
    the searches.
    """
    searches = comparison.search_tasks()
    failed = run_tasks(searches + comparison.training_tasks(comparison.given), workers, gpus)
    if searches and not unfinished(searches):
        for folder in comparison.search_folders.values():
            if comparison.settings.budgets and not (folder / LATENCY).exists():
                comparison.cost_table(folder / LATENCY)  # without it derive.py would count budgets in FLOPs
        failed |= run_tasks(comparison.derivation_tasks(), 1, gpus)
        for contender in comparison.known_contenders():
            if contender.kind == SEARCHED:
                draw_random(comparison, contender)
    trainings = comparison.training_tasks(comparison.known_contenders())
    return failed | run_tasks([task for task in trainings if task.name not in failed], workers, gpus)


def draw_random(comparison: Comparison, searched: Contender) -> None:
    """Write the missing random patterns of a searched pattern. They have its predicted and its measured latency.

    Both may differ by a share SAME_LATENCY. Nothing else should run meanwhile, because latencies are measured.
    """
    names = random_names(searched.name, comparison.settings.random)
    missing = [name for name in names if not pattern_file(comparison.path, name).exists()]
    if not missing:
        return
    table = comparison.cost_table(comparison.path / LATENCY)
    own = [other for other in comparison.known_contenders() if is_random_of(other.name, searched.name)]
    seen = {network(other.blocks) for other in (searched, *own)}
    target, operations = table.cost(searched.blocks), comparison.search.search.operations
    draws = random_patterns(comparison.blocks, operations, table, target, SAME_LATENCY, seed=0)
    fresh = (blocks for blocks in draws if network(blocks) not in seen)
    for _ in range(TRIES):
        batch = list(islice(fresh, BATCH * len(missing)))
        times = comparison.measure([searched.blocks, *batch]) if batch else {}
        for blocks in batch:
            ratio = times[file_name(blocks)]["median_ms"] / times[searched.key]["median_ms"]
            if missing and abs(ratio - 1) <= SAME_LATENCY:
                contender = Contender(missing.pop(0), RANDOM, blocks)
                ratios = {"predicted_ratio": table.cost(blocks) / target, "measured_ratio": ratio}
                comparison.write_pattern(contender, at_latency_of=searched.key, **ratios)
                print(f"drew {contender.name}: {contender.key}, {ratio:.3f} of the latency of {searched.name}")
    if missing:
        print(
            f"NOTICE: no pattern was found for {', '.join(missing)}, because few have the latency of {searched.name}; "
            "repeat the command to try again"
        )
