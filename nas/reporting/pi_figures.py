"""Figures of pi: an animated GIF of its history, and still pictures.

`history` is the result of pi_history: a list of {"step", "temperature", "operations",
"pi": [N blocks][O operations]}. Its first entry is pi before it changes.
"""

import math
from collections import Counter
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from models.operations.registry import OPERATIONS
from nas.core.outcome import TIED_MARGIN, entropy
from nas.core.pattern import unit_of
from nas.reporting.style import colours_of, new_figure, save, tidy

MAX_FRAMES = 150  # more frames make a larger file but no smoother motion
FRAME_MS, LAST_FRAME_MS = 80, 3000
GREY_LEVELS = 18  # in a GIF
DASHES = "-", "--", ":", "-."
BEFORE = 0.15  # share of the steps in which pi changes; the figure begins this many steps before the change


def pi_history(lines: list[dict]) -> list[dict]:
    """The history of pi to draw, from the lines of pi.jsonl: one entry before pi changes, and then its changes.

    The result has one entry if pi has not changed.
    """
    changed = next((index for index, line in enumerate(lines) if line["pi"] != lines[0]["pi"]), len(lines))
    return lines[max(0, changed - 1) :]


def choose_frames(count: int) -> list[int]:
    """At most MAX_FRAMES indices, evenly spread, including the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, MAX_FRAMES))})


class PiPicture:
    """A picture of pi: operations as rows, blocks as columns, darkness as probability.

    The probability is written on the likeliest operation of each block, unless all operations tie. The figure is
    created once, and show() changes only what differs between frames, which makes an animation fast.
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
        self.title.set_text(f"step {line['step']:>7,}{temperature}   entropy {entropy(pi).mean():.3f}")

    def pixels(self) -> np.ndarray:
        """The picture in grey [height, width], uint8.

        A GIF of one channel with few levels needs no palette and no dithering, so it is small and sharp.
        """
        self.figure.canvas.draw()
        red = np.asarray(self.figure.canvas.buffer_rgba())[..., 0]  # the three channels of grey are equal
        return np.round(red / 255 * (GREY_LEVELS - 1)).astype(np.uint8) * np.uint8(255 // (GREY_LEVELS - 1))


def animate(history: list[dict], path: Path) -> int:
    """Write a history of two steps or more as a GIF that pauses on its last frame. Returns the number of frames."""
    picture = PiPicture(history)
    frames = []
    for index in choose_frames(len(history)):
        picture.show(history[index])
        frames.append(picture.pixels())
    plt.close(picture.figure)
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    imageio.imwrite(path, np.stack(frames), extension=".gif", duration=durations, loop=0)
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
    for index, axes in enumerate(grid.flat):
        if index >= blocks:
            axes.set_visible(False)
            continue
        for number, name in enumerate(operations):
            axes.plot(steps, pi[:, index, number], dashes[name], color=colours[name], linewidth=1.6)
        axes.axvspan(steps[0], start, color="#ececec", linewidth=0)
        axes.set_xlim(steps[0], last if last > steps[0] else None)
        axes.set_title(f"block {index + 1}", fontsize=9)
        axes.set_ylim(-0.02, 1.02)
        axes.locator_params(axis="x", nbins=3)
        axes.tick_params(labelsize=7, labelbottom=index + columns >= blocks)  # also where no chart is below
        tidy(axes)
    note = f" (grey: only the weights train, for {start:,} steps)" if start else ""
    figure.supxlabel(f"step{note}", fontsize=9)
    figure.supylabel("probability", fontsize=9)
    handles = [Line2D([], [], linestyle=dashes[name], color=colours[name], label=name) for name in operations]
    style = {"ncols": len(operations), "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, loc="outside upper center", **style)
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
