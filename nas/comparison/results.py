"""The figures of a comparison: a row for each contender, from its runs, and tables of them. Imports no torch."""

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from nas.comparison.spec import Contender, training_folder
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
    "word_perplexity_mean",
    "word_perplexity_se",
    "search_hours",
    "train_hours",
)


@dataclass(frozen=True)
class Quality:
    """The figure that compares: word perplexity where the tokens keep all words, else bits per byte.

    key: in results.yaml; exponential: whether it is exp of a loss; tests and intervals are of that loss, in nats.
    """

    name: str
    key: str
    exponential: bool
    digits: int

    def loss(self, figure: np.ndarray) -> np.ndarray:
        """Nats per word, or per byte."""
        return np.log(figure) if self.exponential else np.asarray(figure) * math.log(2)

    def change(self, loss: float) -> str:
        """A difference of losses in words."""
        return f"{math.expm1(loss):+.1%}" if self.exponential else f"{loss / math.log(2):+.4f}"


WORD_PERPLEXITY = Quality("word perplexity", "word_perplexity", True, 1)


BITS_PER_BYTE = Quality("bits per byte", "bits_per_byte", False, 4)


@dataclass(frozen=True)
class Row:
    """A contender with what its runs, one per seed, and the timing gave; latency: as nas.latency.measure_models
    gives it; None where it was not measured."""

    contender: Contender
    seeds: list[int]
    results: list[dict]
    latency: dict | None
    search_hours: float
    folders: tuple[Path, ...] = ()  # of the runs

    @property
    def train_hours(self) -> float:
        """Mean of the seeds."""
        return float(np.mean([about["wall_time_s"] for about in self.results])) / 3600

    def figures(self, quality: Quality, split: str = "test") -> np.ndarray:
        return np.array([about[split][quality.key] for about in self.results])

    def losses(self, quality: Quality, seeds: list[int] | None = None) -> np.ndarray:
        """Of all its seeds, or of some that it has."""
        losses = quality.loss(self.figures(quality))
        return losses if seeds is None else losses[[self.seeds.index(seed) for seed in seeds]]

    @property
    def ratio(self) -> float | None:
        return None if self.latency is None else self.latency["ratio_to_interleaved"]


def mean_error(values) -> tuple[float, float | None]:
    """Mean and standard error; None where one value has none."""
    values = np.asarray(values, dtype=float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def write_contenders(
    path: Path, contenders: list[Contender], seeds: list[int], hours: dict[str, float], latencies: dict
):
    """What is compared, for read_rows. hours: by name, that searching it took; latencies: as
    nas.comparing.Timer.measure_once gives them, or empty."""
    times = latencies.get("patterns", {})
    listed = [{**asdict(c), "search_hours": hours[c.name], "latency": times.get(c.key)} for c in contenders]
    about = {"seeds": seeds, "contenders": listed}
    write_yaml(path, {"format": CONTENDERS_FORMAT, **about, "latency_holds_for": latencies.get("holds_for")})


def read_contenders(path: Path) -> dict:
    """Raises InputError where the file is missing or damaged."""
    content = read_yaml(path)
    if content.get("format") != CONTENDERS_FORMAT:
        raise InputError(f"{path} is damaged: it lacks `format: {CONTENDERS_FORMAT}`")
    return content


def contender_of(about: dict) -> Contender:
    return Contender(**{item.name: about[item.name] for item in fields(Contender)})


def known_latencies(path: Path) -> dict:
    """Those that write_contenders was given; empty where there is no such file."""
    if not path.exists():
        return {}
    content = read_contenders(path)
    times = {contender_of(about).key: about["latency"] for about in content["contenders"]}
    return {"patterns": {key: time for key, time in times.items() if time}, "holds_for": content["latency_holds_for"]}


def read_rows(path: Path) -> list[Row]:
    """A row for every contender of which a run has finished, from what write_contenders wrote and the runs beside it.
    Raises InputError where a file is damaged, or no run has finished."""
    content, rows = read_contenders(path), []
    for about in content["contenders"]:
        contender = contender_of(about)
        folders = {seed: training_folder(path.parent, contender, seed) for seed in content["seeds"]}
        done = {seed: folder for seed, folder in folders.items() if (folder / RESULTS).exists()}
        if done:
            results = [read_yaml(folder / RESULTS) for folder in done.values()]
            rows.append(
                Row(contender, list(done), results, about["latency"], about["search_hours"], tuple(done.values()))
            )
    if not rows:
        raise InputError(f"{path}: none of its runs has finished")
    return rows


def shown(row: Row, quality: Quality, split: str = "test") -> str:
    """Mean and standard error."""
    mean, error = mean_error(row.figures(quality, split))
    return f"{mean:.{quality.digits}f}" + ("" if error is None else f" ± {error:.{quality.digits}f}")


def quality_of(rows: list[Row]) -> Quality:
    comparable = all(
        about[split]["word_perplexity_comparable"]
        for row in rows
        for about in row.results
        for split in ("valid", "test")
    )
    return WORD_PERPLEXITY if comparable else BITS_PER_BYTE


def table_row(row: Row) -> dict:
    """By column of comparison.csv; nll: nats per token, on test, as word perplexity."""
    first = row.results[0]
    nll, nll_error = mean_error([about["test"]["nll_per_token"] for about in row.results])
    words = all(about["test"]["word_perplexity_comparable"] for about in row.results)
    perplexity, error = mean_error(row.figures(WORD_PERPLEXITY)) if words else (None, None)
    return {
        "name": row.contender.name,
        "blocks": abbreviate(row.contender.blocks),
        "seeds": len(row.seeds),
        "parameters": first["parameters"],
        "flops_per_token": first["flops_per_token"],
        "latency_ms": row.latency and row.latency["median_ms"],
        "latency_ratio": row.ratio,
        "nll_mean": nll,
        "nll_se": nll_error,
        "word_perplexity_mean": perplexity,
        "word_perplexity_se": error,
        "search_hours": row.search_hours,
        "train_hours": row.train_hours,
    }


def csv_text(rows: list[Row]) -> str:
    """One line per contender; what is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        content = table_row(row)
        numbers = {key: f"{value:.6g}" for key, value in content.items() if isinstance(value, float)}
        writer.writerow(content | numbers)
    return text.getvalue()


def table_heads(rows: list[Row]) -> list[str]:
    heads = ["pattern", "blocks", f"{quality_of(rows).name}, test", "valid", "seeds", "latency ms", "of interleaved"]
    return [*heads, "parameters", "FLOPs per token", "hours: search + train"]


def table_cells(row: Row, quality: Quality) -> list[str]:
    """By table_heads, without name and blocks, for people."""
    first, latency = row.results[0], row.latency
    return [
        shown(row, quality),
        shown(row, quality, "valid"),
        str(len(row.seeds)),
        "" if latency is None else f"{latency['median_ms']:.2f}",
        "" if latency is None else f"{latency['ratio_to_interleaved']:.3f}",
        f"{first['parameters']:,}",
        f"{first['flops_per_token']:,.0f}",
        f"{row.search_hours:.2f} + {row.train_hours:.2f}",
    ]


def best_first(rows: list[Row]) -> list[Row]:
    """By the mean on test."""
    quality = quality_of(rows)
    return sorted(rows, key=lambda row: row.losses(quality).mean())


def markdown(rows: list[Row]) -> str:
    heads, quality = table_heads(rows), quality_of(rows)
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in best_first(rows):
        cells = [row.contender.name, abbreviate(row.contender.blocks), *table_cells(row, quality)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
