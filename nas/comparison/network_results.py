"""Results of a comparison: a NetworkResult for each contender, read from its run folders."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nas.comparison.spec import SETTINGS
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.run_folder import PROVENANCE, RESULTS

LATENCIES = "latencies.yaml"  # {"networks": {key: milliseconds for 1,000 bytes}, "holds_for": conditions}


@dataclass(frozen=True)
class Metric:
    """The metric that ranks networks. Tests and intervals use its loss in nats per word, or per byte.

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
        return f"{mean:,.{self.digits}f}" + ("" if error is None else f" ± {error:,.{self.digits}f}")

    def format_difference(self, loss: float) -> str:
        """A difference of losses, as a change of the metric."""
        return f"{math.expm1(loss):+.1%}" if self.exponential else f"{loss / math.log(2):+.4f}"


WORD_PERPLEXITY = Metric("word perplexity", "word_perplexity", True, 1)
BITS_PER_BYTE = Metric("bits per byte", "bits_per_byte", False, 4)


@dataclass(frozen=True)
class NetworkResult:
    """A contender with the results of its runs, one per seed.

    Args:
        key: the name of its network.
        runs: the content of each run's results.yaml.
        latency: milliseconds for 1,000 bytes of text.
        ratio: of its latency to that of the control.
        vocab_size: entries of its vocabulary.
        folders: the run folders, in the order of `runs`.
    """

    name: str
    key: str
    runs: list[dict]
    latency: float
    ratio: float
    vocab_size: int = 0
    folders: tuple[Path, ...] = ()

    @property
    def blocks(self) -> list[str]:
        return self.runs[0]["pattern"]

    @property
    def train_hours(self) -> float:
        """Mean over the seeds."""
        return float(np.mean([run["wall_time_s"] for run in self.runs])) / 3600

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
    return read_yaml(run / LATENCIES) if (run / LATENCIES).exists() else {"networks": {}, "holds_for": None}


def read_results(run: Path) -> list[NetworkResult]:
    """A result for each contender with a finished run: the control, and then the best on test first.

    run: the comparison's run folder. Raises InputError if a file is damaged, or if no run has finished.
    """
    networks, latencies = read_yaml(run / SETTINGS)["patterns"], read_latencies(run)["networks"]
    results: list[NetworkResult] = []
    for name, key in networks.items():
        folders = [path.parent for path in sorted(run.glob(f"runs/{key}-*/{RESULTS}"))]
        if folders:
            runs = [read_yaml(folder / RESULTS) for folder in folders]
            ms = latencies.get(key, runs[0]["latency"]["ms_per_1000_bytes"])  # of its training, if not measured yet
            ratio = ms / (results[0].latency if results else ms)
            size = read_yaml(folders[0] / PROVENANCE)["vocab_size"]
            results.append(NetworkResult(name, key, runs, ms, ratio, size, tuple(folders)))
    if not results:
        raise InputError(f"{run}: none of its runs has finished; continue it with python -m nas.compare")
    metric = choose_metric(results)
    return results[:1] + sorted(results[1:], key=lambda result: result.losses(metric).mean())


def choose_metric(results: list[NetworkResult]) -> Metric:
    """Word perplexity if it is comparable in all runs, else bits per byte."""
    splits = (run[split] for result in results for run in result.runs for split in ("valid", "test"))
    return WORD_PERPLEXITY if all(split["word_perplexity_comparable"] for split in splits) else BITS_PER_BYTE
