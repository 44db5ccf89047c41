"""Every picture: the evolution of pi as a GIF, and stills for a report. The only import of matplotlib.

History is what pi.jsonl holds, a list of {"step", "temperature", "operations", "pi": [N blocks][O operations]}.
"""

import itertools
import math
from pathlib import Path

import imageio.v3 as imageio
import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from nas.claims import dominating
from nas.comparison import GIVEN, PARAMETERS, RANDOM, SEARCHED
from nas.derivation import entropy
from nas.pattern import abbreviate
from nas.rows import Row, mean_error, quality_of

COLOURS = {
    "attention": "#c8553d",
    "sparse_strided": "#e09f3e",
    "sparse_fixed": "#7b6d8d",
    "dense": "#2f6690",
    "identity": "#b9bfc7",
}
MOST_FRAMES = 150  # more would make neither the motion smoother nor the file smaller
FRAME_MS, HELD_MS = 80, 3000
GREYS = 18  # levels of grey in a GIF
WIDE = 16  # blocks from which on labels get smaller


def pi_array(history: list[dict]) -> np.ndarray:
    """[T logged steps, N blocks, O operations]"""
    return np.array([line["pi"] for line in history])


def chosen_frames(count: int) -> list[int]:
    """At most MOST_FRAMES indices, evenly spread, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, MOST_FRAMES))})


class PiPicture:
    """Operations as rows, blocks as columns, darkness as probability; the likeliest carries its number.

    The figure is drawn once; show() changes what differs, which makes an animation quick.
    """

    def __init__(self, operations: list[str], blocks: int):
        width = min(16.0, max(6.0, 1.6 + 0.62 * blocks))
        self.figure = Figure(figsize=(width, 1.5 + 0.5 * len(operations)), dpi=100, layout="constrained")
        self.figure.set_facecolor("white")
        self.canvas = FigureCanvasAgg(self.figure)
        axes = self.figure.subplots()
        self.image = axes.imshow(np.zeros((len(operations), blocks)), cmap="Greys", vmin=0, vmax=1, aspect="auto")
        self.title = axes.set_title(" ", fontsize=10, family="monospace")
        axes.set_yticks(range(len(operations)), operations)
        every = 1 if blocks <= WIDE else 2
        axes.set_xticks(range(0, blocks, every), range(1, blocks + 1, every))
        axes.set_xlabel("block")
        axes.set_xticks(np.arange(-0.5, blocks), minor=True)
        axes.set_yticks(np.arange(-0.5, len(operations)), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        size = 10 if blocks <= WIDE else 7
        self.numbers = [axes.text(i, 0, "", ha="center", va="center", fontsize=size) for i in range(blocks)]

    def show(self, line: dict) -> None:
        pi = np.array(line["pi"])
        self.image.set_data(pi.T)
        for index, (text, row) in enumerate(zip(self.numbers, pi, strict=True)):
            best = int(row.argmax())
            text.set(
                x=index, y=best, text=f"{row[best]:.2f}".lstrip("0"), color="white" if row[best] > 0.55 else "black"
            )
        self.title.set_text(
            f"step {line['step']:>7,}   temperature {line['temperature']:.3f}   entropy {entropy(pi).mean():.3f}"
        )

    def pixels(self) -> np.ndarray:
        """[height, width] of grey, uint8. Few levels of one channel need neither a palette nor dithering: that is what
        keeps a GIF small and sharp."""
        self.canvas.draw()
        red = np.asarray(self.canvas.buffer_rgba())[..., 0]  # of grey, any channel
        return np.round(red / 255 * (GREYS - 1)).astype(np.uint8) * np.uint8(255 // (GREYS - 1))


def animate(history: list[dict], path: Path) -> int:
    """Write the evolution of pi as a GIF that loops and holds its last frame; returns the number of frames.

    Raises ValueError below two logged steps.
    """
    if len(history) < 2:
        raise ValueError("an animation needs at least two logged steps")
    picture = PiPicture(history[0]["operations"], len(history[0]["pi"]))
    frames = []
    for index in chosen_frames(len(history)):
        picture.show(history[index])
        frames.append(picture.pixels())
    durations = [FRAME_MS] * (len(frames) - 1) + [HELD_MS]
    imageio.imwrite(path, np.stack(frames), extension=".gif", duration=durations, loop=0)
    return len(frames)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)


def tidy(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def final_pi(history: list[dict], path: Path) -> None:
    picture = PiPicture(history[-1]["operations"], len(history[-1]["pi"]))
    picture.show(history[-1])
    picture.figure.savefig(path, dpi=130, facecolor="white")


def pi_over_time(history: list[dict], path: Path) -> None:
    """A small chart per block, a line per operation; grey where pi rests and the weights train alone."""
    pi, steps, operations = pi_array(history), [line["step"] for line in history], history[0]["operations"]
    blocks = pi.shape[1]
    moved = np.flatnonzero((pi != pi[0]).any(axis=(1, 2)))
    resting = steps[max(0, int(moved[0]) - 1)] if len(moved) else 0  # the warm-up, in which weights train alone
    columns = min(blocks, 6 if blocks <= 24 else 8)
    rows = -(-blocks // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(1.9 * columns + 0.6, 1.5 * rows + 0.8),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for index, axes in enumerate(grid.flat):
        if index >= blocks:
            axes.set_visible(False)
            continue
        for number, name in enumerate(operations):
            axes.plot(steps, pi[:, index, number], color=COLOURS.get(name, "black"), linewidth=1.6)
        axes.axvspan(steps[0], resting, color="#f3f3f3", linewidth=0)
        axes.set_title(f"block {index + 1}", fontsize=9)
        axes.set_ylim(-0.02, 1.02)
        axes.locator_params(axis="x", nbins=3)
        axes.tick_params(labelsize=7)
        tidy(axes)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("probability", fontsize=9)
    handles = [Patch(color=COLOURS.get(name, "black"), label=name) for name in operations]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(operations), frameon=False, fontsize=9)
    save(figure, path)


def entropy_over_time(history: list[dict], path: Path) -> None:
    """Entropy of each block's pi, and their mean."""
    values, steps = entropy(pi_array(history)), [line["step"] for line in history]
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot(steps, values, color="#9aa5b1", linewidth=0.8)
    axes.plot(steps, values.mean(axis=1), color="#1d3557", linewidth=2.2, label="mean of the blocks")
    uniform = math.log(len(history[0]["operations"]))
    axes.axhline(uniform, color="#c8553d", linestyle="--", linewidth=1, label="uniform")
    axes.set(xlabel="step", ylabel="entropy of pi (nats)", ylim=(0, uniform * 1.08 or 1))
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    save(figure, path)


