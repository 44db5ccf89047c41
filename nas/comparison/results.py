"""Results of a comparison: one PatternResult per contender, read from its run folder."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nas.comparison.spec import RANDOM, Contender, Settings, training_folder
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_yaml
from nas.core.run_folder import RESULTS

CONTENDERS = "contenders.yaml"  # the contenders of the last report, with their latencies
CONTENDERS_FORMAT = "par-contenders/1"


@dataclass(frozen=True)
class Metric:
    """The metric that ranks patterns. Tests and intervals use its loss in nats per word, or per byte.

    Args:
        key: the key in results.yaml.
        exponential: whether the metric is exp(loss); else it is the loss in bits.
        digits: decimals in tables.
    """

    name: str
    key: str
    exponential: bool
    digits: int

    def loss(self, values: np.ndarray) -> np.ndarray:
        """The loss in nats."""
        return np.log(values) if self.exponential else np.asarray(values) * math.log(2)

    def format_difference(self, loss: float) -> str:
        """A difference of losses, as a change of the metric."""
        return f"{math.expm1(loss):+.1%}" if self.exponential else f"{loss / math.log(2):+.4f}"


WORD_PERPLEXITY = Metric("word perplexity", "word_perplexity", True, 1)
BITS_PER_BYTE = Metric("bits per byte", "bits_per_byte", False, 4)


@dataclass(frozen=True)
class PatternResult:
    """A contender with the results of its runs, one per seed.

    Args:
        runs: the content of each run's results.yaml, in the order of `seeds`.
        latency: an entry of nas.costs.latency.measure_models, or None if it was not measured.
        search_hours: time of its searches and derivation; 0 for contenders without a search.
        folders: the run folders, in the order of `seeds`.
        vocab_size: the size of the vocabulary, or None if it is unknown.
    """

    contender: Contender
    seeds: list[int]
    runs: list[dict]
    latency: dict | None
    search_hours: float
    folders: tuple[Path, ...] = ()
    vocab_size: int | None = None

    @property
    def train_hours(self) -> float:
        """Mean over the seeds."""
        return float(np.mean([run["wall_time_s"] for run in self.runs])) / 3600

    @property
    def latency_ratio(self) -> float | None:
        """Latency relative to the interleaved pattern's."""
        return None if self.latency is None else self.latency["ratio_to_interleaved"]

    def values(self, metric: Metric, split: str = "test") -> np.ndarray:
        """The metric of each seed [S]."""
        return np.array([run[split][metric.key] for run in self.runs])

    def losses(self, metric: Metric, seeds: list[int] | None = None) -> np.ndarray:
        """The loss of each seed [S] on test. seeds: a subset of the result's seeds; default all."""
        losses = metric.loss(self.values(metric))
        return losses if seeds is None else losses[[self.seeds.index(seed) for seed in seeds]]

    def format_mean(self, metric: Metric, split: str = "test") -> str:
        """Mean and standard error as text."""
        mean, error = mean_and_standard_error(self.values(metric, split))
        return f"{mean:.{metric.digits}f}" + ("" if error is None else f" ± {error:.{metric.digits}f}")


def mean_and_standard_error(values) -> tuple[float, float | None]:
    """(mean, standard error of the mean); the latter is None for a single value."""
    values = np.asarray(values, dtype=float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def write_contenders(
    run: Path, contenders: list[Contender], settings: Settings, hours: dict[str, float], latencies: dict
) -> None:
    """Write the contenders to the comparison's run folder, for read_results().

    Args:
        hours: search hours by the contender's name; 0 if it is missing.
        latencies: from nas.comparison.timer.Timer.measure_or_reuse, or empty.
    """
    times, listed = latencies.get("patterns", {}), []
    for contender in contenders:
        more = {"search_hours": hours.get(contender.name, 0.0), "latency": times.get(contender.key)}
        listed.append(asdict(contender) | more)
    content = {"format": CONTENDERS_FORMAT, "seeds": settings.seeds, "random_seeds": settings.seeds_of(RANDOM)}
    write_yaml(run / CONTENDERS, content | {"contenders": listed, "latency_holds_for": latencies.get("holds_for")})


def read_contenders(run: Path) -> tuple[dict, list[Contender]]:
    """The content of the contenders file, and its contenders. Raises InputError if it is missing or damaged."""
    content = read_yaml(run / CONTENDERS)
    if content.get("format") != CONTENDERS_FORMAT:
        raise InputError(f"{run / CONTENDERS} is damaged: it lacks `format: {CONTENDERS_FORMAT}`")
    return content, [Contender(entry["name"], entry["kind"], entry["blocks"]) for entry in content["contenders"]]


def known_latencies(run: Path) -> dict:
    """The `latencies` that write_contenders() wrote; empty if there is no file."""
    if not (run / CONTENDERS).exists():
        return {}
    content, contenders = read_contenders(run)
    times = {c.key: entry["latency"] for c, entry in zip(contenders, content["contenders"], strict=True)}
    return {"patterns": {key: time for key, time in times.items() if time}, "holds_for": content["latency_holds_for"]}


def read_results(run: Path) -> list[PatternResult]:
    """A result for each contender that has a finished run. run: the comparison's run folder.

    Raises InputError if a file is damaged, or if no run has finished.
    """
    (content, contenders), results = read_contenders(run), []
    vocab_size = read_yaml(run / "provenance.yaml")["vocab_size"]
    for contender, entry in zip(contenders, content["contenders"], strict=True):
        seeds = content.get("random_seeds", content["seeds"]) if contender.kind == RANDOM else content["seeds"]
        folders = {seed: training_folder(run, contender, seed) for seed in seeds}
        done = {seed: folder for seed, folder in folders.items() if (folder / RESULTS).exists()}
        if done:
            runs, folders = [read_yaml(folder / RESULTS) for folder in done.values()], tuple(done.values())
            times = entry["latency"], entry["search_hours"]
            results.append(PatternResult(contender, list(done), runs, *times, folders, vocab_size))
    if not results:
        raise InputError(f"{run / CONTENDERS}: none of its runs has finished")
    return results


def choose_metric(results: list[PatternResult]) -> Metric:
    """Word perplexity if it is comparable in all runs, else bits per byte."""
    splits = (run[split] for result in results for run in result.runs for split in ("valid", "test"))
    return WORD_PERPLEXITY if all(split["word_perplexity_comparable"] for split in splits) else BITS_PER_BYTE


def sort_by_loss(results: list[PatternResult]) -> list[PatternResult]:
    """Lowest mean loss on test first."""
    metric = choose_metric(results)
    return sorted(results, key=lambda result: result.losses(metric).mean())
