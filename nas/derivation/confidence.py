"""nas.derivation.confidence."""

import math

import numpy as np

TIE = 1e-6  # margins below this are a tie


# A mean of S that is below so many of its standard errors may be chance: quantiles of Student's t at 0.95, one tail,
# for S - 1 = 1, 2, ... degrees of freedom; the normal quantile beyond.
T_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


NORMAL_QUANTILE = 1.645


MAY_DIFFER = ("seed", "data.cache", "train.threads")  # between seeds of one search


def entropy(pi: np.ndarray) -> np.ndarray:
    """Entropy in nats over the last axis."""
    return -np.where(pi > 0, pi * np.log(np.where(pi > 0, pi, 1)), 0).sum(axis=-1)


def least_sure(seeds: int) -> float:
    """How many standard errors a margin over so many seeds must reach to be no chance (5%)."""
    if seeds < 2:
        return 0.0
    return T_QUANTILES[seeds - 2] if seeds - 2 < len(T_QUANTILES) else NORMAL_QUANTILE


def block_confidence(operations: list[str], pi: np.ndarray, chosen: int, least_margin: float) -> dict:
    """How sure pi is of the choice for one block. pi [S, O], a row per seed; chosen: index of the operation.

    margin: of the mean pi, the chosen operation's minus that of the likeliest other, `second`; margin_error: its
    standard error over the seeds; agreement: the share of the seeds whose own likeliest operation is the chosen one. A
    lead is doubtful where it is below least_margin, or may be chance by its error. The block is undecided where that
    over some other operation is, which is then `as_good`, unless another is clearly likelier than the chosen one.
    """
    mean, seeds = pi.mean(axis=0), len(pi)
    about = {
        "operation": operations[chosen],
        "pi": {name: round(float(p), 6) for name, p in zip(operations, mean, strict=True)},
        "margin": round(float(mean[chosen]), 6),
        "entropy": round(float(entropy(mean)), 6),
    }
    if seeds > 1:
        about["agreement"] = round(float((pi.argmax(axis=1) == chosen).mean()), 4)
    others = sorted((index for index in range(len(operations)) if index != chosen), key=lambda index: -mean[index])
    if not others:
        return about | {"undecided": False}
    leads = pi[:, [chosen]] - pi[:, others]  # [S, O - 1], over the likeliest first
    margins = leads.mean(axis=0)
    errors = leads.std(axis=0, ddof=1) / math.sqrt(seeds) if seeds > 1 else np.zeros(len(others))
    doubtful = np.abs(margins) < np.maximum(least_margin, least_sure(seeds) * errors)
    about |= {"margin": round(float(margins[0]), 6), "second": operations[others[0]]}
    if seeds > 1:
        about["margin_error"] = round(float(errors[0]), 6)
    if not doubtful.any() or (margins[0] < 0 and not doubtful[0]):
        return about | {"undecided": False}
    return about | {"undecided": True, "as_good": operations[others[int(doubtful.argmax())]]}


def removal_confidence(operations: list[str], losses: np.ndarray) -> dict:
    """How sure a choice by perturbation is. losses [R, O]: nll per token without each operation, measured R times.

    lead: what losing the chosen operation costs more than losing the next, `second`; lead_error: its standard error
    over the R measurements.
    """
    mean = losses.mean(axis=0)
    about = {"nll_without": {name: round(float(nll), 6) for name, nll in zip(operations, mean, strict=True)}}
    if len(operations) == 1:
        return about | {"undecided": False}
    second, first = np.argsort(mean)[-2:]
    leads = losses[:, first] - losses[:, second]
    error = leads.std(ddof=1) / math.sqrt(len(leads)) if len(leads) > 1 else math.inf
    return about | {
        "second": operations[second],
        "lead": round(float(leads.mean()), 6),
        "lead_error": round(float(error), 6),
        "undecided": len(leads) < 2 or bool(leads.mean() < least_sure(len(leads)) * error),
    }


def undecided_words(block: int, first: str, second: str, margin: float) -> str:
    """How a search and a derivation say that a block has no clear choice; first: the likelier."""
    if margin < TIE:
        return f"block {block} is a TIE between {first} and {second}: its operation is arbitrary"
    return f"block {block} is UNDECIDED: {first} leads {second} by only {margin:.3f}; {second} may be as good"


def confidence_warnings(pattern: dict) -> list[str]:
    """What a reader must not overlook, one sentence for each block that what chose it leaves undecided."""
    found = []
    for index, about in enumerate(pattern["confidence"], start=1):
        removal = about.get("removal")
        if removal and removal["undecided"]:
            lead = f"{removal['lead']:.4f} nats more (standard error {removal['lead_error']:.4f})"
            words = f"to lose {about['operation']} costs {lead} than to lose {removal['second']}, which may be as good"
            found.append(f"block {index} is UNDECIDED: {words}")
        elif not removal and about["undecided"]:
            names = [about["operation"], about["as_good"]]
            first, second = sorted(names, key=lambda name: -about["pi"][name])
            words = undecided_words(index, first, second, about["pi"][first] - about["pi"][second])
            error = about.get("margin_error", 0.0)
            if error > 0 and about["as_good"] == about["second"]:
                words += f" (over the seeds the lead has a standard error of {error:.3f})"
            found.append(words)
    return found


def verdict(about: dict) -> str:
    """Confidence in words, by pi."""
    if about["undecided"]:
        return f"undecided: {about['as_good']} as good"
    if about["margin"] < 0:
        return f"pi prefers {about['second']}"
    return "decided" if "agreement" in about else ""
