"""Learning curves of one run and of a comparison: nll over training tokens."""

import itertools
from pathlib import Path

import numpy as np

from nas.comparison.results import PatternResult
from nas.comparison.spec import RANDOM
from nas.core.metrics import read_metrics
from nas.reporting.style import BLUE, GREY, KIND_COLOURS, PURPLE, RED, new_figure, save, tidy

LABELS = {"heldout": "held-out, sampled paths"}  # of splits in metrics.jsonl; other labels are the names


def learning_curves(metrics: list[dict], path: Path) -> None:
    """nll per token over training tokens, for each split.

    Args:
        metrics: the lines of metrics.jsonl.
    """
    figure, axes = new_figure(6, 3.4)
    styles = {"train": (GREY, "-", None), "heldout": (PURPLE, "-", None)}
    styles |= {"valid": (BLUE, "-", "o"), "test": (RED, "", "D")}
    curves = []
    for split, (colour, line, marker) in styles.items():
        points = [(entry["tokens"], entry["nll"]) for entry in metrics if entry["split"] == split]
        if points:
            marker = marker or ("." if len(points) == 1 else None)  # a line of one point is invisible
            style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
            axes.plot(*zip(*points, strict=True), label=LABELS.get(split, split), **style)
            curves.append([nll for _, nll in points])
    axes.set(xlabel="training tokens", ylabel="nll (nats per token)")
    limit_nll(axes, curves)
    format_tokens(axes)
    axes.legend(frameon=False)
    tidy(axes)
    save(figure, path)


def comparison_curves(results: list[PatternResult], path: Path) -> None:
    """Training nll over tokens of each contender, mean over its seeds."""
    figure, axes = new_figure(7, 3.8)
    styles, curves = itertools.cycle(["-", "--", "-.", ":"]), []
    for result in results:
        name, kind, metrics = result.contender.name, result.contender.kind, map(read_metrics, result.folders)
        runs = [[(line["tokens"], line["nll"]) for line in lines if line["split"] == "train"] for lines in metrics]
        length = min(map(len, runs))
        tokens, nll = np.array([run[:length] for run in runs]).reshape(len(runs), length, 2).mean(axis=0).T
        style = {"linewidth": 0.9} if kind == RANDOM else {"linewidth": 1.6, "linestyle": next(styles)}
        axes.plot(tokens, nll, color=KIND_COLOURS[kind], label=name, **style)
        curves.append([*nll])
    axes.set(xlabel="training tokens", ylabel="training nll (nats per token)")
    limit_nll(axes, curves)
    format_tokens(axes)
    axes.legend(frameon=False, fontsize=7, ncols=2)
    tidy(axes)
    save(figure, path)


def limit_nll(axes, curves: list[list[float]]) -> None:
    """Limit the y axis to the last four fifths of each curve; a note says if earlier values lie outside.

    The first values are so high that they would compress the rest.
    """
    late = [nll for curve in curves for nll in curve[len(curve) // 5 :]]
    if not late:
        return
    low, high = min(map(min, curves)), max(late)
    margin = 0.05 * (high - low + 0.1)
    axes.set_ylim(low - margin, high + margin)
    if max(map(max, curves)) > high + margin:
        axes.set_title("first steps outside", loc="left", fontsize=8, color="#52606d")


def format_tokens(axes) -> None:
    """Label the x axis in thousands or millions."""
    millions = axes.dataLim.x1 >= 2e6
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if millions else f"{value / 1e3:g}k")
