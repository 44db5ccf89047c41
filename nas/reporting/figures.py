"""All figures, with matplotlib set to work without a display."""

import math
import textwrap
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
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter
from matplotlib.transforms import Bbox

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


PHONE = 5.0  # inches: the width of a figure whose text is legible on a phone
LEAST_SPAN = 0.01  # of a value: the shortest axis of quality, which does not magnify noise


def scale(axes, values: Iterable[float]) -> None:
    """Fit the y axis to values. Few ticks on both axes, with numbers in full or, if they are large, as 20 k."""
    low, high = min(values), max(values)
    middle, span = (low + high) / 2, max(high - low, LEAST_SPAN * high) or 1.0
    axes.set_ylim(middle - 0.6 * span, middle + 0.6 * span)
    for axis, (_, end) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
        axis.set_major_formatter(EngFormatter() if end >= 1e4 else ScalarFormatter(useOffset=False))


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
    figure, axes = new_figure(PHONE, 3.2)
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


def gains_figure(results: dict, counted: dict | None, path: Path) -> None:
    """Bits per byte on test without a network, of the network alone, with the caches, and of the mixture.

    results: the content of results.yaml. counted: that of cache and counts alone, or None.
    """
    mixture = results["mixture"]
    bars = [
        ("cache and counts,\nno network", counted and counted["test"], GREY),
        ("network alone", results["network"]["test"], PART_COLOURS["network"]),
        ("+ caches", mixture.get("test_without_counts"), PART_COLOURS["cache"]),
        ("+ counts" if mixture["parts"][-1] == "counts" else "mixture", results["test"], PART_COLOURS["counts"]),
    ]
    names, metrics, colours = zip(*(bar for bar in bars if bar[1]), strict=True)
    figure, axes = new_figure(PHONE, 0.8 + 0.4 * len(names))
    drawn = axes.barh(names, [own["bits_per_byte"] for own in metrics], color=colours)
    axes.bar_label(drawn, fmt="%.4f", padding=3)
    axes.margins(x=0.18)  # for the numbers
    axes.set(xlabel="bits per byte on test")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


SHOWN = 2.5  # networks without trials are shown up to this many times the distance of the reference
LABEL, NAME = 52, 24  # characters in a line of a label, and of the name of a point


