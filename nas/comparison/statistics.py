"""Statistics of a comparison: t-tests of losses, and which patterns dominate another."""

import math

import numpy as np

from nas.comparison.results import Metric, PatternResult

CONFIDENCE = 0.95


def t_test(one: np.ndarray, two: np.ndarray, paired: bool) -> dict:
    """Student's two-sided t-test of two means: their difference (one - two), its interval, and p.

    The interval and p are None if a sample has fewer than two values, or if nothing varies.

    Args:
        paired: whether one[i] and two[i] belong to the same seed; else Welch's test, which allows unequal variances.
    """
    result = {"difference": float(one.mean() - two.mean()), "low": None, "high": None, "p": None}
    if min(len(one), len(two)) < 2 or ((one - two).std() if paired else one.std() + two.std()) < 1e-12:
        return result
    from scipy import stats  # this import takes half a second

    test = stats.ttest_rel(one, two) if paired else stats.ttest_ind(one, two, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
    return result | {"low": float(interval.low), "high": float(interval.high), "p": float(test.pvalue)}


def common_seeds(results: list[PatternResult]) -> list[int] | None:
    """The seeds that all results share; None if there are fewer than two."""
    shared = sorted(set.intersection(*(set(result.seeds) for result in results)))
    return shared if len(shared) > 1 else None


def compare_losses(one: PatternResult, two: PatternResult, metric: Metric) -> tuple[dict, str]:
    """The t_test of two patterns, and the name of the test.

    Runs with the same seed have the same initial embedding and the same batches, so they are compared in pairs.
    """
    seeds = common_seeds([one, two])
    test = t_test(one.losses(metric, seeds), two.losses(metric, seeds), paired=seeds is not None)
    return test, "paired by seed" if seeds else "Welch"


def compare_with_average(
    result: PatternResult, random: list[PatternResult], metric: Metric
) -> tuple[dict, np.ndarray, float]:
    """The t_test of a pattern against the average random pattern; the random means [R]; the pattern's mean.

    It is Welch's test of two samples: the pattern's losses, one for each of its seeds, and the random patterns' losses,
    one for each pattern. A random pattern's loss is its mean over its seeds; it may have a single seed.
    If all share at least two seeds, only these count. Then the effect that a seed has on the average random pattern is
    subtracted from the pattern's loss with that seed.
    """
    seeds = common_seeds([result, *random])
    losses, own = [other.losses(metric, seeds) for other in random], result.losses(metric, seeds)
    means = np.array([loss.mean() for loss in losses])
    seed_effect = np.mean(losses, axis=0) - means.mean() if seeds else 0.0
    return t_test(own - seed_effect, means, paired=False), means, float(own.mean())


def chance_of_better_draw(loss: float, random: np.ndarray) -> float | None:
    """The probability that one more random pattern has at most this loss, if their losses are normal.

    It follows from Student's t of the distance to their mean, in standard errors of a single prediction.
    """
    if len(random) < 2 or random.std() < 1e-12:
        return None
    from scipy import stats

    distance = (loss - random.mean()) / (random.std(ddof=1) * math.sqrt(1 + 1 / len(random)))
    return float(stats.t.cdf(distance, len(random) - 1))


def dominating(result: PatternResult, results: list[PatternResult], metric: Metric) -> list[PatternResult]:
    """The results that are at least as fast and have at most its mean loss, and are better in one of the two."""
    if result.latency is None:
        return []
    own, found = (result.latency_ratio, result.losses(metric).mean()), []
    for other in results:
        if other.latency is not None:
            point = other.latency_ratio, other.losses(metric).mean()
            if point[0] <= own[0] and point[1] <= own[1] and point != own:
                found.append(other)
    return found
