"""Results of a comparison, and claims: the control against each other network, with a verdict and evidence."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nas.comparison.spec import SETTINGS
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.outcome import predictor_ms
from nas.core.run_folder import PROVENANCE, RESULTS

LATENCIES = "latencies.yaml"  # {"networks": {key: milliseconds for 1,000 bytes}, "holds_for": conditions}


@dataclass(frozen=True)
class Metric:
    """The metric that ranks networks. Tests and intervals use its loss in nats per word, or per byte."""

    name: str
    key: str  # in results.yaml
    exponential: bool  # whether the metric is exp(loss); else it is the loss in bits
    digits: int  # decimals in tables

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
    """A contender with the results of its runs, one per seed."""

    name: str
    key: str  # the name of its network
    runs: list[dict]  # the content of each run's results.yaml; its metrics are those of the mixture, if there is one
    latency: float  # milliseconds for 1,000 bytes of text
    ratio: float  # of its latency to that of the control
    vocab_size: int  # entries of its vocabulary
    folders: tuple[Path, ...] = ()  # the run folders, in the order of `runs`

    @property
    def blocks(self) -> list[str]:
        return self.runs[0]["pattern"]

    def values(self, metric: Metric, split: str = "test") -> np.ndarray:
        """The metric of each seed [S]."""
        return np.array([run[split][metric.key] for run in self.runs])

    def network_values(self, metric: Metric) -> np.ndarray | None:
        """The metric of the network alone on test [S]; None if it is the predictor, or if there is no network."""
        if not all(run["network"] and run["mixture"] for run in self.runs):
            return None
        return np.array([run["network"]["test"][metric.key] for run in self.runs])

    def losses(self, metric: Metric) -> np.ndarray:
        """The loss of each seed [S] on test, in nats."""
        values = self.values(metric)
        return np.log(values) if metric.exponential else values * math.log(2)


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
            measured = {"ms_per_1000_bytes": latencies[key]} if key in latencies else runs[0]["latency"]
            ms = predictor_ms(runs[0] | {"latency": measured})
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


CLAIMS_FORMAT, CONFIDENCE = "par-claims/5", 0.95
UNEQUAL = 0.01  # p of Bartlett's test, below which variances differ
UNTRAINED = 1 / 4  # perplexity per token on valid over the size of the vocabulary; more means hardly any training


def read_claims(run: Path, results: list[NetworkResult]) -> list[dict]:
    """The claims of a run folder; none if no run of the control has finished. results: of read_results()."""
    settings = read_yaml(run / SETTINGS)
    return make_claims(results, settings["margin"]) if results[0].name == next(iter(settings["patterns"])) else []


def make_claims(results: list[NetworkResult], margin: float) -> list[dict]:
    """[{"pattern", "verdict", "sentence", "evidence"}] of the control, which is the first result, against each other.

    Results of one network under several names are one sample. margin: relative, of the metric.
    """
    metric, (control, *others) = choose_metric(results), results
    samples = {other.key: other.losses(metric) for other in others if other.key != control.key}
    found = dict(zip(samples, dunnett(control.losses(metric), [*samples.values()]), strict=True))
    largest = float(np.log1p(margin) if metric.exponential else margin * control.losses(metric).mean())
    claims = []
    for other, test in ((other, found[other.key]) for other in others if other.key in found):
        verdict = verdict_of(test, largest)
        values = f"{metric.format(control.values(metric))} against {metric.format(other.values(metric))}"
        sentence = f"{control.name} against {other.name}: {verdict}. {metric.name} {values} on test "
        sentence += f"({len(control.runs)} and {len(other.runs)} seeds), {describe(test, metric)}, "
        sentence += f"at {1 / other.ratio:.2f} of its latency."
        evidence = {"metric": metric.name, "ratio": 1 / other.ratio, "margin": margin, **test}
        claims.append({"pattern": other.name, "verdict": verdict, "sentence": sentence, "evidence": evidence})
    return claims


def verdict_of(test: dict, margin: float) -> str:
    """The verdict of a test of losses. margin: a greater loss that still counts as no worse."""
    if test["p"] is None:
        return "not shown"
    if test["p"] < 1 - CONFIDENCE:
        return "better" if test["loss_difference"] < 0 else "worse"
    return "no worse" if test["interval"][1] < margin else "not shown"


def describe(test: dict, metric: Metric) -> str:
    """A test of losses in words, as a change of the metric."""
    text = metric.format_difference(test["loss_difference"])
    if test["p"] is None:
        return f"{text}, not tested"
    low, high = map(metric.format_difference, test["interval"])
    p = f"p = {test['p']:.3f}" if test["p"] >= 0.001 else "p < 0.001"
    return f"{text}, {CONFIDENCE:.0%} interval {low} to {high}, {p}"


def spread_notice(results: list[NetworkResult]) -> str | None:
    """A notice if the variances of the networks differ (Bartlett's test), which Dunnett's test does not allow for."""
    samples = {one.key: one.losses(choose_metric(results)) for one in results if len(one.runs) > 1}
    if len(samples) < 2 or min(sample.std() for sample in samples.values()) < 1e-12:
        return None
    from scipy import stats

    p = float(stats.bartlett(*samples.values()).pvalue)
    differ = f"networks differ in their spread over seeds (p = {p:.2g})"
    return f"NOTICE: {differ}, so p and intervals may be too small or too large." if p < UNEQUAL else None


def notices(results: list[NetworkResult]) -> list[str]:
    """What limits the evidence of a comparison."""
    return [text for text in (training_warning(results), spread_notice(results)) if text]


def training_warning(results: list[NetworkResult]) -> str | None:
    """A warning that names the networks whose mean perplexity per token on valid shows hardly any training."""
    own = {r.name: [(run["network"] or run)["valid"]["perplexity"] / r.vocab_size for run in r.runs] for r in results}
    if not (untrained := [name for name, shares in own.items() if np.mean(shares) > UNTRAINED]):
        return None
    why = "The perplexity per token on valid is above a quarter of the vocabulary's size, so the claims mean little"
    return f"WARNING: hardly trained: {', '.join(untrained)}. {why}; train for more steps."


def dunnett(control: np.ndarray, others: list[np.ndarray]) -> list[dict]:
    """Dunnett's two-sided test of each other mean against the control's (Dunnett 1955), with a pooled variance.

    For each one: the difference control - other, its interval [low, high], which holds for all at once, and p. Interval
    and p are None if no sample has two values, or if nothing varies. One value is enough for the others.
    """
    results = [{"loss_difference": float(control.mean() - one.mean()), "interval": None, "p": None} for one in others]
    if not others or max(sample.std() for sample in (control, *others)) < 1e-12:
        return results
    from scipy import stats  # this import takes half a second

    test = stats.dunnett(*others, control=control, rng=0)
    limits = test.confidence_interval(CONFIDENCE)  # of other - control
    for result, low, high, p in zip(results, limits.low, limits.high, test.pvalue, strict=True):
        result |= {"interval": [-float(high), -float(low)], "p": float(p)}
    return results
