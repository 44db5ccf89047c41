"""All figures, with matplotlib set to work without a display."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import imageio.v3 as imageio
import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from scipy.special import entr

from models.operations.registry import OPERATIONS
from nas.comparison.results import NetworkResult, choose_metric, mean_and_standard_error
from nas.core.files import atomic_write
from nas.core.outcome import TIED_MARGIN
from nas.core.pattern import abbreviate, unit_of

matplotlib.use("Agg")

LIGHTER = 0.4  # share of white that is added for each further size of an operation
RED, BLUE, NAVY, GREY = "#c8553d", "#2f6690", "#1d3557", "#9aa5b1"


def colours_of(blocks: list[str]) -> dict[str, str]:
    """A colour for each different block. Sizes of one operation have lighter and lighter shades of its colour."""
    found, seen = {}, Counter()
    for block in sorted(set(blocks), key=lambda block: (len(block), block)):  # dense, dense 8x, dense 16x
        name = block.split()[0]
        colour = np.array(to_rgb(OPERATIONS[name].colour))
        found[block] = to_hex(1 - (1 - colour) * (1 - LIGHTER) ** seen[name])
        seen[name] += 1
    return found


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """(figure, axes). width and height are in inches."""
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)


def tidy(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # names in other scripts
        figure.savefig(file, dpi=130, facecolor="white", format=path.suffix[1:])
    plt.close(figure)


# Colour, line and marker of the splits in metrics.jsonl
STYLES = {"train": (GREY, "-", None), "valid": (BLUE, "-", "o"), "test": (RED, "", "D")}


def learning_curves(metrics: list[dict], path: Path) -> None:
    """nll per token over training tokens, for each split. metrics: the lines of metrics.jsonl.

    The y axis shows the last four fifths of each line; a note says if earlier values, which may be high, lie outside.
    """
    figure, axes = new_figure(6, 3.4)
    for split, (colour, line, marker) in STYLES.items():
        points = [(entry["tokens"], entry["nll"]) for entry in metrics if entry["split"] == split]
        if points:
            marker = marker or ("." if len(points) == 1 else None)  # a line of one point is invisible
            style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
            axes.plot(*zip(*points, strict=True), label=split, **style)
    lines = [list(line.get_ydata()) for line in axes.lines]
    low, high = min(map(min, lines)), max(max(nlls[len(nlls) // 5 :]) for nlls in lines)
    margin = 0.05 * (high - low + 0.1)
    axes.set_ylim(low - margin, high + margin)
    if max(map(max, lines)) > high + margin:
        axes.set_title("first steps outside", loc="left", fontsize=8, color="#52606d")
    millions = axes.dataLim.x1 >= 2e6
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if millions else f"{value / 1e3:g}k")
    axes.set(xlabel="training tokens", ylabel="nll (nats per token)")
    axes.legend(frameon=False)
    tidy(axes)
    save(figure, path)


PART_COLOURS = {"network": "#9db8d2", "states": "#d9a5b3", "cache": "#e9c46a", "counts": "#a3c9a8"}


def gains_figure(results: dict, path: Path) -> None:
    """Bits per byte on test of the network alone, with the cache, and of the mixture. results: of results.yaml."""
    mixture = results["mixture"]
    steps = {"network alone": results["network"]["test"], "+ caches": mixture.get("test_without_counts")}
    steps["+ counts: the mixture" if mixture["parts"][-1] == "counts" else "the mixture"] = results["test"]
    bars = {name: metrics["bits_per_byte"] for name, metrics in steps.items() if metrics}
    figure, axes = new_figure(6, 0.8 + 0.4 * len(bars))
    colours = [PART_COLOURS[part] for part in ("network", "cache", "counts")[: len(bars)]]
    drawn = axes.barh(list(bars), list(bars.values()), color=colours)
    axes.bar_label(drawn, fmt="%.4f", padding=3, fontsize=9)
    axes.set(xlabel="bits per byte on test")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


SHOWN = 2.5  # networks without trials are shown up to this many times the distance of the reference


def networks_figure(choice: dict, trained: list[tuple[str, float, float]], path: Path) -> None:
    """Draw the predicted losses of networks over their costs, the trials, the budget, the reference and the choice.

    Without a trained network, losses are relative to that of the chosen one. Otherwise they are in bits per byte, such
    that the chosen network has that of the best trained one.
    choice: the content of choice.yaml. trained: name, cost in the unit of choice, and bits per byte on valid.
    """
    anchor = min((bits for _, _, bits in trained), default=None)

    def quality(behind: float) -> float:
        return anchor * (1 + behind) if anchor else 100 * behind

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
    for key, title, marker, colour in (("reference", "reference", "s", NAVY), ("network", "chosen", "*", RED)):
        for one in (one for one in networks if key in choice and choice[key].items() <= one.items()):
            style = {"marker": marker, "markersize": 11, "markerfacecolor": "none", "linestyle": "", "color": colour}
            label = f"{title}: {one['vocab_size']:,}, width {one['d_model']}, {abbreviate(one['blocks'])}"
            handles += axes.plot(one["cost"], quality(one["behind"]), label=label, zorder=4, **style)
    for index, (name, cost, bits) in enumerate(trained):
        style = {"marker": "D", "linestyle": "", "color": NAVY if index else RED, "zorder": 5}
        handles += axes.plot(cost, bits, label=name, **style)
    budget = choice["budget"] * choice["reference_cost"]
    axes.axvline(budget, color=GREY, linewidth=1, linestyle="--", zorder=0)
    bits = "bits per byte on valid" + " (circles: predicted)" * bool(tried)
    label = bits if anchor else "predicted loss behind that of the chosen network (%)"
    ends = [*costs, budget, *(cost for _, cost, _ in trained)]
    axes.set(xlabel=choice["unit"], ylabel=label, xlim=(0.95 * min(ends), 1.05 * max(ends)))
    behind = max(one["behind"] for one in networks if choice["reference"].items() <= one.items())
    worst = max((quality(one["behind"]) for one in networks if one["name"] in tried), default=0.0)
    top = 1.02 * max(quality(SHOWN * behind), worst, *(bits for _, _, bits in trained), 0.0)
    if behind > 0 and top < axes.get_ylim()[1]:  # the other networks would lie on each other
        axes.set_ylim(top=top)
    figure.legend(handles=handles, frameon=False, fontsize=8, loc="outside upper center", ncols=3)
    tidy(axes)
    save(figure, path)


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


MAX_FRAMES = 150  # more frames make a larger file but no smoother motion
FRAME_MS, LAST_FRAME_MS = 80, 3000
GREY_LEVELS = 18  # in a GIF
DASHES = "-", "--", ":", "-."
BEFORE = 0.15  # share of the steps in which pi changes; the figure begins this many steps before the change


def pi_history(lines: list[dict]) -> list[dict]:
    """The lines of pi.jsonl to draw: the last one before pi changes, which may be the only one, and those after it."""
    changed = next((index for index, line in enumerate(lines) if line["pi"] != lines[0]["pi"]), len(lines))
    return lines[max(0, changed - 1) :]


def choose_frames(count: int) -> list[int]:
    """At most MAX_FRAMES indices, evenly spread, including the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, MAX_FRAMES))})


