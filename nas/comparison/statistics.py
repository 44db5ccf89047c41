"""Dunnett's test of losses."""

import numpy as np

CONFIDENCE = 0.95


def dunnett(control: np.ndarray, others: list[np.ndarray]) -> list[dict]:
    """Dunnett's two-sided test of each other mean against the control's (Dunnett 1955), with a pooled variance.

    For each one: the difference control - other, its interval [low, high], which holds for all at once, and p. Interval
    and p are None if no sample has two values, or if nothing varies. One value is enough for the others.
    """
    results = [
        {"loss_difference": float(control.mean() - other.mean()), "interval": None, "p": None} for other in others
    ]
    if max(sample.std() for sample in (control, *others)) < 1e-12:
        return results
    from scipy import stats  # this import takes half a second

    test = stats.dunnett(*others, control=control, rng=0)
    limits = test.confidence_interval(CONFIDENCE)  # of other - control
    for result, low, high, p in zip(results, limits.low, limits.high, test.pvalue, strict=True):
        result |= {"interval": [-float(high), -float(low)], "p": float(p)}
    return results
