"""What a comparison's figures say: a row for each contender, claims with their evidence, tables. Imports no torch."""

import csv
import io
import math
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from nas.comparison import RANDOM, SEARCHED, Contender
from nas.errors import InputError
from nas.pattern import ATTENDING, abbreviate
from nas.record import read_yaml, write_yaml

CLAIMS_FORMAT, COMPARED_FORMAT = "par-claims/1", "par-compared/1"
AIMED_RATIO = 0.65  # of the interleaved pattern's latency (arXiv 2009.04534, abstract: 35% less)
CONFIDENCE = 0.95
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

    def of(self, results: dict, split: str) -> float:
        return results[split][self.key]

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

    @property
    def train_hours(self) -> float:
        """Mean of the seeds."""
        return float(np.mean([about["wall_time_s"] for about in self.results])) / 3600

    def figures(self, quality: Quality, split: str = "test") -> np.ndarray:
        return np.array([quality.of(about, split) for about in self.results])

    def losses(self, quality: Quality) -> np.ndarray:
        return quality.loss(self.figures(quality))

    @property
    def ratio(self) -> float | None:
        return None if self.latency is None else self.latency["ratio_to_interleaved"]


def mean_error(values) -> tuple[float, float | None]:
    """Mean and standard error; None where one value has none."""
    values = np.asarray(values, dtype=float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def write_comparison(path: Path, contenders: list[Contender], seeds: list[int], search_hours: float, latencies: dict):
    """What is compared, for read_rows; latencies: as nas.comparing.Timer.measure_once gives them, or empty."""
    times = latencies.get("patterns", {})
    listed = [{**asdict(contender), "latency": times.get(contender.key)} for contender in contenders]
    about = {"seeds": seeds, "search_hours": search_hours, "contenders": listed}
    write_yaml(path, {"format": COMPARED_FORMAT, **about, "latency_holds_for": latencies.get("holds_for")})


def known_latencies(path: Path) -> dict:
    """Those that write_comparison was given."""
    content = read_yaml(path)
    times = {contender_of(about).key: about["latency"] for about in content["contenders"]}
    return {"patterns": {k: v for k, v in times.items() if v}, "holds_for": content["latency_holds_for"]}


def contender_of(about: dict) -> Contender:
    return Contender(**{item.name: about[item.name] for item in fields(Contender)})


def read_rows(path: Path) -> list[Row]:
    """A row for every contender of which a run has finished, from what write_comparison wrote and the runs beside it.
    Raises InputError where a file is damaged, or there is no finished run."""
    content, rows = read_yaml(path), []
    if content.get("format") != COMPARED_FORMAT:
        raise InputError(f"{path} is damaged: it lacks `format: {COMPARED_FORMAT}`")
    for about in content["contenders"]:
        contender = contender_of(about)
        files = {seed: path.parent / "runs" / f"{contender.key}-{seed}" / "results.yaml" for seed in content["seeds"]}
        done = {seed: read_yaml(file) for seed, file in files.items() if file.exists()}
        if done:
            hours = content["search_hours"] if contender.kind == SEARCHED else 0.0
            rows.append(Row(contender, list(done), list(done.values()), about["latency"], hours))
    if not rows:
        raise InputError(f"{path}: none of its runs has finished")
    return rows


def quality_of(rows: list[Row]) -> Quality:
    comparable = all(
        about[split]["word_perplexity_comparable"]
        for row in rows
        for about in row.results
        for split in ("valid", "test")
    )
    return WORD_PERPLEXITY if comparable else BITS_PER_BYTE


# --- what the figures say


def t_test(one: np.ndarray, two: np.ndarray, paired: bool, alternative: str = "two-sided") -> dict:
    """Student's t-test that two means differ: difference (one - two), its two-sided interval, p; the last two None
    where nothing varies or there are too few values.

    paired: the values belong together, by seed; else Welch's, which takes no equal variances.
    """
    about = {"difference": float(one.mean() - two.mean()), "low": None, "high": None, "p": None}
    spread = (one - two).std() if paired else one.std() + two.std()
    if min(len(one), len(two)) < 2 or spread < 1e-12:
        return about
    from scipy import stats  # takes half a second to import

    test = partial(stats.ttest_rel, one, two) if paired else partial(stats.ttest_ind, one, two, equal_var=False)
    interval = test().confidence_interval(CONFIDENCE)
    return about | {
        "low": float(interval.low),
        "high": float(interval.high),
        "p": float(test(alternative=alternative).pvalue),
    }


def compare_losses(row: Row, other: Row, quality: Quality) -> tuple[dict, str]:
    """t_test of two contenders, and its name. Runs of one seed begin with the same embedding and read the same batches,
    so what a seed does to one it does to the other: where they share seeds, they are paired."""
    paired = row.seeds == other.seeds
    return t_test(row.losses(quality), other.losses(quality), paired), "paired by seed" if paired else "Welch"


def chance_of_better_draw(loss: float, others: np.ndarray) -> float | None:
    """The chance that one more of the random patterns, taken as normal, has at most this loss: Student's t of the
    distance to their mean, in standard errors of a single prediction."""
    if len(others) < 2 or others.std() == 0:
        return None
    from scipy import stats

    distance = (loss - others.mean()) / (others.std(ddof=1) * math.sqrt(1 + 1 / len(others)))
    return float(stats.t.cdf(distance, len(others) - 1))


def dominating(row: Row, rows: list[Row], quality: Quality) -> list[str]:
    """Who is at least as fast and as good in the mean, and one of both more so."""
    own = row.ratio, row.losses(quality).mean()
    found = []
    for other in rows:
        its = other.ratio, other.losses(quality).mean()
        if other.ratio is not None and its[0] <= own[0] and its[1] <= own[1] and its != own:
            found.append(other.contender.name)
    return found


def shown(row: Row, quality: Quality, split: str = "test") -> str:
    """Mean and standard error."""
    mean, error = mean_error(row.figures(quality, split))
    return f"{mean:.{quality.digits}f}" + ("" if error is None else f" ± {error:.{quality.digits}f}")


def p_words(p: float | None) -> str:
    return "no p-value" if p is None else f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def make_claims(rows: list[Row]) -> list[dict]:
    """A claim for each question that can be answered: what it is about, whether it holds, one sentence, its figures."""
    quality, claims = quality_of(rows), []
    usual = next((row for row in rows if row.contender.name == "interleaved"), None)
    drawn = [row for row in rows if row.contender.kind == RANDOM]
    # A budget may lead to the same pattern as argmax: it is claimed about once.
    searched = {row.contender.key: row for row in reversed(rows) if row.contender.kind == SEARCHED}
    for row in reversed(searched.values()):
        found = []
        if usual:
            found.append(claim_quality(row, usual, quality))
            found.append(claim_attention(row, usual))
        if row.ratio is not None:
            found.append(claim_latency(row))
            found.append(claim_front(row, rows, quality))
        if drawn and row.contender.name == SEARCHED:  # the random patterns were drawn at its latency
            found.append(claim_random(row, drawn, quality))
            if usual and row.ratio is not None:
                found.append(claim_aim(row, usual, drawn, quality))
        if usual:
            found.append(claim_cost(row))
        claims += [{"pattern": row.contender.name, **claim} for claim in found]
    return claims


def claim_quality(row: Row, usual: Row, quality: Quality) -> dict:
    test, kind = compare_losses(row, usual, quality)
    interval = ""
    if test["low"] is not None:
        interval = f", {CONFIDENCE:.0%} interval {quality.change(test['low'])} to {quality.change(test['high'])}"
    if test["p"] is None:
        verdict = "not tested"
    elif test["p"] >= 1 - CONFIDENCE:
        verdict = "no difference is shown"
    else:
        verdict = "better" if test["difference"] < 0 else "worse"
    sentence = (
        f"{row.contender.name} ({abbreviate(row.contender.blocks)}) reaches {quality.name} {shown(row, quality)} on "
        f"test, interleaved {shown(usual, quality)} (mean ± standard error over {len(row.seeds)} and "
        f"{len(usual.seeds)} seeds): {quality.change(test['difference'])}{interval}, {p_words(test['p'])} "
        f"(t-test, {kind}): {verdict}."
    )
    figures = {
        "searched": mean_error(row.figures(quality))[0],
        "interleaved": mean_error(usual.figures(quality))[0],
        "loss_difference": test["difference"],
        "interval": [test["low"], test["high"]],
        "p": test["p"],
        "verdict": verdict,
    }
    return {
        "claim": f"equal or better {quality.name} than interleaved",
        "holds": test["difference"] <= 0,
        "sentence": sentence,
        "figures": figures,
    }


def claim_latency(row: Row) -> dict:
    ratio, ms = row.ratio, row.latency["median_ms"]
    change = "less" if ratio <= 1 else "more"
    sentence = (
        f"{row.contender.name} takes {ms:.2f} ms, {ratio:.2f} of the interleaved pattern's {ms / ratio:.2f} ms: "
        f"{abs(1 - ratio):.0%} {change}."
    )
    return {
        "claim": "less latency than interleaved",
        "holds": ratio < 1,
        "sentence": sentence,
        "figures": {"latency_ms": ms, "interleaved_ms": ms / ratio, "ratio": ratio},
    }


def claim_attention(row: Row, usual: Row) -> dict:
    own, its = (sum(name in ATTENDING for name in about.contender.blocks) for about in (row, usual))
    change = f"{abs(1 - own / its):.0%} {'fewer' if own <= its else 'more'}"
    sentence = f"{row.contender.name} has {own} attention blocks, interleaved {its}: {change}."
    return {
        "claim": "fewer attention blocks than interleaved",
        "holds": own < its,
        "sentence": sentence,
        "figures": {"searched": own, "interleaved": its},
    }


def claim_front(row: Row, rows: list[Row], quality: Quality) -> dict:
    better = dominating(row, rows, quality)
    name = row.contender.name
    sentence = f"No pattern of these is, in the mean, both as fast and as good as {name}: it is on the Pareto front."
    if better:
        verb = "is" if len(better) == 1 else "are"
        sentence = f"{', '.join(better)} {verb} at least as fast and, in the mean, as good as {name}."
    return {
        "claim": "on the Pareto front",
        "holds": not better,
        "sentence": sentence,
        "figures": {"dominated_by": better},
    }


def claim_random(row: Row, drawn: list[Row], quality: Quality) -> dict:
    """Against the average random pattern. Each counts once, by its mean over seeds, for there could have been others.
    Where all share their seeds, what each seed does to the average random pattern is taken off the searched one."""
    losses, own = [other.losses(quality) for other in drawn], row.losses(quality)
    means = np.array([loss.mean() for loss in losses])
    by_seed = np.mean(losses, axis=0) - means.mean() if all(other.seeds == row.seeds for other in drawn) else 0.0
    test = t_test(own - by_seed, means, paired=False, alternative="less")
    behind, draw = int((means > own.mean()).sum()), chance_of_better_draw(float(own.mean()), means)
    figure = [float(other.figures(quality).mean()) for other in drawn]
    ratios = [other.ratio / row.ratio for other in drawn if other.ratio and row.ratio]
    at = f"{min(ratios):.2f} to {max(ratios):.2f} times its latency" if ratios else "the same latency"
    average, error = mean_error(figure)
    spread = "" if error is None else f" ± {error:.{quality.digits}f}"
    sentence = (
        f"{row.contender.name} is better than {behind} of {len(drawn)} random patterns at {at}, which reach "
        f"{quality.name} {average:.{quality.digits}f}{spread} in the mean: {quality.change(test['difference'])} "
        f"against their average, {p_words(test['p'])} (t-test, Welch, one-sided)"
        + ("." if draw is None else f"; a random pattern as good or better would come up with probability {draw:.2f}.")
    )
    figures = {
        "random_means": figure,
        "better_than": behind,
        "of": len(drawn),
        "loss_difference": test["difference"],
        "interval": [test["low"], test["high"]],
        "p": test["p"],
        "p_of_a_draw": draw,
        "latency_to_searched": ratios,
    }
    return {
        "claim": "better than the average random pattern at the same latency",
        "holds": test["difference"] < 0,
        "sentence": sentence,
        "figures": figures,
    }


def claim_aim(row: Row, usual: Row, drawn: list[Row], quality: Quality) -> dict:
    loss = row.losses(quality).mean()
    parts = {
        f"at most {AIMED_RATIO:.0%} of the interleaved pattern's latency": row.ratio <= AIMED_RATIO,
        f"equal or better {quality.name}": bool(loss <= usual.losses(quality).mean()),
        "better than every random pattern's mean": all(bool(loss < other.losses(quality).mean()) for other in drawn),
    }
    missed = [words for words, met in parts.items() if not met]
    sentence = f"The aim ({', '.join(parts)}) is {'met' if not missed else 'missed: not ' + ', not '.join(missed)}."
    return {"claim": "the aim", "holds": not missed, "sentence": sentence, "figures": parts}


def claim_cost(row: Row) -> dict:
    times = row.search_hours / row.train_hours
    sentence = f"The searches took {row.search_hours:.2f} hours, {times:.1f} times one training of the pattern."
    return {
        "claim": "the search costs less than one training",
        "holds": row.search_hours < row.train_hours,
        "sentence": sentence,
        "figures": {"search_hours": row.search_hours, "train_hours": row.train_hours},
    }


# --- tables


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