class PiPicture:
    """A picture of pi: operations as rows, blocks as columns, darkness as probability.

    The probability is written on the likeliest operation of each block, unless all operations tie. show() changes only
    what differs between frames, which makes an animation fast.
    """

    def __init__(self, history: list[dict]):
        operations, blocks = history[0]["operations"], len(history[0]["pi"])
        self.anneals = len({line["temperature"] for line in history}) > 1  # trials have no temperature
        width = min(16.0, max(6.0, 1.6 + 0.62 * blocks))
        self.figure, axes = new_figure(width, 1.5 + 0.5 * len(operations), facecolor="white")
        self.image = axes.imshow(np.zeros((len(operations), blocks)), cmap="Greys", vmin=0, vmax=1, aspect="auto")
        self.title = self.figure.suptitle(" ", fontsize=9, family="monospace")
        axes.set_yticks(range(len(operations)), operations)
        axes.set_xticks(range(blocks), range(1, blocks + 1))
        axes.set_xlabel("block")
        axes.set_xticks(np.arange(-0.5, blocks), minor=True)
        axes.set_yticks(np.arange(-0.5, len(operations)), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        self.numbers = [axes.text(i, 0, "", ha="center", va="center", fontsize=9) for i in range(blocks)]

    def show(self, line: dict) -> None:
        pi = np.array(line["pi"])
        self.image.set_data(pi.T)
        for index, (text, row) in enumerate(zip(self.numbers, pi, strict=True)):
            best, tie = int(row.argmax()), len(row) > 1 and np.ptp(row) < TIED_MARGIN
            number = "" if tie else f"{row[best]:.2f}".lstrip("0")
            text.set(x=index, y=best, text=number, color="white" if row[best] > 0.55 else "black")
        temperature = f"   temperature {line['temperature']:.3f}" if self.anneals else ""
        self.title.set_text(f"step {line['step']:>7,}{temperature}   entropy {entr(pi).sum(axis=1).mean():.3f}")

    def pixels(self) -> np.ndarray:
        """The picture [height, width], uint8, in few levels of grey, which make a small and sharp GIF."""
        self.figure.canvas.draw()
        red = np.asarray(self.figure.canvas.buffer_rgba())[..., 0]  # the three channels of grey are equal
        return np.round(red / 255 * (GREY_LEVELS - 1)).astype(np.uint8) * np.uint8(255 // (GREY_LEVELS - 1))


def animate(history: list[dict], path: Path) -> int:
    """Write a history as a GIF that pauses on its last frame. Returns the number of frames."""
    picture, frames = PiPicture(history), []
    for index in choose_frames(len(history)):
        picture.show(history[index])
        frames.append(picture.pixels())
    plt.close(picture.figure)
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS] if frames[1:] else LAST_FRAME_MS
    with atomic_write(path) as file:
        imageio.imwrite(file, np.stack(frames), extension=".gif", duration=durations, loop=0)
    return len(frames)


def final_pi(history: list[dict], path: Path) -> None:
    """A picture of pi at the last logged step."""
    picture = PiPicture(history)
    picture.show(history[-1])
    save(picture.figure, path)


def pi_over_time(history: list[dict], path: Path) -> None:
    """A chart per block with a line per operation. The end of the time before pi changes is grey."""
    pi, steps = np.array([line["pi"] for line in history]), [line["step"] for line in history]
    operations, blocks, start, last = history[0]["operations"], pi.shape[1], steps[0], steps[-1]
    colours, dashes, sizes = colours_of(operations), {}, Counter()
    for name in operations:  # a line style for each size of an operation
        dashes[name] = DASHES[sizes[name.split()[0]] % len(DASHES)]
        sizes[name.split()[0]] += 1
    before = min(start, BEFORE * max(1, last - start))  # steps to show before pi changes
    pi, steps = np.concatenate([pi[:1], pi]), [start - before, *steps]
    columns = min(blocks, 3 if blocks <= 6 else 4)
    rows = -(-blocks // columns)
    layout = {"squeeze": False, "sharex": True, "sharey": True}
    figure, grid = new_figure(1.9 * columns + 0.6, 1.5 * rows + 0.8, rows, columns, **layout)
    for axes in grid.flat[blocks:]:
        axes.set_visible(False)
    for index, axes in enumerate(grid.flat[:blocks]):
        for number, name in enumerate(operations):
            axes.plot(steps, pi[:, index, number], dashes[name], color=colours[name], linewidth=1.6)
        axes.axvspan(steps[0], start, color="#ececec", linewidth=0)
        axes.set(xlim=(steps[0], last if last > steps[0] else None), ylim=(-0.02, 1.02))
        axes.set_title(f"block {index + 1}", fontsize=9)
        axes.locator_params(axis="x", nbins=3)
        axes.tick_params(labelsize=7, labelbottom=index + columns >= blocks)  # also where no chart is below
        tidy(axes)
    note = f" (grey: only the weights train, for {start:,} steps)" if start else ""
    figure.supxlabel(f"step{note}", fontsize=9)
    figure.supylabel("probability", fontsize=9)
    handles = [Line2D([], [], linestyle=dashes[name], color=colours[name], label=name) for name in operations]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(operations), frameon=False, fontsize=9)
    save(figure, path)


def pattern_strip(blocks: list[str], path: Path) -> None:
    """The pattern as a row of coloured blocks, from input to output."""
    colours, longest = colours_of(blocks), max(len(unit_of(block)) for block in blocks)
    width = min(16.0, max(4.0, (0.43 + 0.12 * longest) * len(blocks)))
    columns = max(1, int(width / 2))  # of the legend
    figure, axes = new_figure(width, 1.2 + 0.25 * math.ceil(len(colours) / columns))
    for index, name in enumerate(blocks):
        axes.add_patch(Rectangle((index + 0.04, 0), 0.92, 1, color=colours[name]))
        shade = "black" if np.mean(to_rgb(colours[name])) > 0.62 else "white"
        style = {"color": shade, "fontsize": 11, "weight": "bold"}
        axes.text(index + 0.5, 0.5, unit_of(name), ha="center", va="center", **style)
    axes.set(xlim=(0, len(blocks)), ylim=(0, 1), yticks=[])
    axes.set_xticks(np.arange(len(blocks)) + 0.5, range(1, len(blocks) + 1))
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    names = sorted(colours, key=lambda name: list(OPERATIONS).index(name.split()[0]))
    handles = [Patch(color=colours[name], label=f"{name} ({blocks.count(name)})") for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    save(figure, path)
