"""Latency of operations and patterns, measured on this device."""

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from nas.core.config import Config
from nas.core.errors import InputError, check_onnx
from nas.core.pattern import interleaved
from nas.core.provenance import processor
from nas.core.run_folder import LATENCY
from nas.costs.cost_table import MILLISECONDS, CostTable, read_costs
from nas.costs.flops import batch_shape, cost_options
from nas.costs.workloads import new_works
from nas.data.corpus import Corpus, bytes_per_token
from nas.training.device import DeviceContext
from nas.training.distributed import broadcast_from_main

ROUNDS, SECONDS = 20, 3.0  # the lowest number of rounds, and the seconds for which they continue
WARM_UP = 3  # unmeasured rounds
ATTEMPTS = 3  # measurements of a table before its values are refused
MIXTURES = 6  # models of mixed operations to which costs are fitted, besides those of a single operation


def measurement_conditions(config: Config, vocab_size: int, operations: list[str], context: DeviceContext) -> dict:
    """The conditions that measured costs of these operations depend on: the timing, the device and the sizes."""
    return device_conditions(config, context) | cost_options(config, vocab_size, operations)


def device_conditions(config: Config, context: DeviceContext) -> dict:
    """The timing, the runtime and the device of measured costs. Raises InputError if the runtime is not installed."""
    timing = config.search.latency.timing
    if config.search.latency.source == "onnx":  # it runs on the CPU
        check_onnx()
        runtime = {"processor": processor(), "precision": "fp32", "onnxruntime": version("onnxruntime")}
        return {"timing": timing, "threads": context.threads, **runtime}
    return {
        "timing": timing,
        **({"optimizer": config.train.optimizer} if timing == "training" else {}),
        "processor": context.name if context.is_gpu else processor(),
        "threads": context.threads,
        "precision": context.precision,
        "torch": str(torch.__version__),
    }


def changed_conditions(recorded: dict, current: dict) -> str:
    """The current conditions that were recorded otherwise, with the recorded values, as text; "" if there are none."""
    differ = [key for key in current if recorded.get(key) != current[key]]
    # 40 characters, because a condition may be a digest or a long list.
    return ", ".join(f"{key} {str(recorded[key])[:40]}" if key in recorded else f"no {key}" for key in differ)


def work_of(config: Config) -> str:
    """What is timed, as text."""
    latency = config.search.latency
    return latency.timing + " in ONNX Runtime" * (latency.source == "onnx")


def timed_rounds(
    functions: dict[Hashable, Callable[[], object]], rounds: int, seconds: float = 0.0
) -> dict[Hashable, np.ndarray]:
    """Seconds that each function takes in each round [R], after WARM_UP unmeasured rounds.

    A round calls each function once, in a new random order, so a drift of the clock speed affects all equally. Rounds
    continue for `seconds`, but their number is at least `rounds` and at most ten times that.
    """
    times, items = {name: [] for name in functions}, list(functions.items())
    generator, start, done = np.random.default_rng(0), time.perf_counter(), -WARM_UP
    while done < rounds or (done < 10 * rounds and time.perf_counter() - start < seconds):
        for index in generator.permutation(len(items)):
            name, function = items[index]
            called = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - called)
        done += 1
    return {name: np.array(taken[WARM_UP:]) for name, taken in times.items()}


def segment_times(
    patterns: list[list[str]], config: Config, counts: np.ndarray, context: DeviceContext, rounds: int
) -> np.ndarray:
    """Seconds of each pattern in each round [P, R]. Restores the random state of weights and dropout."""
    with context.fork_rng():
        works = dict(enumerate(new_works(patterns, config, counts, context)))
        return np.array(list(timed_rounds(works, rounds, SECONDS).values()))


