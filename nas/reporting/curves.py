"""nas.reporting.curves."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from nas.reporting.pi_figures import save, tidy


def learning_curves(metrics: list[dict], path: Path) -> None:
    """nll per token over training tokens, for each split in metrics.jsonl."""
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    styles = {"train": ("#9aa5b1", "-", None), "valid": ("#2f6690", "-", "o"), "test": ("#c8553d", "", "D")}
    highest = []
    for split, (colour, line, marker) in styles.items():
        points = [(entry["tokens"], entry["nll"]) for entry in metrics if entry["split"] == split]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colour, linestyle=line, marker=marker, markersize=4, label=split
            )
            highest += [nll for _, nll in points[1:]] or [points[0][1]]
    axes.set(xlabel="training tokens", ylabel="nll (nats per token)")
    if highest:  # the first steps would press the rest flat
        low, high = min(highest), float(np.percentile(highest, 97))
        axes.set_ylim(low - 0.05 * (high - low + 0.1), high + 0.1 * (high - low + 0.1))
    tokens_axis(axes, max((entry["tokens"] for entry in metrics), default=0))
    axes.legend(frameon=False)
    tidy(axes)
    save(figure, path)


def tokens_axis(axes, most: int) -> None:
    millions = most >= 2e6
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if millions else f"{value / 1e3:g}k")
