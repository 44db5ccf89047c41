"""The figure of a search by trials: quality over cost for the same text."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from nas.core.pattern import abbreviate
from nas.reporting.style import GREY, NAVY, RED, new_figure, save, tidy

SHOWN = 2.5  # networks without trials are shown up to this many times the distance of the reference
MARKS = ("s", "reference", NAVY), ("*", "chosen", RED)


def networks_figure(choice: dict, trained: list[tuple[str, float, float]], path: Path) -> None:
    """Draw the predicted losses of networks over their costs, the trials, the budget, the reference and the choice.

    Without a trained network, losses are relative to that of the chosen one. Otherwise they become word perplexities,
    such that the chosen network has that of the best trained one.

    Args:
        choice: the content of choice.yaml.
        trained: name, cost in the unit of choice, and word perplexity on valid.
    """
    anchor = min((words for _, _, words in trained), default=None)

    def quality(behind: float) -> float:  # the logarithm of the word perplexity is proportional to the loss
        return anchor ** (1 + behind) if anchor else 100 * behind

    networks, tried = choice["networks"], {one["name"] for one in choice["trials"]}
    sizes = sorted({one["vocab_size"] for one in networks})
    colours = dict(zip(sizes, plt.get_cmap("viridis_r")(np.linspace(0.1, 0.9, len(sizes))), strict=True))
    figure, axes = new_figure(7.5, 5.0)
    dot = {"marker": "o", "linestyle": ""}
    handles = [Line2D([], [], color=colours[size], label=f"{size:,} in the vocabulary", **dot) for size in sizes]
    for one in networks:
        ring, colour = one["name"] in tried, colours[one["vocab_size"]]
        style = {"edgecolors": "black" if ring else "none", "color": colour, "zorder": 2 + ring}
        axes.scatter(one["cost"], quality(one["behind"]), s=34, linewidths=1.2, **style)
        ends = [quality(one["behind"] + sign * one["interval"]) for sign in (-1, 1)]
        axes.plot([one["cost"]] * 2, ends, color=colour, linewidth=0.7, alpha=0.6, zorder=1)
    costs, values = zip(*sorted((one["cost"], quality(one["behind"])) for one in networks), strict=True)
    frontier = {"color": GREY, "linewidth": 1, "linestyle": ":", "zorder": 1}
    axes.step(costs, np.minimum.accumulate(values), where="post", **frontier)
    handles.append(Line2D([], [], color=GREY, linestyle=":", label="best" + ", predicted" * bool(tried)))
    handles += [Line2D([], [], color="black", markerfacecolor="none", label="trial", **dot)] * bool(tried)
    handles += [Line2D([], [], color=GREY, linestyle="--", label="budget")]
    for (marker, title, colour), key in zip(MARKS, ("reference", "network"), strict=True):
        for one in (one for one in networks if key in choice and choice[key].items() <= one.items()):
            style = {"marker": marker, "markersize": 11, "markerfacecolor": "none", "linestyle": "", "color": colour}
            label = f"{title}: {one['vocab_size']:,}, width {one['d_model']}, {abbreviate(one['blocks'])}"
            handles += axes.plot(one["cost"], quality(one["behind"]), label=label, zorder=4, **style)
    for index, (name, cost, words) in enumerate(trained):
        style = {"marker": "D", "linestyle": "", "color": NAVY if index else RED, "zorder": 5}
        handles += axes.plot(cost, words, label=name, **style)
    budget = choice["budget"] * choice["reference_cost"]
    axes.axvline(budget, color=GREY, linewidth=1, linestyle="--", zorder=0)
    words = "word perplexity on valid" + " (circles: predicted)" * bool(tried)
    label = words if anchor else "predicted loss behind that of the chosen network (%)"
    ends = [*costs, budget, *(cost for _, cost, _ in trained)]
    axes.set(xlabel=choice["unit"], ylabel=label, xlim=(0.95 * min(ends), 1.05 * max(ends)))
    behind = max(one["behind"] for one in networks if choice["reference"].items() <= one.items())
    worst = max((quality(one["behind"]) for one in networks if one["name"] in tried), default=0.0)
    top = 1.02 * max(quality(SHOWN * behind), worst, *(words for _, _, words in trained), 0.0)
    if behind > 0 and top < axes.get_ylim()[1]:  # the other networks would lie on each other
        axes.set_ylim(top=top)
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper center", ncols=3)
    tidy(axes)
    save(figure, path)
