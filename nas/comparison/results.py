"""Results of a comparison: one PatternResult per contender, read from its run folder."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nas.comparison.spec import SEARCHED, Contender
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.pattern import read_pattern
from nas.core.run_folder import OUTCOME, RESULTS

LATENCIES = "latencies.yaml"  # {"patterns": {abbreviated pattern: latency}, "holds_for": conditions}


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

    def format(self, values) -> str:
        """Mean and standard error as text."""
        mean, error = mean_and_standard_error(values)
        return f"{mean:.{self.digits}f}" + ("" if error is None else f" ± {error:.{self.digits}f}")

    def format_difference(self, loss: float) -> str:
        """A difference of losses, as a change of the metric."""
        return f"{math.expm1(loss):+.1%}" if self.exponential else f"{loss / math.log(2):+.4f}"


WORD_PERPLEXITY = Metric("word perplexity", "word_perplexity", True, 1)
BITS_PER_BYTE = Metric("bits per byte", "bits_per_byte", False, 4)


@dataclass(frozen=True)
class PatternResult:
    """A contender with the results of its runs, one per seed.

    Args:
        runs: the content of each run's results.yaml.
        latency: an entry of nas.costs.latency.measure_models.
        search_hours: time of its searches; 0 for contenders without a search.
        folders: the run folders, in the order of `runs`.
    """

    contender: Contender
    runs: list[dict]
    latency: dict
    search_hours: float
    vocab_size: int
    folders: tuple[Path, ...] = ()

    @property
    def train_hours(self) -> float:
        """Mean over the seeds."""
        return float(np.mean([run["wall_time_s"] for run in self.runs])) / 3600

    @property
    def latency_ratio(self) -> float:
        """Latency relative to the interleaved pattern's."""
        return self.latency["ratio_to_interleaved"]

    def values(self, metric: Metric, split: str = "test") -> np.ndarray:
        """The metric of each seed [S]."""
        return np.array([run[split][metric.key] for run in self.runs])

    def losses(self, metric: Metric) -> np.ndarray:
        """The loss of each seed [S] on test."""
        return metric.loss(self.values(metric))


def mean_and_standard_error(values) -> tuple[float, float | None]:
    """(mean, standard error of the mean); the latter is None for a single value."""
    values = np.asarray(values, dtype=float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def read_latencies(run: Path) -> dict:
    """The content of LATENCIES; without the file, no latencies."""
    return read_yaml(run / LATENCIES) if (run / LATENCIES).exists() else {"patterns": {}, "holds_for": None}


def search_seconds(run: Path) -> float:
    """The time of all searches."""
    return sum(read_yaml(outcome)["wall_time_s"] for outcome in run.glob(f"search-*/{OUTCOME}"))


def read_results(run: Path) -> list[PatternResult]:
    """A result for each pattern file with a finished run, the best on test first. run: the comparison's run folder.

    Raises InputError if a file is damaged, or if no run has finished.
    """
    vocab_size, latencies = read_yaml(run / "provenance.yaml")["vocab_size"], read_latencies(run)["patterns"]
    results = []
    for file in sorted(run.glob("patterns/*.yaml")):
        pattern = read_pattern(file)
        origin = pattern["derived_from"]
        contender = Contender(file.stem, origin.get("method", SEARCHED), pattern["blocks"])
        folders = [path.parent for path in sorted(run.glob(f"runs/{contender.key}-*/{RESULTS}"))]
        seconds = search_seconds(run) if contender.kind == SEARCHED else 0.0
        if runs := [read_yaml(folder / RESULTS) for folder in folders]:
            latency = latencies.get(contender.key, runs[0]["latency"])  # the training's own, if it was not measured yet
            results.append(PatternResult(contender, runs, latency, seconds / 3600, vocab_size, tuple(folders)))
    if not results:
        raise InputError(f"{run}: none of its runs has finished; continue it with python -m nas.compare")
    metric = choose_metric(results)
    return sorted(results, key=lambda result: result.losses(metric).mean())


def choose_metric(results: list[PatternResult]) -> Metric:
    """Word perplexity if it is comparable in all runs, else bits per byte."""
    splits = (run[split] for result in results for run in result.runs for split in ("valid", "test"))
    return WORD_PERPLEXITY if all(split["word_perplexity_comparable"] for split in splits) else BITS_PER_BYTE
