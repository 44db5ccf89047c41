"""Claims of a comparison. Each has a name, a verdict, a sentence of evidence, and figures.

The t-test decides a claim about quality: the verdict is `yes` or `no` if p < 0.05, and else `not shown`. Other claims
have no test, and their verdict is `yes` or `no`.
"""

from collections import Counter

import numpy as np

from nas.comparison.results import Metric, PatternResult, choose_metric, mean_and_standard_error
from nas.comparison.spec import RANDOM, SAME_LATENCY, SEARCHED, is_random_of
from nas.comparison.statistics import (
    CONFIDENCE,
    chance_of_better_draw,
    compare_losses,
    compare_with_average,
    dominating,
)
from nas.core.pattern import ATTENDING, interleaved

CLAIMS_FORMAT = "par-claims/2"
YES, NO, NOT_SHOWN = "yes", "no", "not shown"
AIM_RATIO = 0.65  # of the interleaved pattern's latency (arXiv 2009.04534, abstract: 35% less)
UNTRAINED = 1 / 4  # perplexity per token on valid over the size of the vocabulary; more means hardly any training


def make_claims(results: list[PatternResult]) -> list[dict]:
    """The claims about each searched pattern: {"pattern", "claim", "verdict", "sentence", "figures"}."""
    metric, claims = choose_metric(results), []
    baseline = next((r for r in results if r.contender.blocks == interleaved(len(r.contender.blocks))), None)
    # Several budgets can give the same pattern. It then gets one set of claims, under its first name.
    searched = {result.contender.key: result for result in reversed(results) if result.contender.kind == SEARCHED}
    for result in reversed(searched.values()):
        own, random = [], find_random(result, results)
        if baseline:
            quality = claim_quality(result, baseline, metric)
            own += [quality, claim_attention(result, baseline)]
        if result.latency_ratio is not None:
            own += [claim_latency(result, baseline), claim_front(result, results, metric)]
        if random:
            latency = compare_random_latency(result, random)
            better = claim_random(result, random, metric, latency or "drawn at its latency, which differs here")
            own.append(better)
            if baseline and latency:
                own.append(claim_aim(result, quality, better, metric))
        own.append(claim_cost(result))
        claims += [{"pattern": result.contender.name, **claim} for claim in own]
    return claims


def find_random(result: PatternResult, results: list[PatternResult]) -> list[PatternResult]:
    """The random patterns that were drawn at the latency of a searched pattern."""
    random = [other for other in results if other.contender.kind == RANDOM]
    return [other for other in random if is_random_of(other.contender.name, result.contender.name)]


def make_claim(name: str, verdict: str | bool, sentence: str, **figures) -> dict:
    """verdict: YES, NO or NOT_SHOWN, or whether a claim without a test is true."""
    verdict = {True: YES, False: NO}.get(verdict, verdict)
    return {"claim": name, "verdict": verdict, "sentence": sentence, "figures": figures}


def format_p(p: float | None) -> str:
    return "no p-value" if p is None else f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def verdict_of(test: dict) -> str:
    """The verdict of a t_test of losses: whether the first is shown to be lower, or higher."""
    if test["p"] is None or test["p"] >= 1 - CONFIDENCE:
        return NOT_SHOWN
    return YES if test["difference"] < 0 else NO


def figures_of(test: dict) -> dict:
    """The figures of a t_test, as claims.yaml names them."""
    return {"loss_difference": test["difference"], "interval": [test["low"], test["high"]], "p": test["p"]}


def claim_quality(result: PatternResult, baseline: PatternResult, metric: Metric) -> dict:
    test, kind = compare_losses(result, baseline, metric)
    verdict = verdict_of(test)
    interval, outcome = "", "not tested"
    if test["p"] is not None:
        low, high = metric.format_difference(test["low"]), metric.format_difference(test["high"])
        interval = f", {CONFIDENCE:.0%} interval {low} to {high}"
        outcome = {YES: "better", NO: "worse", NOT_SHOWN: "no difference is shown"}[verdict]
    sentence = (
        f"{result.contender.name} ({result.contender.key}) reaches {metric.name} {result.format_mean(metric)} on test, "
        f"interleaved {baseline.format_mean(metric)} (mean ± standard error over {len(result.seeds)} and "
        f"{len(baseline.seeds)} seeds): {metric.format_difference(test['difference'])} by mean loss{interval}, "
        f"{format_p(test['p'])} (t-test, {kind}): {outcome}."
    )
    figures = {"searched": float(result.values(metric).mean()), "interleaved": float(baseline.values(metric).mean())}
    return make_claim(f"better {metric.name} than interleaved", verdict, sentence, **figures, **figures_of(test))


def claim_latency(result: PatternResult, baseline: PatternResult | None) -> dict:
    ratio, ms = result.latency_ratio, result.latency["median_ms"]
    interleaved_ms = baseline.latency["median_ms"] if baseline and baseline.latency else ms / ratio
    sentence = (
        f"{result.contender.name} takes {ms:.2f} ms, {ratio:.2f} of the interleaved pattern's {interleaved_ms:.2f} ms: "
        f"{abs(1 - ratio):.0%} {'less' if ratio <= 1 else 'more'}."
    )
    figures = {"latency_ms": ms, "interleaved_ms": interleaved_ms, "ratio": ratio}
    return make_claim("less latency than interleaved", ratio < 1, sentence, **figures)