def text_times(
    networks: dict[Hashable, tuple[list[str], Config, Corpus]],
    context: DeviceContext,
    rounds: int,
    seconds: float = 0.0,
) -> dict[Hashable, dict]:
    """{name: {"ms_per_1000_bytes", "ratio"}}: times for a text, and their ratio to that of the first network.

    All networks are timed in the same rounds. A time is the lower quartile over the rounds, because other programs make
    rounds slower, never faster. networks: the blocks, the configuration without auto, and the text of each.
    """
    works, kilobytes, first = {}, {}, next(iter(networks))
    with context.fork_rng():
        for name, (blocks, config, corpus) in networks.items():
            (works[name],) = new_works([blocks], config, corpus.counts(), context)
            kilobytes[name] = math.prod(batch_shape(config)[:2]) * bytes_per_token(corpus) / 1000
        times = {name: taken / kilobytes[name] for name, taken in timed_rounds(works, rounds, seconds).items()}
    ms = {name: 1e3 * float(np.quantile(taken, 0.25)) for name, taken in times.items()}
    return {name: {"ms_per_1000_bytes": own, "ratio": own / ms[first]} for name, own in ms.items()}


def calibration_patterns(operations: list[str], blocks: int) -> list[list[str]]:
    """The patterns to which costs are fitted: no blocks, only one operation, and mixtures in nearly equal shares."""
    generator = np.random.default_rng(0)
    shares = [np.resize(generator.permutation(operations), blocks) for _ in range(MIXTURES)]
    mixtures = [generator.permutation(share).tolist() for share in shares]
    return [[], *([name] * blocks for name in operations), *mixtures]


def unusable_cost(tables: dict[str, CostTable]) -> str:
    """The first cost, but of identity, that is not larger than its interquartile range, as text; "" if none.

    tables: by the sizes to which a table belongs, as text that may be empty.
    """
    for sizes, table in tables.items():
        for name, cost in {"overhead": table.overhead, **table.blocks}.items():
            low, high = table.quartiles[name]
            if name != "identity" and high - low >= cost:
                of = f" of {sizes}" if sizes else ""
                return f"{name}{of} has a median of {cost:.4f} ms and quartiles of {low:.4f} and {high:.4f} ms"
    return ""


def measure_costs(config: Config, counts: np.ndarray, context: DeviceContext) -> CostTable:
    """Milliseconds of each operation in a block, and of the overhead, for a segment with full memories.

    Whole models are timed, because an operation alone would find other data in the caches. In each round a
    least-squares fit of relative errors gives the costs. The table holds their medians and quartiles over the rounds.

    counts [V]: of each token in the training text. Raises InputError as measure_steadily().
    """
    names = list(dict.fromkeys([*config.search.operations, *interleaved(2)]))
    patterns = calibration_patterns(names, config.model.blocks)
    batch, segment, memory = batch_shape(config)
    work = f"{work_of(config)}, {batch} x {segment} tokens, memory {memory}"
    models = f"{len(patterns)} models of {config.model.blocks} blocks, at least {ROUNDS} times each"
    print(f"measuring {', '.join(names)} ({work}): {models}", flush=True)

    def measure() -> dict[str, CostTable]:
        return {"": fit_costs(patterns, names, segment_times(patterns, config, counts, context, ROUNDS))}

    (table,) = measure_steadily(measure, config)
    return replace(table, holds_for=measurement_conditions(config, len(counts), names, context))


def measure_steadily(measure: Callable[[], dict[str, CostTable]], config: Config) -> list[CostTable]:
    """Measure tables of costs, as in unusable_cost(), again if a cost is unusable, ATTEMPTS times in all.

    Raises InputError, which names the cost, if one is still unusable.
    """
    for attempt in range(1, ATTEMPTS + 1):
        tables = measure()
        reason = unusable_cost(tables)
        if not reason:
            return [*tables.values()]
        if attempt < ATTEMPTS:
            print(f"NOTICE: {reason}; measuring again", flush=True)
    section = {"training": "train", "inference": "evaluate"}.get(config.search.latency.timing)  # generation has one row
    larger = f", or give a larger {section}.batch_size," if section else ""
    raise InputError(
        f"latencies vary too much, {ATTEMPTS} times: {reason}; nothing is lost: stop other programs{larger} and repeat "
        "the command; or count FLOPs instead: search.latency.source=flops"
    )


