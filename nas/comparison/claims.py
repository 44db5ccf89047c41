"""What a comparison's figures say: claims, each with one sentence and its evidence. Imports no torch.

A claim holds where the means say so; p and the interval say whether chance would explain it.
"""

import math
from functools import partial

import numpy as np

from nas.comparison.results import Quality, Row, mean_error, quality_of, shown
from nas.comparison.spec import RANDOM, SAME_LATENCY, SEARCHED
from nas.core.pattern import ATTENDING, abbreviate, interleaved

CLAIMS_FORMAT = "par-claims/1"


AIMED_RATIO = 0.65  # of the interleaved pattern's latency (arXiv 2009.04534, abstract: 35% less)


CONFIDENCE = 0.95


def t_test(one: np.ndarray, two: np.ndarray, paired: bool, alternative: str = "two-sided") -> dict:
    """Student's t-test that two means differ: difference (one - two), its two-sided interval, p; the last two None
    where nothing varies or there are too few values.

    paired: the values belong together, by seed; else Welch's, which takes no equal variances.
    """
    about = {"difference": float(one.mean() - two.mean()), "low": None, "high": None, "p": None}
    if min(len(one), len(two)) < 2 or ((one - two).std() if paired else one.std() + two.std()) < 1e-12:
        return about
    from scipy import stats  # takes half a second to import

    test = partial(stats.ttest_rel, one, two) if paired else partial(stats.ttest_ind, one, two, equal_var=False)
    interval, p = test().confidence_interval(CONFIDENCE), float(test(alternative=alternative).pvalue)
    return about | {"low": float(interval.low), "high": float(interval.high), "p": p}


def common_seeds(rows: list[Row]) -> list[int]:
    """Those that all have, where they are at least two; else none."""
    shared = sorted(set.intersection(*(set(row.seeds) for row in rows)))
    return shared if len(shared) > 1 else []


def compare_losses(row: Row, other: Row, quality: Quality) -> tuple[dict, str]:
    """t_test of two contenders, and its name. Runs of one seed begin with the same embedding and read the same batches,
    so what a seed does to one it does to the other: they are paired, over the seeds that both have."""
    seeds = common_seeds([row, other])
    if seeds:
        return t_test(row.losses(quality, seeds), other.losses(quality, seeds), paired=True), "paired by seed"
    return t_test(row.losses(quality), other.losses(quality), paired=False), "Welch"


def chance_of_better_draw(loss: float, others: np.ndarray) -> float | None:
    """The chance that one more of the random patterns, taken as normal, has at most this loss: Student's t of the
    distance to their mean, in standard errors of a single prediction."""
    if len(others) < 2 or others.std() < 1e-12:
        return None
    from scipy import stats

    distance = (loss - others.mean()) / (others.std(ddof=1) * math.sqrt(1 + 1 / len(others)))
    return float(stats.t.cdf(distance, len(others) - 1))


def dominating(row: Row, rows: list[Row], quality: Quality) -> list[Row]:
    """Who is at least as fast and as good in the mean, and one of both more so."""
    own = row.ratio, row.losses(quality).mean()
    found = []
    for other in rows:
        its = other.ratio, other.losses(quality).mean()
        if None not in (own[0], its[0]) and its[0] <= own[0] and its[1] <= own[1] and its != own:
            found.append(other)
    return found


def p_words(p: float | None) -> str:
    return "no p-value" if p is None else f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def find_interleaved(rows: list[Row]) -> Row | None:
    """Whatever it is called; not one whose d_ffn was changed."""
    for row in rows:
        if row.contender.blocks == interleaved(len(row.contender.blocks)) and row.contender.d_ffn is None:
            return row
    return None


def make_claims(rows: list[Row]) -> list[dict]:
    """A claim for each question that can be answered: what it is about, whether it holds, one sentence, its figures."""
    quality, usual, claims = quality_of(rows), find_interleaved(rows), []
    drawn = [row for row in rows if row.contender.kind == RANDOM]
    # A budget may lead to the same pattern as argmax: it is claimed about once.
    searched = {row.contender.key: row for row in reversed(rows) if row.contender.kind == SEARCHED}
    for row in reversed(searched.values()):
        found = []
        if usual:
            found += [claim_quality(row, usual, quality), claim_attention(row, usual)]
        if row.ratio is not None:
            found += [claim_latency(row), claim_front(row, rows, quality)]
        # The random patterns were drawn at the latency of argmax; another searched one may have it too.
        theirs = latency_of_drawn(row, drawn) if drawn else None
        if drawn and (row.contender.name == SEARCHED or theirs):
            found.append(claim_random(row, drawn, quality, theirs or "drawn at its latency, which is not theirs here"))
            if usual and theirs:
                found.append(claim_aim(row, usual, drawn, quality))
        found.append(claim_cost(row))
        claims += [{"pattern": row.contender.name, **claim} for claim in found]
    return claims


def claim(words: str, holds: bool, sentence: str, **figures) -> dict:
    return {"claim": words, "holds": bool(holds), "sentence": sentence, "figures": figures}


def claim_quality(row: Row, usual: Row, quality: Quality) -> dict:
    test, kind = compare_losses(row, usual, quality)
    interval = ""
    if test["p"] is None:
        verdict = "not tested"
    else:
        interval = f", {CONFIDENCE:.0%} interval {quality.change(test['low'])} to {quality.change(test['high'])}"
        clear = test["p"] < 1 - CONFIDENCE
        verdict = ("better" if test["difference"] < 0 else "worse") if clear else "no difference is shown"
    sentence = (
        f"{row.contender.name} ({abbreviate(row.contender.blocks)}) reaches {quality.name} {shown(row, quality)} on "
        f"test, interleaved {shown(usual, quality)} (mean ± standard error over {len(row.seeds)} and "
        f"{len(usual.seeds)} seeds): {quality.change(test['difference'])} by mean loss{interval}, {p_words(test['p'])} "
        f"(t-test, {kind}): {verdict}."
    )
    return claim(
        f"equal or better {quality.name} than interleaved",
        test["difference"] <= 0,
        sentence,
        searched=mean_error(row.figures(quality))[0],
        interleaved=mean_error(usual.figures(quality))[0],
        loss_difference=test["difference"],
        interval=[test["low"], test["high"]],
        p=test["p"],
        verdict=verdict,
    )


