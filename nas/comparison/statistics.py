"""Statistics of a comparison: the t-test of losses, and which patterns dominate another."""

import numpy as np

from nas.comparison.results import Metric, PatternResult

CONFIDENCE = 0.95


def t_test(one: np.ndarray, two: np.ndarray) -> dict:
    """Welch's two-sided t-test of two means: their difference (one - two), its interval [low, high], and p.

    The interval and p are None if a sample has fewer than two values, or if nothing varies.
    """
    result = {"loss_difference": float(one.mean() - two.mean()), "interval": None, "p": None}
    if min(len(one), len(two)) < 2 or one.std() + two.std() < 1e-12:
        return result
    from scipy import stats  # this import takes half a second

    test = stats.ttest_ind(one, two, equal_var=False)
    interval = [float(limit) for limit in test.confidence_interval(CONFIDENCE)]
    return result | {"interval": interval, "p": float(test.pvalue)}


def dominating(result: PatternResult, results: list[PatternResult], metric: Metric) -> list[PatternResult]:
    """The results that are at least as fast and have at most its mean loss, and are better in one of the two."""
    points = [(other, other.latency_ratio, other.losses(metric).mean()) for other in results]
    ratio, loss = result.latency_ratio, result.losses(metric).mean()
    return [other for other, x, y in points if x <= ratio and y <= loss and (x, y) != (ratio, loss)]
