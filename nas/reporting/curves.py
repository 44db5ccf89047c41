"""Learning curves of one run and of a comparison: nll over training tokens."""

import itertools
from pathlib import Path

import numpy as np

from nas.comparison.results import PatternResult
from nas.comparison.spec import RANDOM
from nas.reporting.style import BLUE, GREY, KIND_COLOURS, RED, new_figure, save, tidy


def learning_curves(metrics: list[dict], path: Path) -> None:
    """nll per token over training tokens, for each split.

    Args:
        metrics: the lines of metrics.jsonl.
    """
    figure, axes = new_figure(6, 3.4)
    styles = {"train": (GREY, "-", None), "valid": (BLUE, "-", "o"), "test": (RED, "", "D")}
    highest = []
    for split, (colour, line, marker) in styles.items():
        points = [(entry["tokens"], entry["nll"]) for entry in metrics if entry["split"] == split]
        if points:
            style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
            axes.plot(*zip(*points, strict=True), label=split, **style)
            highest += [nll for _, nll in points[1:]] or [points[0][1]]
    axes.set(xlabel="training tokens", ylabel="nll (nats per token)")
    if highest:  # without the first steps, which would compress the rest
        low, high = min(highest), float(np.percentile(highest, 97))
        axes.set_ylim(low - 0.05 * (high - low + 0.1), high + 0.1 * (high - low + 0.1))
    format_tokens(axes, max((entry["tokens"] for entry in metrics), default=0))
    axes.legend(frameon=False)
    tidy(axes)
    save(figure, path)


def comparison_curves(results: list[PatternResult], metrics: dict[str, list[list[dict]]], path: Path) -> None:
    """Training nll over tokens of each contender, mean over its seeds.

    Args:
        metrics: by contender name, the lines of metrics.jsonl of each seed.
    """
    figure, axes = new_figure(7, 3.8)
    styles, late = itertools.cycle(["-", "--", "-.", ":"]), []
    for result in results:
        name, kind = result.contender.name, result.contender.kind
        runs = [[(line["tokens"], line["nll"]) for line in run if line["split"] == "train"] for run in metrics[name]]
        length = min(map(len, runs))
        tokens, nll = np.array([run[:length] for run in runs]).reshape(len(runs), length, 2).mean(axis=0).T
        style = {"linewidth": 0.9} if kind == RANDOM else {"linewidth": 1.6, "linestyle": next(styles)}
        axes.plot(tokens, nll, color=KIND_COLOURS[kind], label=name, **style)
        late += [*nll[length // 5 :]]
    axes.set(xlabel="training tokens", ylabel="training nll (nats per token)")
    if late:  # without the first steps, which would compress the rest
        axes.set_ylim(min(late) - 0.05, max(late) + 0.1)
    format_tokens(axes, max((line["tokens"] for seeds in metrics.values() for run in seeds for line in run), default=0))
    axes.legend(frameon=False, fontsize=7, ncols=2)
    tidy(axes)
    save(figure, path)


def format_tokens(axes, most: int) -> None:
    """Label the x axis in thousands or millions. most: the greatest number of tokens."""
    millions = most >= 2e6
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if millions else f"{value / 1e3:g}k")