def claim_latency(row: Row) -> dict:
    ratio, ms = row.ratio, row.latency["median_ms"]
    sentence = (
        f"{row.contender.name} takes {ms:.2f} ms, {ratio:.2f} of the interleaved pattern's {ms / ratio:.2f} ms: "
        f"{abs(1 - ratio):.0%} {'less' if ratio <= 1 else 'more'}."
    )
    figures = {"latency_ms": ms, "interleaved_ms": ms / ratio, "ratio": ratio}
    return claim("less latency than interleaved", ratio < 1, sentence, **figures)


def claim_attention(row: Row, usual: Row) -> dict:
    own, its = (sum(name in ATTENDING for name in about.contender.blocks) for about in (row, usual))
    change = f"{abs(1 - own / its):.0%} {'fewer' if own <= its else 'more'}"
    sentence = f"{row.contender.name} has {own} attention blocks, interleaved {its}: {change}."
    return claim("fewer attention blocks than interleaved", own < its, sentence, searched=own, interleaved=its)


def claim_front(row: Row, rows: list[Row], quality: Quality) -> dict:
    better, name = [other.contender.name for other in dominating(row, rows, quality)], row.contender.name
    sentence = f"No pattern of these is, in the mean, both as fast and as good as {name}: it is on the Pareto front."
    if better:
        verb = "is" if len(better) == 1 else "are"
        sentence = f"{', '.join(better)} {verb} at least as fast and, in the mean, as good as {name}."
    return claim("on the Pareto front", not better, sentence, dominated_by=better)


def latency_of_drawn(row: Row, drawn: list[Row]) -> str | None:
    """How the random patterns' latencies are to the searched one's, measured now: the same, within twice the
    share at which they were drawn, since both were measured twice; or more; None where one is less, or not known.
    Another device, or another d_ffn, can part what was drawn at one latency."""
    if row.ratio is None or any(other.ratio is None for other in drawn):
        return None
    ratios = [other.ratio / row.ratio for other in drawn]
    if min(ratios) < 1 - 2 * SAME_LATENCY:
        return None
    return "at the same latency" if max(ratios) <= 1 + 2 * SAME_LATENCY else "of the same latency or more"


def claim_random(row: Row, drawn: list[Row], quality: Quality, latency: str) -> dict:
    """Against the average random pattern. Each counts once, by its mean over seeds, for there could have been others.
    What each seed that all have does to the average random pattern is taken off the searched one."""
    seeds = common_seeds([row, *drawn]) or None
    losses, own = [other.losses(quality, seeds) for other in drawn], row.losses(quality, seeds)
    means = np.array([loss.mean() for loss in losses])
    by_seed = np.mean(losses, axis=0) - means.mean() if seeds else 0.0
    test = t_test(own - by_seed, means, paired=False, alternative="less")
    behind, draw = int((means > own.mean()).sum()), chance_of_better_draw(float(own.mean()), means)
    figures = [float(other.figures(quality).mean()) for other in drawn]
    ratios = [other.ratio / row.ratio for other in drawn if other.ratio and row.ratio]
    at = f"{min(ratios):.2f} to {max(ratios):.2f} times its latency" if ratios else "latencies that were not measured"
    average, error = mean_error(figures)
    spread = "" if error is None else f" ± {error:.{quality.digits}f}"
    sentence = (
        f"{row.contender.name} is better than {behind} of {len(drawn)} random patterns at {at}, which reach "
        f"{quality.name} {average:.{quality.digits}f}{spread} in the mean: {quality.change(test['difference'])} "
        f"against their average by mean loss, {p_words(test['p'])} (t-test, Welch, one-sided)"
        + ("." if draw is None else f"; a random pattern as good or better would come up with probability {draw:.2f}.")
    )
    return claim(
        f"better than the average random pattern {latency}",
        test["difference"] < 0,
        sentence,
        random_means=figures,
        better_than=behind,
        of=len(drawn),
        loss_difference=test["difference"],
        interval=[test["low"], test["high"]],
        p=test["p"],
        p_of_a_draw=draw,
        latency_to_searched=ratios,
    )


def claim_aim(row: Row, usual: Row, drawn: list[Row], quality: Quality) -> dict:
    loss = row.losses(quality).mean()
    parts = {
        f"at most {AIMED_RATIO:.0%} of the interleaved pattern's latency": row.ratio <= AIMED_RATIO,
        f"equal or better {quality.name}": bool(loss <= usual.losses(quality).mean()),
        "better than every random pattern's mean": all(bool(loss < other.losses(quality).mean()) for other in drawn),
    }
    missed = [words for words, met in parts.items() if not met]
    sentence = f"The aim ({', '.join(parts)}) is {'met' if not missed else 'missed: not ' + ', not '.join(missed)}."
    return claim("the aim", not missed, sentence, **parts)


def claim_cost(row: Row) -> dict:
    times = row.search_hours / row.train_hours
    minutes = 60 * row.search_hours
    sentence = f"Search and derivation took {minutes:.1f} minutes, {times:.1f} times one training of the pattern."
    holds, hours = row.search_hours < row.train_hours, {"search": row.search_hours, "train": row.train_hours}
    return claim("the search costs less than one training", holds, sentence, hours=hours)