def learning_curves(metrics: list[dict], path: Path) -> None:
    """nll per token over training tokens, for each split in metrics.jsonl."""
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    styles = {"train": ("#9aa5b1", "-", None), "valid": ("#2f6690", "-", "o"), "test": ("#c8553d", "", "D")}
    highest = []
    for split, (colour, line, marker) in styles.items():
        points = [(entry["tokens"], entry["nll"]) for entry in metrics if entry["split"] == split]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colour, linestyle=line, marker=marker, markersize=4, label=split
            )
            highest += [nll for _, nll in points[1:]] or [points[0][1]]
    axes.set(xlabel="training tokens", ylabel="nll (nats per token)")
    if highest:  # the first steps would press the rest flat
        low, high = min(highest), float(np.percentile(highest, 97))
        axes.set_ylim(low - 0.05 * (high - low + 0.1), high + 0.1 * (high - low + 0.1))
    tokens_axis(axes, max((entry["tokens"] for entry in metrics), default=0))
    axes.legend(frameon=False)
    tidy(axes)
    save(figure, path)


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


def tokens_axis(axes, most: int) -> None:
    millions = most >= 2e6
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if millions else f"{value / 1e3:g}k")


def pattern_strip(blocks: list[str], path: Path) -> None:
    """The pattern as a row of coloured blocks, input at the left."""
    width = min(16.0, max(4.0, 0.55 * len(blocks)))
    figure, axes = plt.subplots(figsize=(width, 1.45), layout="constrained")
    for index, name in enumerate(blocks):
        axes.add_patch(Rectangle((index + 0.04, 0), 0.92, 1, color=COLOURS.get(name, "black")))
        ink = "black" if name == "identity" else "white"
        axes.text(index + 0.5, 0.5, abbreviate([name]), ha="center", va="center", color=ink, fontsize=11, weight="bold")
    axes.set(xlim=(0, len(blocks)), ylim=(0, 1), yticks=[])
    every = 1 if len(blocks) <= WIDE else 2
    axes.set_xticks(np.arange(0, len(blocks), every) + 0.5, range(1, len(blocks) + 1, every))
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    names = [name for name in COLOURS if name in blocks]
    handles = [Patch(color=COLOURS[name], label=f"{name} ({blocks.count(name)})") for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    save(figure, path)
