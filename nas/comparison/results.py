"""Results of a comparison: one PatternResult per contender, and tables of them."""

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from nas.comparison.spec import RANDOM, Contender, training_folder
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import abbreviate
from nas.core.run_folder import RESULTS

CONTENDERS_FORMAT = "par-contenders/1"
COLUMNS = (
    "name",
    "blocks",
    "seeds",
    "parameters",
    "flops_per_token",
    "latency_ms",
    "latency_ratio",
    "nll_mean",
    "nll_se",
    "valid_nll_mean",
    "word_perplexity_mean",
    "word_perplexity_se",
    "search_hours",
    "train_hours",
)


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
    path: Path,
    contenders: list[Contender],
    seeds: list[int],
    hours: dict[str, float],
    latencies: dict,
    random_seeds: list[int] | None = None,
) -> None:
    """Write the contenders file, which read_results() reads.

    Args:
        hours: search hours by the contender's name.
        latencies: from nas.comparison.timer.Timer.measure_or_reuse, or empty.
        random_seeds: the seeds of random patterns; default `seeds`.
    """
    times = latencies.get("patterns", {})
    listed = [{**asdict(c), "search_hours": hours[c.name], "latency": times.get(c.key)} for c in contenders]
    content = {"format": CONTENDERS_FORMAT, "seeds": seeds, "random_seeds": random_seeds or seeds, "contenders": listed}
    write_yaml(path, {**content, "latency_holds_for": latencies.get("holds_for")})


def read_contenders(path: Path) -> dict:
    """The content of a contenders file. Raises InputError if the file is missing or damaged."""
    content = read_yaml(path)
    if content.get("format") != CONTENDERS_FORMAT:
        raise InputError(f"{path} is damaged: it lacks `format: {CONTENDERS_FORMAT}`")
    return content


def contender_of(entry: dict) -> Contender:
    return Contender(**{item.name: entry[item.name] for item in fields(Contender)})


def known_latencies(path: Path) -> dict:
    """The `latencies` that write_contenders wrote to this file; empty if there is no file."""
    if not path.exists():
        return {}
    content = read_contenders(path)
    times = {contender_of(entry).key: entry["latency"] for entry in content["contenders"]}
    return {"patterns": {key: time for key, time in times.items() if time}, "holds_for": content["latency_holds_for"]}


def read_results(path: Path) -> list[PatternResult]:
    """A result for each contender that has a finished run. path: a file of write_contenders().

    Raises InputError if a file is damaged, or if no run has finished.
    """
    content, results = read_contenders(path), []
    vocab_size = read_yaml(path.with_name("provenance.yaml"))["vocab_size"]
    for entry in content["contenders"]:
        contender = contender_of(entry)
        seeds = content.get("random_seeds", content["seeds"]) if contender.kind == RANDOM else content["seeds"]
        folders = {seed: training_folder(path.parent, contender, seed) for seed in seeds}
        done = {seed: folder for seed, folder in folders.items() if (folder / RESULTS).exists()}
        if done:
            runs, folders = [read_yaml(folder / RESULTS) for folder in done.values()], tuple(done.values())
            times = entry["latency"], entry["search_hours"]
            results.append(PatternResult(contender, list(done), runs, *times, folders, vocab_size))
    if not results:
        raise InputError(f"{path}: none of its runs has finished")
    return results


def choose_metric(results: list[PatternResult]) -> Metric:
    """Word perplexity if it is comparable in all runs, else bits per byte."""
    splits = (run[split] for result in results for run in result.runs for split in ("valid", "test"))
    return WORD_PERPLEXITY if all(split["word_perplexity_comparable"] for split in splits) else BITS_PER_BYTE


def csv_record(result: PatternResult) -> dict:
    """A row of comparison.csv. Losses are in nats per token, on test if the name does not say valid."""
    first = result.runs[0]
    nll, nll_error = mean_and_standard_error([run["test"]["nll_per_token"] for run in result.runs])
    valid_nll, _ = mean_and_standard_error([run["valid"]["nll_per_token"] for run in result.runs])
    comparable = all(run["test"]["word_perplexity_comparable"] for run in result.runs)
    perplexity = mean_and_standard_error(result.values(WORD_PERPLEXITY)) if comparable else (None, None)
    return {
        "name": result.contender.name,
        "blocks": abbreviate(result.contender.blocks),
        "seeds": len(result.seeds),
        "parameters": first["parameters"],
        "flops_per_token": first["flops_per_token"],
        "latency_ms": result.latency and result.latency["median_ms"],
        "latency_ratio": result.latency_ratio,
        "nll_mean": nll,
        "nll_se": nll_error,
        "valid_nll_mean": valid_nll,
        "word_perplexity_mean": perplexity[0],
        "word_perplexity_se": perplexity[1],
        "search_hours": result.search_hours,
        "train_hours": result.train_hours,
    }


def csv_text(results: list[PatternResult]) -> str:
    """One line per contender. Unknown values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in map(csv_record, results):
        writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in record.items()})
    return text.getvalue()


def table_header(metric: Metric) -> list[str]:
    header = ["pattern", "blocks", f"{metric.name}, test", "valid", "seeds", "latency ms", "of interleaved"]
    return [*header, "parameters", "FLOPs per token", "hours: search + train"]


def table_cells(result: PatternResult, metric: Metric) -> list[str]:
    """The cells below table_header, without the first two."""
    first, latency = result.runs[0], result.latency
    return [
        result.format_mean(metric),
        result.format_mean(metric, "valid"),
        str(len(result.seeds)),
        "" if latency is None else f"{latency['median_ms']:.2f}",
        "" if latency is None else f"{latency['ratio_to_interleaved']:.3f}",
        f"{first['parameters']:,}",
        f"{first['flops_per_token']:,.0f}",
        f"{result.search_hours:.2f} + {result.train_hours:.2f}",
    ]


def sort_by_loss(results: list[PatternResult]) -> list[PatternResult]:
    """Lowest mean loss on test first."""
    metric = choose_metric(results)
    return sorted(results, key=lambda result: result.losses(metric).mean())


def markdown(results: list[PatternResult]) -> str:
    metric = choose_metric(results)
    header = table_header(metric)
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for result in sort_by_loss(results):
        cells = [result.contender.name, abbreviate(result.contender.blocks), *table_cells(result, metric)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
