"""Claims of a comparison: the control against each other network, with a verdict, a sentence of evidence, and figures.

Dunnett's test decides. Verdicts: `better` or `worse` if p < 0.05; `no worse` if the interval of the difference ends
below the margin of the comparison; else `not shown`.
"""

from pathlib import Path

import numpy as np

from nas.comparison.network_results import Metric, NetworkResult, choose_metric
from nas.comparison.spec import SETTINGS
from nas.core.files import read_yaml

CLAIMS_FORMAT, CONFIDENCE = "par-claims/4", 0.95
BETTER, WORSE, NO_WORSE, NOT_SHOWN = "better", "worse", "no worse", "not shown"
UNEQUAL = 0.01  # p of Bartlett's test, below which variances differ
UNTRAINED = 1 / 4  # perplexity per token on valid over the size of the vocabulary; more means hardly any training


def read_claims(run: Path, results: list[NetworkResult]) -> list[dict]:
    """The claims of a run folder; none if no run of the control has finished. results: of read_results()."""
    settings = read_yaml(run / SETTINGS)
    known = results[0].name == next(iter(settings["patterns"]))
    return make_claims(results, settings["margin"]) if known else []


def make_claims(results: list[NetworkResult], margin: float) -> list[dict]:
    """[{"pattern", "verdict", "sentence", "figures"}] of the control, which is the first result, against each other.

    Results of one network under several names are one sample. margin: relative, of the metric.
    """
    metric, (control, *others) = choose_metric(results), results
    samples = {other.key: other.losses(metric) for other in others if other.key != control.key}
    if not samples:
        return []
    found = dict(zip(samples, dunnett(control.losses(metric), [*samples.values()]), strict=True))
    largest = np.log1p(margin) if metric.exponential else margin * control.losses(metric).mean()
    claims = []
    for other in (other for other in others if other.key in found):
        test = found[other.key]
        verdict = verdict_of(test, float(largest))
        quality = f"{metric.name} {metric.format(control.values(metric))} against {metric.format(other.values(metric))}"
        seeds = f"{len(control.runs)} and {len(other.runs)} seeds"
        sentence = (
            f"{control.name} against {other.name}: {verdict}. {quality} on test ({seeds}), {describe(test, metric)}, "
            f"at {1 / other.ratio:.2f} of its latency."
        )
        figures = {"metric": metric.name, "ratio": 1 / other.ratio, "margin": margin, **test}
        claims.append({"pattern": other.name, "verdict": verdict, "sentence": sentence, "figures": figures})
    return claims


def verdict_of(test: dict, margin: float) -> str:
    """The verdict of a test of losses. margin: a greater loss that still counts as no worse."""
    if test["p"] is None:
        return NOT_SHOWN
    if test["p"] < 1 - CONFIDENCE:
        return BETTER if test["loss_difference"] < 0 else WORSE
    return NO_WORSE if test["interval"][1] < margin else NOT_SHOWN


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
    if p >= UNEQUAL:
        return None
    differ = f"networks differ in their spread over seeds (p = {p:.2g})"
    return f"NOTICE: {differ}, so p and intervals may be too small or too large."


def training_warning(results: list[NetworkResult]) -> str | None:
    """A warning that names the networks whose mean perplexity per token on valid shows hardly any training."""
    perplexities = {r.name: np.mean([run["valid"]["perplexity"] for run in r.runs]) / r.vocab_size for r in results}
    untrained = [name for name, share in perplexities.items() if share > UNTRAINED]
    if not untrained:
        return None
    return (
        f"WARNING: hardly trained: {', '.join(untrained)}. The perplexity per token on valid is above a quarter of the "
        "vocabulary's size, so the claims mean little; train for more steps."
    )


def dunnett(control: np.ndarray, others: list[np.ndarray]) -> list[dict]:
    """Dunnett's two-sided test of each other mean against the control's (Dunnett 1955), with a pooled variance.

    For each one: the difference control - other, its interval [low, high], which holds for all at once, and p. Interval
    and p are None if no sample has two values, or if nothing varies. One value is enough for the others.
    """
    results = [{"loss_difference": float(control.mean() - one.mean()), "interval": None, "p": None} for one in others]
    if max(sample.std() for sample in (control, *others)) < 1e-12:
        return results
    from scipy import stats  # this import takes half a second

    test = stats.dunnett(*others, control=control, rng=0)
    limits = test.confidence_interval(CONFIDENCE)  # of other - control
    for result, low, high, p in zip(results, limits.low, limits.high, test.pvalue, strict=True):
        result |= {"interval": [-float(high), -float(low)], "p": float(p)}
    return results
