"""Learning curves: nll over training tokens."""

from pathlib import Path

from nas.reporting.style import BLUE, GREY, RED, new_figure, save, tidy

STYLES = {  # of the splits in metrics.jsonl: label, colour, line, marker
    "train": ("train", GREY, "-", None),
    "valid": ("valid", BLUE, "-", "o"),
    "test": ("test", RED, "", "D"),
}


def learning_curves(metrics: list[dict], path: Path) -> None:
    """nll per token over training tokens, for each split. metrics: the lines of metrics.jsonl.

    The y axis shows the last four fifths of each line; a note says if earlier values lie outside. The first values are
    so high that they would compress the rest.
    """
    figure, axes = new_figure(6, 3.4)
    for split, (label, colour, line, marker) in STYLES.items():
        points = [(entry["tokens"], entry["nll"]) for entry in metrics if entry["split"] == split]
        if points:
            marker = marker or ("." if len(points) == 1 else None)  # a line of one point is invisible
            style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
            axes.plot(*zip(*points, strict=True), label=label, **style)
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
