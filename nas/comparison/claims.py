"""Claims of a comparison. Each has a pattern, a name, a verdict, a sentence of evidence, and figures.

Welch's t-test decides a claim about quality: the verdict is `yes` or `no` if p < 0.05, and else `not shown`. Other
claims have no test, and their verdict is `yes` or `no`.
"""

import numpy as np

from nas.comparison.results import Metric, PatternResult, choose_metric
from nas.comparison.spec import RANDOM, SEARCHED, is_random_of
from nas.comparison.statistics import CONFIDENCE, dominating, t_test
from nas.core.pattern import interleaved

CLAIMS_FORMAT = "par-claims/3"
YES, NO, NOT_SHOWN = "yes", "no", "not shown"
UNTRAINED = 1 / 4  # perplexity per token on valid over the size of the vocabulary; more means hardly any training


def make_claims(results: list[PatternResult]) -> list[dict]:
    """The claims about each searched pattern: {"pattern", "claim", "verdict", "sentence", "figures"}."""
    metric, claims = choose_metric(results), []
    baseline = next((r for r in results if r.contender.blocks == interleaved(len(r.contender.blocks))), None)
    searched = [result for result in results if result.contender.kind == SEARCHED]
    for result in sorted(searched, key=lambda result: result.contender.name):
        others = [other for other in results if other.contender.kind == RANDOM]
        random = [other for other in others if is_random_of(other.contender.name, result.contender.name)]
        if baseline:
            claims.append(claim_quality(result, baseline, metric))
        claims += [claim_latency(result), claim_front(result, results, metric)]
        if random:
            claims.append(claim_random(result, random, metric))
    return claims


def make_claim(result: PatternResult, claim: str, verdict: str, evidence: str, **figures) -> dict:
    """evidence: the sentence, without the pattern's name at its beginning."""
    name = result.contender.name
    sentence = f"{name} {evidence}."
    return {"pattern": name, "claim": claim, "verdict": verdict, "sentence": sentence, "figures": figures}


def verdict_of(test: dict) -> str:
    """The verdict of a t_test of losses: whether the first is shown to be lower, or higher."""
    if test["p"] is None or test["p"] >= 1 - CONFIDENCE:
        return NOT_SHOWN
    return YES if test["loss_difference"] < 0 else NO


def describe(test: dict, metric: Metric) -> str:
    """A t_test of losses in words, as a change of the metric."""
    text = f"{metric.format_difference(test['loss_difference'])} by mean loss"
    if test["p"] is None:
        return f"{text}, not tested"
    low, high = map(metric.format_difference, test["interval"])
    p = f"p = {test['p']:.3f}" if test["p"] >= 0.001 else "p < 0.001"
    return f"{text}, {CONFIDENCE:.0%} interval {low} to {high}, {p}"


def claim_quality(result: PatternResult, baseline: PatternResult, metric: Metric) -> dict:
    own, other = result.values(metric), baseline.values(metric)
    test = t_test(result.losses(metric), baseline.losses(metric))
    evidence = (
        f"reaches {metric.name} {metric.format(own)} on test, interleaved {metric.format(other)} "
        f"({len(own)} and {len(other)} seeds): {describe(test, metric)}"
    )
    figures = {"searched": float(own.mean()), "interleaved": float(other.mean()), **test}
    return make_claim(result, f"better {metric.name} than interleaved", verdict_of(test), evidence, **figures)


def claim_latency(result: PatternResult) -> dict:
    ratio, ms = result.latency_ratio, result.latency["median_ms"]
    evidence = f"takes {ms:.2f} ms, {ratio:.2f} of the interleaved pattern's latency"
    verdict = YES if ratio < 1 else NO
    return make_claim(result, "less latency than interleaved", verdict, evidence, latency_ms=ms, ratio=ratio)


def claim_front(result: PatternResult, results: list[PatternResult], metric: Metric) -> dict:
    better = [other.contender.name for other in dominating(result, results, metric)]
    evidence = f"is dominated, in mean quality and latency, by {', '.join(better) or 'no other pattern'}"
    verdict = NO if better else YES
    return make_claim(result, "on the Pareto front in the mean", verdict, evidence, dominated_by=better)


def claim_random(result: PatternResult, random: list[PatternResult], metric: Metric) -> dict:
    """A sample of the pattern's losses, one per seed, against one of the random patterns' mean losses."""
    losses, means = result.losses(metric), np.array([other.losses(metric).mean() for other in random])
    test, better_than = t_test(losses, means), int((means > losses.mean()).sum())
    values = [float(other.values(metric).mean()) for other in random]
    ratios = [other.latency_ratio / result.latency_ratio for other in random]
    evidence = (
        f"is better than {better_than} of {len(random)} random patterns at {min(ratios):.2f} to {max(ratios):.2f} "
        f"times its latency. Their mean {metric.name} is {metric.format(values)}: {describe(test, metric)} against "
        "their average"
    )
    figures = {"random_means": values, "better_than": better_than, "latency_to_searched": ratios, **test}
    return make_claim(result, "better than the average random pattern", verdict_of(test), evidence, **figures)


def training_warning(results: list[PatternResult]) -> str | None:
    """A warning that names the patterns whose mean perplexity per token on valid shows hardly any training."""
    limit = UNTRAINED * results[0].vocab_size
    untrained = [r.contender.name for r in results if np.mean([run["valid"]["perplexity"] for run in r.runs]) > limit]
    if not untrained:
        return None
    return (
        f"WARNING: hardly trained: {', '.join(untrained)}. The perplexity per token on valid is above a quarter of the "
        f"{results[0].vocab_size:,} tokens of the vocabulary, so the claims mean little; train for more steps."
    )
