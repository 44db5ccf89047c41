"""From pi to a pattern, with the figures that say how far to trust it. Imports no torch.

S runs (seeds of one search), N blocks, O candidate operations.
"""

import math

from nas.core.pattern import ATTENDING, abbreviate
from nas.derivation.confidence import verdict


def confidence_table(pattern: dict) -> str:
    """A line per block: choice, pi of every operation, margin, entropy; over seeds their agreement; and in words."""
    names = list(pattern["confidence"][0]["pi"])
    seeds = "agreement" in pattern["confidence"][0]
    head = f"{'block':>5}  {'choice':<{width(names)}}" + "".join(f"{name:>{len(name) + 2}}" for name in names)
    head += f"{'margin':>8}" + (f"{'± error':>9}{'agree':>7}" if seeds else "") + f"{'entropy':>9}  "
    rows = [head]
    for index, about in enumerate(pattern["confidence"], start=1):
        row = f"{index:>5}  {about['operation']:<{width(names)}}"
        row += "".join(f"{about['pi'][name]:>{len(name) + 2}.3f}" for name in names) + f"{about['margin']:>8.3f}"
        if seeds:
            row += f"{about.get('margin_error', 0.0):>9.3f}{about['agreement']:>7.0%}"
        rows.append(f"{row}{about['entropy']:>9.3f}  {verdict(about)}")
    return "\n".join(row.rstrip() for row in rows)


def width(names: list[str]) -> int:
    return max(map(len, names)) + 1


def removal_table(pattern: dict) -> str:
    """A line per block: nll per token on valid without each operation; the choice is the one that is missed most."""
    rows = [
        "nll per token on the beginning of valid, with one operation taken out of the SuperNet; the lead is over the"
    ]
    rows += [
        "next loss, with its standard error over parts of the text and runs. What pi says is in the table below it."
    ]
    for index, about in enumerate(pattern["confidence"], start=1):
        removal = about["removal"]
        row = f"{index:>5}  {about['operation']:<{width(list(about['pi']))}}"
        row += "  ".join(f"without {name} {nll:.4f}" for name, nll in removal["nll_without"].items())
        if "lead" in removal:
            row += f"  lead {removal['lead']:.4f} ± {removal['lead_error']:.4f}  "
            row += f"undecided: {removal['second']} as good" if removal["undecided"] else "decided"
        rows.append(row)
    return "\n".join(rows)


def pareto_table(patterns: dict[float, dict], unit: str) -> str:
    """Markdown: a row per budget, with what the pattern costs, predicted and, where it was, measured."""
    rows = [
        f"Budgets and ratios are of the interleaved pattern's cost, in {unit}.",
        "",
        "| budget | pattern | attention blocks | predicted ratio | measured ratio | predicted ms | ms | log pi |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for budget, pattern in patterns.items():
        latency = pattern.get("latency") or {}
        ratio = latency.get("predicted_ratio_to_interleaved", pattern["flops_ratio_to_interleaved"])
        score = sum(math.log(max(about["pi"][about["operation"]], 1e-300)) for about in pattern["confidence"])
        seen = [latency.get(key) for key in ("ratio_to_interleaved", "predicted_ms", "median_ms")]
        shown = ["" if value is None else f"{value:.{places}f}" for value, places in zip(seen, (3, 2, 2), strict=True)]
        cells = [
            f"{budget:g}",
            abbreviate(pattern["blocks"]),
            str(sum(name in ATTENDING for name in pattern["blocks"])),
            f"{ratio:.3f}",
        ]
        rows.append("| " + " | ".join([*cells, *shown, f"{score:.2f}"]) + " |")
    return "\n".join(rows) + "\n"
