"""The figure of a comparison: quality over latency."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from nas.comparison.network_results import NetworkResult, choose_metric, mean_and_standard_error
from nas.reporting.style import BLUE, RED, new_figure, save, tidy

OUTLIER = 4.0  # times the distance from the best mean to the median; networks above are only named,
NEAR = 0.2  # but not those that are behind the best by less than this share


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points for which no other one is as low in both coordinates, in the order of the first."""
    found = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def comparison_plot(results: list[NetworkResult], path: Path) -> None:
    """Mean and standard error over seeds of each network, over its latency, with the Pareto front of the means.

    The control, the first result, has another colour. Outliers, which would compress the rest, are only named.
    """
    metric, (figure, axes) = choose_metric(results), new_figure(7.5, 4.8)
    means = [result.values(metric).mean() for result in results]
    best, median = min(means), np.median(means)
    limit = max(best + OUTLIER * (median - best), (1 + NEAR) * best, means[0])
    labels, outliers = {}, []  # labels by point, because contenders of one network are one point
    for result in sorted(results, key=lambda result: result.latency):
        mean, error = mean_and_standard_error(result.values(metric))
        colour, point = RED if result is results[0] else BLUE, (result.latency, mean)
        if mean > limit:
            outliers.append(f"{result.name} {mean:.{metric.digits}f}")
            continue
        axes.errorbar(*point, yerr=error, color=colour, marker="o", markersize=6, capsize=3, linestyle="")
        labels.setdefault(point, ([], colour))[0].append(result.name)
    for number, (point, (names, colour)) in enumerate(labels.items()):
        offset = (7, -13) if number % 2 else (7, 5)  # neighbours alternate, so that labels do not overlap
        style = {"textcoords": "offset points", "color": colour, "fontsize": 9}
        axes.annotate(", ".join(names), point, xytext=offset, **style)
    axes.step(*zip(*front(labels), strict=True), where="post", color="#333333", linewidth=0.8, linestyle=":", zorder=0)
    if outliers:
        axes.set_title(f"outside: {', '.join(outliers)}", loc="left", fontsize=8, color="#52606d")
    axes.set(xlabel="latency, ms for 1,000 bytes of text", ylabel=f"{metric.name} on test")
    axes.margins(0.14)
    kinds = {results[0].name: RED, "others": BLUE}
    handles = [Line2D([], [], color=c, label=name, marker="o", linestyle="") for name, c in kinds.items()]
    handles.append(Line2D([], [], color="#333333", linestyle=":", label="Pareto front of the means"))
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper center", ncols=len(handles))
    tidy(axes)
    save(figure, path)
