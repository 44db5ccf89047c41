"""The figures of a comparison: quality over latency, and training loss over tokens."""

import itertools
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from nas.comparison.results import PatternResult, choose_metric, mean_and_standard_error
from nas.comparison.spec import RANDOM
from nas.comparison.statistics import dominating
from nas.core.run_folder import read_metrics
from nas.reporting.curves import save_curves
from nas.reporting.style import KIND_COLOURS, new_figure, save, tidy

OUTLIER = 4.0  # times the distance from the best mean to the median; patterns above are only named


def comparison_plot(results: list[PatternResult], path: Path) -> None:
    """Mean and standard error over seeds of each contender, over its latency, with the Pareto front of the means.

    The latency is the ratio to interleaved, because milliseconds of different rounds are not comparable. Outliers,
    which would compress the rest, are only named.
    """
    metric, (figure, axes) = choose_metric(results), new_figure(7.5, 4.8)
    means = [result.values(metric).mean() for result in results]
    best, median = min(means), np.median(means)
    limit = best + OUTLIER * (median - best) if median > best else max(means)
    labels, outliers, front = {}, [], []  # labels by point, because contenders of one pattern are one point
    for result in sorted(results, key=lambda result: result.latency_ratio):
        mean, error = mean_and_standard_error(result.values(metric))
        name, kind, point = result.contender.name, result.contender.kind, (result.latency_ratio, mean)
        if mean > limit:
            outliers.append(f"{name} {mean:.{metric.digits}f}")
            continue
        axes.errorbar(*point, yerr=error, color=KIND_COLOURS[kind], marker="o", markersize=6, capsize=3, linestyle="")
        if kind != RANDOM:
            labels.setdefault(point, ([], KIND_COLOURS[kind]))[0].append(name)
        if not dominating(result, results, metric):
            front.append(point)
    for number, (point, (names, colour)) in enumerate(labels.items()):
        offset = (7, -13) if number % 2 else (7, 5)  # neighbours alternate, so that labels do not overlap
        style = {"textcoords": "offset points", "color": colour, "fontsize": 9}
        axes.annotate(", ".join(names), point, xytext=offset, **style)
    axes.step(*zip(*front, strict=True), where="post", color="#333333", linewidth=0.8, linestyle=":", zorder=0)
    if outliers:
        axes.set_title(f"outside: {', '.join(outliers)}", loc="left", fontsize=8, color="#52606d")
    axes.set(xlabel="latency, ratio to interleaved", ylabel=f"{metric.name} on test")
    axes.margins(0.14)
    kinds = {result.contender.kind for result in results}
    style = {"marker": "o", "linestyle": ""}
    handles = [Line2D([], [], color=c, label=kind, **style) for kind, c in KIND_COLOURS.items() if kind in kinds]
    handles.append(Line2D([], [], color="#333333", linestyle=":", label="Pareto front of the means"))
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper center", ncols=len(handles))
    tidy(axes)
    save(figure, path)


def comparison_curves(results: list[PatternResult], path: Path) -> None:
    """Training nll over tokens of each contender, mean over its seeds."""
    figure, axes = new_figure(7, 3.8)
    styles = itertools.cycle(["-", "--", "-.", ":"])
    for result in results:
        kind, metrics = result.contender.kind, map(read_metrics, result.folders)
        runs = [[(line["tokens"], line["nll"]) for line in lines if line["split"] == "train"] for lines in metrics]
        style = {"linewidth": 0.9} if kind == RANDOM else {"linewidth": 1.6, "linestyle": next(styles)}
        axes.plot(*np.mean(runs, axis=0).T, color=KIND_COLOURS[kind], label=result.contender.name, **style)
    save_curves(figure, axes, path, fontsize=7, ncols=2)