def networks_figure(choice: dict, trained: list[tuple[str, float, float]], path: Path) -> None:
    """Draw the predicted losses of networks over their costs, the trials, the budget, the reference and the choice.

    The chosen network has the bits per byte of the best trained one or, if none is trained, of its own trial.
    choice: the content of choice.yaml. trained: name, cost in the unit of choice, and bits per byte on valid.
    """
    tried_bits = [one["bits_per_byte"] for one in choice["trials"] if choice["network"].items() <= one.items()]
    anchor = min(bits for _, _, bits in trained) if trained else tried_bits[-1]

    def quality(behind: float) -> float:
        return anchor * (1 + behind)

    networks, tried = choice["networks"], {one["name"] for one in choice["trials"]}
    sizes = sorted({one["vocab_size"] for one in networks})
    colours = dict(zip(sizes, plt.get_cmap("viridis_r")(np.linspace(0.1, 0.9, len(sizes))), strict=True))
    figure, axes = new_figure(PHONE, 5.0)
    dot = {"marker": "o", "linestyle": ""}
    handles = [Line2D([], [], color=colours[size], label=f"{size:,} pieces", **dot) for size in sizes]
    for one in networks:
        ring, colour = one["name"] in tried, colours[one["vocab_size"]]
        style = {"edgecolors": "black" if ring else "none", "color": colour, "zorder": 2 + ring}
        axes.scatter(one["cost"], quality(one["behind"]), s=34, linewidths=1.2, **style)
        ends = [quality(one["behind"] + sign * one["interval"]) for sign in (-1, 1)]
        axes.plot([one["cost"]] * 2, ends, color=colour, linewidth=0.7, alpha=0.6, zorder=1)
    costs, values = zip(*sorted((one["cost"], quality(one["behind"])) for one in networks), strict=True)
    frontier = {"color": GREY, "linewidth": 1, "linestyle": ":", "zorder": 1}
    axes.step(costs, np.minimum.accumulate(values), where="post", **frontier)
    handles.append(Line2D([], [], color=GREY, linestyle=":", label="best"))
    handles += [Line2D([], [], color="black", markerfacecolor="none", label="trial", **dot)] * bool(tried)
    handles.append(Line2D([], [], color=GREY, linestyle="--", label="budget"))
    named = []
    for key, title, marker, colour in (("reference", "reference", "s", NAVY), ("network", "chosen", "*", RED)):
        for one in (one for one in networks if key in choice and choice[key].items() <= one.items()):
            style = {"marker": marker, "markersize": 11, "markerfacecolor": "none", "linestyle": "", "color": colour}
            label = f"{title}: {one['vocab_size']:,}, width {one['d_model']}, {abbreviate(one['blocks'])}"
            named += axes.plot(one["cost"], quality(one["behind"]), label=label, zorder=4, **style)
    for index, (name, cost, bits) in enumerate(trained):
        style = {"marker": "D", "linestyle": "", "color": NAVY if index else RED, "zorder": 5}
        named += axes.plot(cost, bits, label=name, **style)
    budget = choice["budget"] * choice["reference_cost"]
    axes.axvline(budget, color=GREY, linewidth=1, linestyle="--", zorder=0)
    label = "bits per byte on valid" + " (circles: predicted)" * bool(tried)
    ends = [*costs, budget, *(cost for _, cost, _ in trained)]
    axes.set(xlabel=choice["unit"], ylabel=label, xlim=(0.95 * min(ends), 1.05 * max(ends)))
    behind = max(one["behind"] for one in networks if choice["reference"].items() <= one.items())
    most = max(SHOWN * behind, 0)  # if all were shown, most would lie on each other
    shown = [quality(one["behind"]) for one in networks if one["name"] in tried or one["behind"] <= most]
    scale(axes, [*shown, *(bits for _, _, bits in trained)])
    for one in named:
        one.set_label(textwrap.fill(one.get_label(), LABEL))
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside upper center", ncols=3)
    figure.legend(handles=named, frameon=False, fontsize=9, loc="outside lower center")
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


# Of a label beside its point, in pt
PLACES = [(side, height) for height in (5, -14, 18, -27, 31, -40, 44) for side in (7, -7)]


def place_labels(axes, labels: dict[tuple[float, float], tuple[list[str], str]]) -> None:
    """Write names beside their points, where they hide no other name and no point. labels: names and colour."""
    axes.figure.draw_without_rendering()  # the layout gives the axes their size
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform([*labels])]
    for point, (names, colour) in labels.items():
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5}
        style = {"textcoords": "offset points", "color": colour, "fontsize": 9, "arrowprops": line}
        text = axes.annotate("\n".join(names), point, xytext=PLACES[0], **style)
        text.set_in_layout(False)

        def box_at(place: tuple[int, int], text=text) -> Bbox:
            text.set(position=place, ha="left" if place[0] > 0 else "right")
            text.update_positions(axes.figure.canvas.get_renderer())
            return Text.get_window_extent(text)  # without the line

        def hidden(place: tuple[int, int], box_at=box_at) -> int:
            box = box_at(place)
            return sum(map(box.overlaps, taken)) + sum(not axes.bbox.contains(*corner) for corner in (box.min, box.max))

        taken.append(box_at(min(PLACES, key=hidden)))


