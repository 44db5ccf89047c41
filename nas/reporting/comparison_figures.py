"""Every picture: the evolution of pi as a GIF, and stills for a report. The only import of matplotlib.

History is what pi.jsonl holds, a list of {"step", "temperature", "operations", "pi": [N blocks][O operations]}.
"""

import itertools
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from nas.comparison.claims import dominating
from nas.comparison.results import Row, mean_error, quality_of
from nas.comparison.spec import GIVEN, PARAMETERS, RANDOM, SEARCHED
from nas.reporting.curves import tokens_axis
from nas.reporting.pi_figures import save, tidy

matplotlib.use("Agg")


FAR = 4.0  # times the distance from the best to the median: further up there is room for the edge alone


KIND_COLOURS = {SEARCHED: "#c8553d", GIVEN: "#2f6690", PARAMETERS: "#7b6d8d", RANDOM: "#9aa5b1"}


def comparison_plot(rows: list[Row], path: Path) -> None:
    """Quality over latency, mean and standard error over seeds for each contender, with the Pareto front of the means.

    Where latencies were not measured, over FLOPs per token. What is far worse than the rest stands at the upper edge.
    """
    quality, timed = quality_of(rows), all(row.latency for row in rows)
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    points: dict[str, tuple[float, float]] = {}
    names: dict[str, list[str]] = {}
    for row in rows:  # contenders of one pattern are one point
        across = row.latency["median_ms"] if timed else row.results[0]["flops_per_token"]
        points[row.contender.key] = across, mean_error(row.figures(quality))[0]
        names.setdefault(row.contender.key, []).append(row.contender.name)
    best, middle = min(mean for _, mean in points.values()), np.median([mean for _, mean in points.values()])
    edge = best + FAR * (middle - best)
    shown = {key: place for key, place in points.items() if place[1] <= edge} if middle > best else points
    highest = max(mean for _, mean in shown.values())
    for row in rows:
        key, colour = row.contender.key, KIND_COLOURS[row.contender.kind]
        if key in shown:
            error = mean_error(row.figures(quality))[1]
            axes.errorbar(*shown[key], yerr=error, color=colour, marker="o", markersize=6, capsize=3, linestyle="")
        else:
            axes.plot(points[key][0], highest, color=colour, marker="^", markersize=8, linestyle="")
    if timed:
        front = [row for row in rows if row.contender.key in shown and not dominating(row, rows, quality)]
        steps = sorted({shown[row.contender.key] for row in front})
        axes.step(*zip(*steps, strict=True), where="post", color="#333333", linewidth=0.8, linestyle=":", zorder=0)
    axes.set(xlabel="latency (ms)" if timed else "FLOPs per token", ylabel=f"{quality.name} on test")
    axes.margins(0.14)
    labels = []
    for row in rows:
        called = names.pop(row.contender.key, [])
        if called and row.contender.kind != RANDOM:
            across, mean = points[row.contender.key]
            far = row.contender.key not in shown
            words = ", ".join(called) + (f": {mean:.{quality.digits}f}" if far else "")
            labels.append((across, highest if far else mean, words, KIND_COLOURS[row.contender.kind]))
    figure.draw_without_rendering()  # so that the axes know where points will lie
    place_labels(axes, labels)
    kinds = [kind for kind in KIND_COLOURS if any(row.contender.kind == kind for row in rows)]
    handles = [Line2D([], [], color=KIND_COLOURS[kind], marker="o", linestyle="", label=kind) for kind in kinds]
    if timed:
        handles.append(Line2D([], [], color="#333333", linestyle=":", label="Pareto front of the means"))
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper center", ncols=len(handles))
    tidy(axes)
    save(figure, path)


def place_labels(axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Words (x, y, words, colour) beside their points; a label that would lie on another goes below its point."""
    taken = []
    for x, y, words, colour in sorted(labels, key=lambda label: -label[1]):
        place = axes.transData.transform((x, y))
        crowded = any(abs(place - other)[0] < 90 and abs(place - other)[1] < 22 for other in taken)
        offset = (7, -13) if crowded else (7, 5)
        axes.annotate(words, (x, y), xytext=offset, textcoords="offset points", color=colour, fontsize=9)
        taken.append(place)


def comparison_curves(rows: list[Row], runs: dict[str, list[list[dict]]], path: Path) -> None:
    """Training nll over tokens of each contender, mean over its seeds. runs: by name, the lines of metrics.jsonl of
    each seed."""
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    styles, late = itertools.cycle(["-", "--", "-.", ":"]), []
    for row in rows:
        name, plain = row.contender.name, row.contender.kind == RANDOM
        lines = [[(entry["tokens"], entry["nll"]) for entry in run if entry["split"] == "train"] for run in runs[name]]
        length = min(map(len, lines))
        tokens, nll = np.array([line[:length] for line in lines]).reshape(len(lines), length, 2).mean(axis=0).T
        style = {"linewidth": 0.9} if plain else {"linewidth": 1.6, "linestyle": next(styles)}
        axes.plot(tokens, nll, color=KIND_COLOURS[row.contender.kind], label=name, **style)
        late += [*nll[length // 5 :]]
    axes.set(xlabel="training tokens", ylabel="training nll (nats per token)")
    if late:  # the first steps would press the rest flat
        axes.set_ylim(min(late) - 0.05, max(late) + 0.1)
    tokens_axis(axes, max((entry["tokens"] for seeds in runs.values() for run in seeds for entry in run), default=0))
    axes.legend(frameon=False, fontsize=7, ncols=2)
    tidy(axes)
    save(figure, path)