def claim_attention(result: PatternResult, baseline: PatternResult) -> dict:
    """The claim counts full attention; the sentence also names the other attentions of the pattern."""
    own, other = (r.contender.blocks.count("attention") for r in (result, baseline))
    change = f"{abs(1 - own / other):.0%} {'fewer' if own <= other else 'more'}"
    sentence = f"{result.contender.name} has {own} blocks of full attention, interleaved has {other}: {change}."
    cheaper = Counter(name for name in result.contender.blocks if name in ATTENDING and name != "attention")
    if cheaper:
        sentence += f" It also has {', '.join(f'{count} of {name}' for name, count in cheaper.items())}."
    kind = "fewer blocks of full attention than interleaved"
    return make_claim(kind, own < other, sentence, searched=own, interleaved=other)


def claim_front(result: PatternResult, results: list[PatternResult], metric: Metric) -> dict:
    name, better = result.contender.name, [r.contender.name for r in dominating(result, results, metric)]
    sentence = f"No other pattern is, in the mean, both as fast and as good as {name}: it is on the Pareto front."
    if better:
        verb = "is" if len(better) == 1 else "are"
        sentence = f"{', '.join(better)} {verb} at least as fast as {name} and, in the mean, at least as good."
    return make_claim("on the Pareto front in the mean", not better, sentence, dominated_by=better)


def latency_ratios(result: PatternResult, random: list[PatternResult]) -> list[float]:
    """Latencies of random patterns over the pattern's own, where both were measured."""
    return [other.latency_ratio / result.latency_ratio for other in random if other.latency_ratio and result.latency]


def compare_random_latency(result: PatternResult, random: list[PatternResult]) -> str | None:
    """Whether random patterns have the pattern's latency, or more; None if one is faster or not measured.

    The tolerance is twice that of the draw, because each latency was measured twice.
    Latencies can differ from those of the draw on another device, or at another d_ffn.
    """
    ratios = latency_ratios(result, random)
    if len(ratios) < len(random) or min(ratios) < 1 - 2 * SAME_LATENCY:
        return None
    return "at the same latency" if max(ratios) <= 1 + 2 * SAME_LATENCY else "of the same latency or more"


def claim_random(result: PatternResult, random: list[PatternResult], metric: Metric, latency: str) -> dict:
    """Claim that the pattern is better than the average random pattern. latency: the end of the claim's name."""
    test, means, own = compare_with_average(result, random, metric)
    better_than, chance = int((means > own).sum()), chance_of_better_draw(own, means)
    values, ratios = [float(other.values(metric).mean()) for other in random], latency_ratios(result, random)
    at = f"{min(ratios):.2f} to {max(ratios):.2f} times its latency" if ratios else "latencies that were not measured"
    average, error = mean_and_standard_error(values)
    spread = "" if error is None else f" ± {error:.{metric.digits}f}"
    seeds = sorted({len(other.seeds) for other in random})
    trained = f"{' or '.join(map(str, seeds))} {'seed' if seeds == [1] else 'seeds'} each"
    sentence = (
        f"{result.contender.name} is better than {better_than} of {len(random)} random patterns at {at} ({trained}). "
        f"Their mean {metric.name} is {average:.{metric.digits}f}{spread}: "
        f"{metric.format_difference(test['difference'])} against their average by mean loss, {format_p(test['p'])} "
        "(t-test, Welch)."
    )
    if chance is not None:
        sentence += f" One more random pattern would be as good or better with probability {chance:.2f}."
    return make_claim(
        f"better than the average random pattern {latency}",
        verdict_of(test),
        sentence,
        random_means=values,
        better_than=better_than,
        of=len(random),
        **figures_of(test),
        p_of_a_draw=chance,
        latency_to_searched=ratios,
    )


def claim_aim(result: PatternResult, quality: dict, random: dict, metric: Metric) -> dict:
    """The aim, from the claims about quality and random patterns.

    A part is missed by its test or by the latency, not by means alone. The pattern is shown to be better than every
    random pattern if it is significantly better than their average and in the mean better than each.
    """
    figures, against_random = random["figures"], random["verdict"]
    if against_random == YES and figures["better_than"] < figures["of"]:
        against_random = NOT_SHOWN
    fast = YES if result.latency_ratio <= AIM_RATIO else NO
    parts = {
        f"at most {AIM_RATIO:.0%} of the interleaved pattern's latency": fast,
        f"better {metric.name}": quality["verdict"],
        "better than every random pattern": against_random,
    }
    verdict = next((kind for kind in (NO, NOT_SHOWN) if kind in parts.values()), YES)
    missed, unknown = ([part for part in parts if parts[part] == kind] for kind in (NO, NOT_SHOWN))
    details = [f"missed: not {', not '.join(missed)}"] if missed else []
    details += [f"not shown: {', '.join(unknown)}"] if unknown else []
    sentence = f"The aim ({', '.join(parts)}) is {'; '.join(details) or 'met'}."
    return make_claim("the aim", verdict, sentence, **parts)


def claim_cost(result: PatternResult) -> dict:
    times, minutes = result.search_hours / result.train_hours, 60 * result.search_hours
    sentence = f"Search and derivation took {minutes:.1f} minutes, {times:.1f} times one training of the pattern."
    hours = {"search": result.search_hours, "train": result.train_hours}
    return make_claim("the search costs less than one training", times < 1, sentence, hours=hours)


def training_warning(results: list[PatternResult]) -> str | None:
    """A warning that names the patterns whose mean perplexity per token on valid shows hardly any training."""
    untrained = []
    for result in results:
        perplexity = np.mean([run["valid"]["perplexity"] for run in result.runs])
        if result.vocab_size and perplexity > UNTRAINED * result.vocab_size:
            untrained.append(result.contender.name)
    if not untrained:
        return None
    verb, their = ("is", "its") if len(untrained) == 1 else ("are", "their")
    return (
        f"WARNING: {', '.join(untrained)} {verb} hardly trained: {their} perplexity per token on valid is above a "
        f"quarter of the {results[0].vocab_size:,} tokens of the vocabulary. The claims mean little; "
        "train for more steps."
    )
