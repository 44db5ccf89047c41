"""How certain the choice of each block's operation is.

S runs (seeds of one search), O candidate operations.
"""

import math

import numpy as np

from nas.core.outcome import MARGIN, entropy, undecided_message

SIGNIFICANCE = 0.05  # of the one-tailed t-tests


def critical_t(samples: int) -> float:
    """The number of standard errors above zero at which a mean is significant; 0 for one sample.

    It is the quantile of Student's t with samples - 1 degrees of freedom.
    """
    if samples < 2:
        return 0.0
    from scipy import stats  # imported here because it takes half a second

    return float(stats.t.ppf(1 - SIGNIFICANCE, samples - 1))


def block_confidence(operations: list[str], pi: np.ndarray, chosen: int) -> dict:
    """How certain pi is about the choice for one block, in the form of pattern files.

    pi [S, O], one row per seed; chosen: index of the operation.

    margin: mean pi of the chosen operation minus that of the likeliest other, `second`. margin_error: its standard
    error over the seeds. agreement: share of the seeds whose likeliest operation is the chosen one. A lead is doubtful
    if it is below MARGIN, or not significant over the seeds. The block is undecided if the lead over some operation,
    `as_good`, is doubtful, unless pi clearly prefers another operation to the chosen one.
    """
    mean, seeds = pi.mean(axis=0), len(pi)
    record = {
        "operation": operations[chosen],
        "pi": {name: round(float(p), 6) for name, p in zip(operations, mean, strict=True)},
        "margin": round(float(mean[chosen]), 6),
        "entropy": round(float(entropy(mean)), 6),
    }
    if seeds > 1:
        record["agreement"] = round(float((pi.argmax(axis=1) == chosen).mean()), 4)
    others = sorted((index for index in range(len(operations)) if index != chosen), key=lambda index: -mean[index])
    if not others:
        return record | {"undecided": False}
    leads = pi[:, [chosen]] - pi[:, others]  # [S, O - 1], over the likeliest first
    margins = leads.mean(axis=0)
    errors = leads.std(axis=0, ddof=1) / math.sqrt(seeds) if seeds > 1 else np.zeros(len(others))
    doubtful = np.abs(margins) < np.maximum(MARGIN, critical_t(seeds) * errors)
    record |= {"margin": round(float(margins[0]), 6), "second": operations[others[0]]}
    if seeds > 1:
        record["margin_error"] = round(float(errors[0]), 6)
    if not doubtful.any() or (margins[0] < 0 and not doubtful[0]):
        return record | {"undecided": False}
    return record | {"undecided": True, "as_good": operations[others[int(doubtful.argmax())]]}


def confidence_warnings(pattern: dict) -> list[str]:
    """One message for each undecided block of a pattern file."""
    messages = []
    for number, record in enumerate(pattern["confidence"], start=1):
        if not record["undecided"]:
            continue
        first, second = sorted([record["operation"], record["as_good"]], key=lambda name: -record["pi"][name])
        message = undecided_message(number, first, second, record["pi"][first] - record["pi"][second])
        error = record.get("margin_error", 0.0)
        if error > 0 and record["as_good"] == record["second"]:
            message += f" (standard error of the lead over the seeds: {error:.3f})"
        messages.append(message)
    return messages
