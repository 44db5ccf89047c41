"""Colours, axes and saving of all figures, with matplotlib set to work without a display."""

from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from models.operations.registry import OPERATIONS

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
    figure.savefig(path, dpi=130, facecolor="white")
    plt.close(figure)
