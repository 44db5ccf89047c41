"""Colours, axes and saving of all figures, with matplotlib set to work without a display."""

from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

matplotlib.use("Agg")

COLOURS = {
    "attention": "#c8553d",
    "sparse_strided": "#e09f3e",
    "sparse_fixed": "#7b6d8d",
    "window": "#2a9d8f",
    "linear": "#8ab17d",
    "dense": "#2f6690",
    "identity": "#b9bfc7",
}
RED, BLUE, NAVY, GREY, PURPLE = "#c8553d", "#2f6690", "#1d3557", "#9aa5b1", "#7b6d8d"
KIND_COLOURS = {"searched": RED, "given": BLUE, "random": GREY}  # kinds of contenders


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
