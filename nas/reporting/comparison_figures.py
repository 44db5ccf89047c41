"""The figure of a comparison: quality over latency."""

from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from nas.comparison.results import PatternResult, choose_metric, mean_and_standard_error
from nas.comparison.spec import RANDOM
from nas.comparison.statistics import dominating
from nas.reporting.style import KIND_COLOURS, new_figure, save, tidy

OUTLIER = 4.0  # times the distance from the best mean to the median; points above are drawn at the upper edge


def comparison_plot(results: list[PatternResult], path: Path) -> None:
    """Mean and standard error over seeds of each contender, over its latency, with the Pareto front of the means.

    The latency is the ratio to interleaved, because milliseconds of different rounds are not comparable. If a latency
    was not measured, the x axis is FLOPs per token. Outliers are triangles at the upper edge.
    """
    metric, timed = choose_metric(results), all(result.latency for result in results)
    figure, axes = new_figure(7.5, 4.8)
    points, names = {}, {}  # by contender key, because contenders of one pattern are one point
    for result in results:
        x = result.latency_ratio if timed else result.runs[0]["flops_per_token"]
        points[result.contender.key] = x, mean_and_standard_error(result.values(metric))[0]
        names.setdefault(result.contender.key, []).append(result.contender.name)
    shown, labels = without_outliers(points), []
    highest = max(mean for _, mean in shown.values())
    for result in results:
        key, colour = result.contender.key, KIND_COLOURS[result.contender.kind]
        (x, mean), text = points[key], ", ".join(names.pop(key, []))
        if key in shown:
            error, y = mean_and_standard_error(result.values(metric))[1], mean
            axes.errorbar(x, y, yerr=error, color=colour, marker="o", markersize=6, capsize=3, linestyle="")
        else:
            y, text = highest, text and f"{text}: {mean:.{metric.digits}f}"
            axes.plot(x, y, color=colour, marker="^", markersize=8, linestyle="")
        if text and result.contender.kind != RANDOM:
            labels.append((x, y, text, colour))
    if timed:
        front = [r.contender.key for r in results if r.contender.key in shown and not dominating(r, results, metric)]
        steps = sorted({shown[key] for key in front})
        axes.step(*zip(*steps, strict=True), where="post", color="#333333", linewidth=0.8, linestyle=":", zorder=0)
    axes.set(xlabel="latency, ratio to interleaved" if timed else "FLOPs per token", ylabel=f"{metric.name} on test")
    axes.margins(0.14)
    figure.draw_without_rendering()  # place_labels needs the final positions
    place_labels(axes, labels)
    add_legend(figure, {result.contender.kind for result in results}, timed)
    tidy(axes)
    save(figure, path)


def without_outliers(points: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The points whose mean is not far above the others. Returns all points if the median equals the best mean."""
    means = [mean for _, mean in points.values()]
    best, median = min(means), np.median(means)
    if median == best:
        return points
    return {key: point for key, point in points.items() if point[1] <= best + OUTLIER * (median - best)}


def place_labels(axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Annotate points with (x, y, text, colour). A label that would overlap another is placed below its point."""
    taken = []
    for x, y, text, colour in sorted(labels, key=lambda label: -label[1]):
        position = axes.transData.transform((x, y))
        crowded = any(abs(position - other)[0] < 90 and abs(position - other)[1] < 22 for other in taken)
        offset = (7, -13) if crowded else (7, 5)
        axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=colour, fontsize=9)
        taken.append(position)


def add_legend(figure, kinds: set[str], timed: bool) -> None:
    colours = {kind: colour for kind, colour in KIND_COLOURS.items() if kind in kinds}
    handles = [Line2D([], [], color=colours[kind], marker="o", linestyle="", label=kind) for kind in colours]
    if timed:
        handles.append(Line2D([], [], color="#333333", linestyle=":", label="Pareto front of the means"))
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper center", ncols=len(handles))