def comparison_plot(results: list[NetworkResult], path: Path) -> None:
    """Mean and standard error over seeds of each network, over its latency, with the Pareto front of the means.

    The control, the first result, has another colour. Outliers, which would compress the rest, are only named.
    """
    metric, (figure, axes) = choose_metric(results), new_figure(PHONE, 4.2)
    means = [result.values(metric).mean() for result in results]
    best, median = min(means), np.median(means)
    limit = max(best + OUTLIER * (median - best), (1 + NEAR) * best, means[0])
    labels, outliers, ends = {}, [], []  # labels by point, because contenders of one network are one point
    for result in sorted(results, key=lambda result: result.latency):
        mean, error = mean_and_standard_error(result.values(metric))
        colour, point = RED if result is results[0] else BLUE, (result.latency, mean)
        if mean > limit:
            outliers.append(f"{result.name} {mean:.{metric.digits}f}")
            continue
        axes.errorbar(*point, yerr=error, color=colour, marker="o", markersize=6, capsize=3, linestyle="")
        labels.setdefault(point, ([], colour))[0].append(textwrap.fill(result.name, NAME))
        ends += [mean - (error or 0), mean + (error or 0)]
    axes.step(*zip(*front(labels), strict=True), where="post", color="#333333", linewidth=0.8, linestyle=":", zorder=0)
    if outliers:
        axes.set_title(textwrap.fill(f"outside: {', '.join(outliers)}", LABEL), loc="left", fontsize=9, color="#52606d")
    axes.set(xlabel="latency, ms for 1,000 bytes of text", ylabel=f"{metric.name} on test")
    axes.margins(x=0.14)
    scale(axes, ends)
    kinds = {textwrap.fill(results[0].name, NAME): RED, "others": BLUE}
    handles = [Line2D([], [], color=c, label=name, marker="o", linestyle="") for name, c in kinds.items()]
    handles.append(Line2D([], [], color="#333333", linestyle=":", label="Pareto front"))
    figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside upper center", ncols=len(handles))
    tidy(axes)
    place_labels(axes, labels)
    save(figure, path)


MAX_FRAMES = 150  # more frames make a larger file but no smoother motion
FIRST_FRAME_MS, FRAME_MS, LAST_FRAME_MS = 1500, 80, 3000
LEVELS = 18  # of each colour channel in a GIF
FIGURE_SPACE = "\u2007"  # as wide as a digit, so that words after a number do not move
DASHES = "-", "--", ":", "-."
BEFORE = 0.15  # share of the steps in which pi changes; the figure begins this many steps before the change


def pi_history(lines: list[dict]) -> list[dict]:
    """The lines of pi.jsonl to draw: the last one before pi changes, which may be the only one, and those after it."""
    changed = next((index for index, line in enumerate(lines) if line["pi"] != lines[0]["pi"]), len(lines))
    return lines[max(0, changed - 1) :]


