"""The figure of a choice of the shape: quality over cost for the same text."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from nas.reporting.style import GREY, NAVY, RED, new_figure, save, tidy

BEYOND = 1.6  # times the larger of budget and reference: costlier shapes are not drawn
LABEL = {"textcoords": "offset points", "xytext": (6, 6), "fontsize": 8}


def shapes_figure(choice: dict, networks: list[tuple[str, float, float | None]], path: Path) -> None:
    """Draw the shapes' losses by the law over their costs, the probes, the budget, the reference and the chosen shape.

    Without a trained network, the losses are relative to that of the chosen shape. Otherwise they become word
    perplexities, such that the chosen shape has that of the best network.

    Args:
        choice: the content of choice.yaml.
        networks: name, cost for 1,000 bytes of text, and word perplexity on valid, which is None before a training.
    """
    anchor = min((words for _, _, words in networks if words), default=None)

    def quality(shape: dict) -> float:  # the logarithm of the word perplexity is proportional to the loss
        return anchor ** (1 + shape["behind"]) if anchor else 100 * shape["behind"]

    limit = BEYOND * max(1.0, choice["budget"]) * choice["reference_cost"]
    shapes = [shape for shape in choice["shapes"] if shape["cost"] <= limit]
    sizes = sorted({shape["vocab_size"] for shape in shapes})
    colours = dict(zip(sizes, plt.get_cmap("viridis_r")(np.linspace(0.1, 0.9, len(sizes))), strict=True))
    probed = {tuple(probe[key] for key in choice["reference"]) for probe in choice["probes"]}
    figure, axes = new_figure(7.5, 4.8)
    for shape in shapes:
        ring = tuple(shape[key] for key in choice["reference"]) in probed
        style = {"edgecolors": "black" if ring else "none", "color": colours[shape["vocab_size"]], "zorder": 2 + ring}
        axes.scatter(shape["cost"], quality(shape), s=34, linewidths=1.2, **style)
    costs, values = zip(*sorted((shape["cost"], quality(shape)) for shape in shapes), strict=True)
    axes.step(costs, np.minimum.accumulate(values), where="post", color=GREY, linewidth=1, linestyle=":", zorder=1)
    for key, title, marker, colour in (("reference", "reference", "s", NAVY), ("shape", "chosen", "*", RED)):
        if key not in choice:
            continue
        shape = next(one for one in choice["shapes"] if choice[key].items() <= one.items())
        point = shape["cost"], quality(shape)
        axes.scatter(*point, s=130, marker=marker, facecolors="none", edgecolors=colour, linewidths=1.6, zorder=4)
        sizes_of = f"{shape['vocab_size']:,}: {shape['blocks']} x {shape['d_model']}"
        axes.annotate(f"{title} {sizes_of}", point, color=colour, **LABEL)
    for name, cost, words in networks:
        if words is None:
            axes.axvline(cost, color=RED, linewidth=1, zorder=0)
            axes.annotate(name, (cost, 0.9), xycoords=("data", "axes fraction"), color=RED, **LABEL)
            continue
        axes.scatter(cost, words, s=50, marker="D", color=RED, zorder=5)
        axes.annotate(name, (cost, words), color=RED, **{**LABEL, "xytext": (6, -12)})
    axes.axvline(choice["budget"] * choice["reference_cost"], color=GREY, linewidth=1, linestyle="--", zorder=0)
    trained = "word perplexity on valid" + "; of shapes, by the law" * bool(probed)
    label = trained if anchor else "loss behind that of the chosen shape, by the law (%)"
    axes.set(xlabel=choice["unit"], ylabel=label)
    axes.set_xlim(0, 1.2 * max(costs))
    dot = {"marker": "o", "linestyle": ""}
    handles = [Line2D([], [], color=colours[size], label=f"{size:,} pieces", **dot) for size in sizes]
    handles += [Line2D([], [], color="black", markerfacecolor="none", label="probe", **dot)] * bool(probed)
    handles += [Line2D([], [], color=GREY, linestyle="--", label="budget")]
    handles += [Line2D([], [], color=RED, marker="D", linestyle="", label="trained")] * bool(anchor)
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper center", ncols=4)
    tidy(axes)
    save(figure, path)
