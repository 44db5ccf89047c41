"""The figure of a choice of the shape: quality over cost for the same text."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from nas.reporting.style import GREY, NAVY, RED, new_figure, save, tidy

BEYOND = 1.6  # times the larger of budget and reference: costlier shapes are not drawn


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
    figure, axes = new_figure(7.5, 5.0)
    dot = {"marker": "o", "linestyle": ""}
    handles = [Line2D([], [], color=colours[size], label=f"{size:,} pieces", **dot) for size in sizes]
    for shape in shapes:
        ring = tuple(shape[key] for key in choice["reference"]) in probed
        style = {"edgecolors": "black" if ring else "none", "color": colours[shape["vocab_size"]], "zorder": 2 + ring}
        axes.scatter(shape["cost"], quality(shape), s=34, linewidths=1.2, **style)
        ends = [quality({"behind": shape["behind"] + sign * shape.get("interval", 0)}) for sign in (-1, 1)]
        axes.plot([shape["cost"]] * 2, ends, color=colours[shape["vocab_size"]], linewidth=0.7, alpha=0.6, zorder=1)
    costs, values = zip(*sorted((shape["cost"], quality(shape)) for shape in shapes), strict=True)
    axes.step(costs, np.minimum.accumulate(values), where="post", color=GREY, linewidth=1, linestyle=":", zorder=1)
    handles += [Line2D([], [], color="black", markerfacecolor="none", label="probe", **dot)] * bool(probed)
    handles += [Line2D([], [], color=GREY, linestyle="--", label="budget")]
    for key, title, marker, colour in (("reference", "reference", "s", NAVY), ("shape", "chosen", "*", RED)):
        if key in choice:
            shape = next(one for one in choice["shapes"] if choice[key].items() <= one.items())
            style = {"marker": marker, "markersize": 11, "markerfacecolor": "none", "linestyle": "", "color": colour}
            label = f"{title} {shape['vocab_size']:,}: {shape['blocks']} x {shape['d_model']}"
            handles += axes.plot(shape["cost"], quality(shape), label=label, zorder=4, **style)
    for name, cost, words in networks:
        if words is None:
            handles.append(axes.axvline(cost, color=RED, linewidth=1, label=name, zorder=0))
        else:
            handles += axes.plot(cost, words, label=name, marker="D", linestyle="", color=RED, zorder=5)
    budget = choice["budget"] * choice["reference_cost"]
    axes.axvline(budget, color=GREY, linewidth=1, linestyle="--", zorder=0)
    trained = "word perplexity on valid" + "; of shapes, by the law" * bool(probed)
    label = trained if anchor else "loss behind that of the chosen shape, by the law (%)"
    axes.set(
        xlabel=choice["unit"], ylabel=label, xlim=(0, 1.05 * max(*costs, budget, *(cost for _, cost, _ in networks)))
    )
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper center", ncols=4)
    tidy(axes)
    save(figure, path)