def choose_frames(count: int) -> list[int]:
    """At most MAX_FRAMES indices, evenly spread, including the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, MAX_FRAMES))})


LEGENDS = {  # what darkness and outline mean, by search.method; None: unknown
    "gumbel": "darker: more probable; the outlined cell is the operation that argmax chooses",
    "trials": "darker: more probable in the best network; outlined: most probable\n"
    "a block that the best network lacks counts as identity",
    None: "darker: more probable; the outlined cell is the most probable operation",
}


def method_of(history: list[dict]) -> str | None:
    """The search.method that wrote a history: only trials are counted, and only gumbel has falling temperatures."""
    if "trials" in history[-1]:
        return "trials"
    return "gumbel" if len({line["temperature"] for line in history}) > 1 else None


def describe_line(line: dict, history: list[dict]) -> str:
    """What has been trained until a line of a history, and the expected cost."""
    method, last = method_of(history), history[-1]
    total = f"{last.get('of_steps', last['step']):,}"
    done = f"step {format(line['step'], ',').rjust(len(total), FIGURE_SPACE)} of {total}"
    if method == "trials":
        done = f"after {line['trials']} of {last['trials']} trials  ·  {line['step']:,} training steps"
        done = done if line["trials"] else "before the first trial"
    elif method == "gumbel":
        alone = "only the weights train" if line["step"] else "before the first step"
        phase = alone if line["pi"] == history[0]["pi"] else "weights and architecture train"
        done += f"  ·  {phase}  ·  temperature {line['temperature']:.2f}"
    if (ratio := line.get("expected_cost_ratio")) is None:
        return done
    costs = {"gumbel": "latency" if line.get("expected_latency_ms") else "FLOPs"}
    whose = "interleaved's" if method == "gumbel" else "the reference's"
    return f"{done}\nexpected {costs.get(method, 'cost')}: {ratio:.0%} of {whose}"


class PiPicture:
    """A picture of pi: operations as rows, blocks as columns, darkness as probability, and words for who sees it first.

    The likeliest operation of each block is outlined and has its probability, unless all operations tie. show() changes
    only what differs between frames, which makes an animation fast.
    """

    def __init__(self, history: list[dict]):
        operations, blocks = history[0]["operations"], len(history[0]["pi"])
        self.history, left = history, {"x": 0.01, "ha": "left"}
        legend, first = LEGENDS[method_of(history)], describe_line(history[0], history)
        height = 0.9 + 0.42 * len(operations) + 0.24 * (first + legend).count("\n")
        self.figure, axes = new_figure(max(7.0, 1.2 + 0.42 * blocks), height + 0.5, facecolor="white")
        self.image = axes.imshow(np.zeros((len(operations), blocks)), cmap="Greys", vmin=0, vmax=1, aspect="auto")
        self.title = self.figure.suptitle(first, fontsize=12, linespacing=1.4, **left)
        self.figure.supxlabel(legend, fontsize=11, linespacing=1.4, **left)
        axes.set_yticks(range(len(operations)), operations, fontsize=12)
        axes.set_xticks(range(blocks), range(1, blocks + 1), fontsize=12)
        axes.set_xlabel("block, from input to output", fontsize=12)
        axes.set_xticks(np.arange(-0.5, blocks), minor=True)
        axes.set_yticks(np.arange(-0.5, len(operations)), minor=True)
        axes.grid(which="minor", color="#dddddd", linewidth=1)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        self.numbers = [axes.text(i, 0, "", ha="center", va="center", fontsize=11) for i in range(blocks)]
        frame = {"fill": False, "edgecolor": RED, "linewidth": 2.5, "zorder": 3}
        self.outlines = [axes.add_patch(Rectangle((i - 0.45, 0), 0.9, 0.9, **frame)) for i in range(blocks)]

    def show(self, line: dict) -> None:
        pi = np.array(line["pi"])
        self.image.set_data(pi.T)
        for index, (text, outline, row) in enumerate(zip(self.numbers, self.outlines, pi, strict=True)):
            best, tie = int(row.argmax()), len(row) > 1 and np.ptp(row) < TIED_MARGIN
            number = "" if tie else f"{row[best]:.2f}".lstrip("0")
            text.set(x=index, y=best, text=number, color="white" if row[best] > 0.55 else "black")
            outline.set(y=best - 0.45, visible=not tie)
        self.title.set_text(describe_line(line, self.history))

    def pixels(self) -> np.ndarray:
        """The picture [height, width, 3], uint8, in few colours, which make a small and sharp GIF."""
        self.figure.canvas.draw()
        pixels = np.asarray(self.figure.canvas.buffer_rgba())[..., :3]
        return np.round(pixels / 255 * (LEVELS - 1)).astype(np.uint8) * np.uint8(255 // (LEVELS - 1))


def animate(history: list[dict], path: Path) -> int:
    """Write a history as a GIF that pauses on its first and last frame. Returns the number of frames."""
    picture, frames = PiPicture(history), []
    for index in choose_frames(len(history)):
        picture.show(history[index])
        frames.append(picture.pixels())
    plt.close(picture.figure)
    durations = [FIRST_FRAME_MS, *[FRAME_MS] * (len(frames) - 2), LAST_FRAME_MS] if frames[1:] else LAST_FRAME_MS
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