def fit_costs(patterns: list[list[str]], names: list[str], times: np.ndarray) -> CostTable:
    """The costs of operations from the seconds [P, R] of P patterns in R rounds."""
    terms = np.array([[1, *(pattern.count(name) for name in names)] for pattern in patterns])
    fits = [np.linalg.lstsq(terms / taken[:, None], np.ones(len(terms)), rcond=None)[0] for taken in 1e3 * times.T]
    return table_of_rounds(dict(zip(["overhead", *names], np.transpose(fits), strict=True)))


def table_of_rounds(costs: dict[str, np.ndarray]) -> CostTable:
    """The medians and quartiles of the overhead and each operation. costs: milliseconds in each round [R]."""
    found = {name: np.maximum(0.0, np.quantile(own, [0.25, 0.5, 0.75])).tolist() for name, own in costs.items()}
    blocks = {name: middle for name, (_, middle, _) in found.items()}
    quartiles = {name: [low, high] for name, (low, _, high) in found.items()}
    return CostTable(MILLISECONDS, blocks.pop("overhead"), blocks, quartiles=quartiles)


def current_costs(config: Config, counts: np.ndarray, context: DeviceContext, file: Path) -> CostTable:
    """The table in a file if it was measured under the current conditions; otherwise a new one, not yet written.

    With a table from another device: that one. Raises InputError if it is for other sizes.
    """
    given, names = config.search.latency.table, config.search.operations
    if file.exists() or given:
        table = read_costs(file if file.exists() else Path(given), names)
        device = {"timing": config.search.latency.timing} if given else device_conditions(config, context)
        changed = changed_conditions(table.holds_for, device | cost_options(config, len(counts), names))
        if not changed:
            return table
        if given:
            raise InputError(f"search.latency.source={given} does not fit this search: it was measured with {changed}")
        print(f"NOTICE: {file} was measured with {changed}, which differs now; measuring again")
    return measure_costs(config, counts, context)


def search_latency(config: Config, counts: np.ndarray, context: DeviceContext, run: Path) -> CostTable | None:
    """The table of a search, the same on each rank, or None. The run may hold one already."""
    if not config.search.latency.in_milliseconds:
        return None
    return broadcast_from_main(lambda: current_costs(config, counts, context, run / LATENCY))


def measure_models(
    patterns: list[list[str]], config: Config, counts: np.ndarray, context: DeviceContext, rounds: int = ROUNDS
) -> list[dict]:
    """Milliseconds of whole models for a segment with full memories: median, quartiles, and ratio to the first model.

    patterns: the first is the interleaved pattern. The ratio is the median over the rounds, which slow all alike.
    """
    times = segment_times(patterns, config, counts, context, rounds)
    return [
        {
            "median_ms": float(1e3 * np.median(taken)),
            "quartiles_ms": [float(1e3 * q) for q in np.quantile(taken, [0.25, 0.75])],
            "ratio_to_interleaved": float(np.median(taken / times[0])),
        }
        for taken in times
    ]


def measure_pattern(
    pattern: list[str], config: Config, corpus: Corpus, context: DeviceContext, predicted: dict
) -> dict:
    """The measured latency of a pattern, in the form of the files, merged with CostTable.predict(), or with {}."""
    _, measured = measure_models([interleaved(len(pattern)), pattern], config, corpus.counts(), context)
    batch, segment, memory = batch_shape(config)
    shape = {"batch_size": batch, "segment": segment, "memory": memory}
    timing = {"timing": work_of(config), **shape, "threads": context.threads}
    per_text = {"ms_per_1000_bytes": measured["median_ms"] * 1000 / (batch * segment * bytes_per_token(corpus))}
    return measured | per_text | predicted | timing
