"""The table and the picture of all results: `python experiments/frontier/report.py runs/frontier`.

RESULTS is the folder of run.py and of the programs in experiments/outside. Its results replace those of the same text
and predictor in results.csv, which has a line for each result; without RESULTS, these are shown. Writes results.csv and
frontier.png. Prints the table, and for each opponent how far found is from it. A difference is that of bits per byte;
that of word perplexity follows where words are words. p is that of Welch's test over seeds, or of Student's against a
predictor without seeds, with Holm's correction over the cells. Cells in which found has no network have no p, and are
no part of the means. The last line has these, and p of a permutation test of all cells.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.frontier.problem import BUDGETS, SPLITS, TEXTS
from experiments.helpers import print_row, read_table, spell_network
from nas.core.errors import InputError, run_command
from nas.core.files import write_text
from nas.reporting.comparison_report import csv_text
from nas.reporting.figures import BLUE, GREY, RED, new_figure, save, tidy

HERE = Path(__file__).parent
# In the order of the table: what a predictor is called, and its line in the picture. None: its bits are told in words,
# because a line would leave no room for the others.
PREDICTORS = {
    "found": ("found", {"color": RED, "marker": "o"}),
    "usual": ("usual network", {"color": "#5b8c5a", "marker": "d"}),
    "optuna": ("Optuna, trials in the mixture", {"color": BLUE, "marker": "s"}),
    "optuna-alone": ("Optuna, trials alone", {"color": "#8fb3d9", "marker": "s"}),
    "gpt2": ("GPT-2 of Transformers", None),
    "none": ("cache and counts, no network", {"color": GREY, "linestyle": "--"}),
    "ppmd": ("PPMd", {"color": GREY, "linestyle": ":"}),
}
SEARCHED = "found", "usual", "optuna", "optuna-alone"
NO_WORDS = {"go"}
AIMS = {
    "optuna": -0.015,
    "optuna-alone": -0.015,
    "gpt2": -0.6,
    "none": -0.2,
}  # for the mean difference of word perplexity
DRAWS = 100_000  # of the permutation test
NONE_FITS = "none fits"
WORDS_PER_CELL = 1000  # a perplexity beyond has no decimals


def answer(found: dict, none: dict | None) -> dict:
    """What a search answers: its network, or cache and counts alone if it has none or valid says that they are as good.

    none: the result of no_network.py, None if there is none yet.
    """
    bits = [one["valid"]["bits_per_byte"] if one and "valid" in one else math.inf for one in (found, none)]
    return found if bits[0] < bits[1] else (none or {}) | {"network": None, "network_figures": None, "ratio": None}


def read_results(folder: Path) -> list[dict]:
    """The lines of results.csv, from the JSON files of a folder of results."""
    rows = []
    for text in TEXTS:
        file = folder / "results" / f"{text},,none,1.json"
        none = json.loads(file.read_text()) if file.exists() else None
        for path in sorted((folder / "results").glob(f"{text},*.json")):
            _, budget, predictor, seed = path.stem.split(",")[:4]
            found = json.loads(path.read_text())
            found = answer(found, none) if predictor in SEARCHED else found
            if predictor in PREDICTORS:
                about = {"text": text, "budget": budget, "predictor": predictor, "seed": seed}
                about |= {"what": what_of(predictor, found), "ratio": found.get("ratio") or ""}
                for split in SPLITS:
                    own = found.get(split, dict.fromkeys(("bits_per_byte", "word_perplexity"), ""))
                    about |= {f"{split}_{key}": value for key, value in own.items()}
                network = found.get("network_figures")
                rows.append(about | {"network_test_bits_per_byte": network["test"]["bits_per_byte"] if network else ""})
    return rows


def what_of(predictor: str, found: dict) -> str:
    """The choice of a predictor in words."""
    if "test" not in found:
        return NONE_FITS
    if predictor == "gpt2":
        pieces, width, blocks = found["gpt2"]
        return f"{pieces:,}, {width}, {blocks} blocks, rate {found['rate']:g}"
    if predictor in ("none", "ppmd"):
        return f"order {found['order']}" + (f", {found['pieces']:,} pieces" if "pieces" in found else "")
    return spell_network(found["network"]) if found["network"] else "cache and counts alone"


def p_of(own: np.ndarray, other: np.ndarray) -> float | None:
    """p of a difference; None if neither varies."""
    from scipy import stats

    vary = [len({*values.round(9)}) > 1 for values in (own, other)]
    if all(vary):
        return float(stats.ttest_ind(own, other, equal_var=False).pvalue)
    if not any(vary):
        return None
    constant, varying = (own, other) if vary[1] else (other, own)
    return float(stats.ttest_1samp(varying, constant[0]).pvalue)


def holm(ps: list[float | None]) -> list[float | None]:
    """Holm's correction of the p of several tests."""
    order, adjusted, least = sorted((p, i) for i, p in enumerate(ps) if p is not None), [*ps], 0.0
    for rank, (p, index) in enumerate(order):
        least = max(least, min(1.0, p * (len(order) - rank)))
        adjusted[index] = least
    return adjusted


def permuted(pairs: list[list[np.ndarray]]) -> float:
    """p, two-sided, of the mean difference of pairs of samples, whose values are exchanged within each pair."""
    generator, drawn, seen = np.random.default_rng(0), np.zeros(DRAWS), 0.0
    for own, other in pairs:
        both = np.concatenate([own, other])
        orders = generator.permuted(np.tile(both, (DRAWS, 1)), axis=1)
        drawn += orders[:, : len(own)].mean(axis=1) - orders[:, len(own) :].mean(axis=1)
        seen += own.mean() - other.mean()
    return float((1 + (abs(drawn) >= abs(seen) - 1e-12).sum()) / (1 + DRAWS))


class Cells:
    """The values of each predictor in each cell. rows: of results.csv."""

    def __init__(self, rows: list[dict]):
        self.rows = rows
        known = {row["text"] for row in rows if row["predictor"] == "found"}
        texts = [text for text in TEXTS if text in known]
        self.cells = [(text, budget) for text in texts for budget in BUDGETS]

    def values(self, predictor: str, cell: tuple, key: str = "test_bits_per_byte") -> np.ndarray:
        """One for each seed; of a predictor without budgets the same in each."""
        kept = (row for row in self.rows if row["predictor"] == predictor and row["text"] == cell[0] and row[key] != "")
        return np.array([float(row[key]) for row in kept if row["budget"] in ("", str(cell[1]))])

    def text(self, predictor: str, cell: tuple) -> str:
        bits = self.values(predictor, cell)
        if not len(bits):
            seen = {(row["predictor"], row["text"], row["budget"]) for row in self.rows}
            return NONE_FITS if (predictor, cell[0], str(cell[1])) in seen else "not run"
        words = np.exp(np.log(self.values(predictor, cell, "test_word_perplexity")).mean())
        short = f"{words:,.1f}" if words < WORDS_PER_CELL else f"{words:,.0f}"
        return f"{bits.mean():.3f}" + ("" if cell[0] in NO_WORDS else f"<br>{short}")

    def difference(self, predictor: str, cell: tuple) -> tuple[float, float | None, float | None] | None:
        """How far found is from a predictor: bits, as a ratio; word perplexity, as a ratio; p."""
        own, other = (self.values(name, cell) for name in ("found", predictor))
        if not len(own) or not len(other):
            return None
        words = [self.values(name, cell, "test_word_perplexity") for name in ("found", predictor)]
        change = math.expm1(np.log(words[0]).mean() - np.log(words[1]).mean())
        return own.mean() / other.mean() - 1, None if cell[0] in NO_WORDS else change, p_of(own, other)


def print_tables(cells: Cells) -> dict:
    """Print the tables. Returns the mean differences."""
    heads = [f"{text}, {budget}" for text, budget in cells.cells]
    print_row("", *heads, header=True)
    for name, (title, _) in PREDICTORS.items():
        print_row(title, *(cells.text(name, cell) for cell in cells.cells))
    means = {}
    for name, (title, _) in PREDICTORS.items():
        if name == "found":
            continue
        found = [cells.difference(name, cell) for cell in cells.cells]
        ps, shown = holm([one and one[2] for one in found]), []
        for one, p in zip(found, ps, strict=True):
            words = "" if not one or one[1] is None else f"<br>{one[1]:+.1%}"
            mark = "" if p is not None and one[0] < 0 and p < 0.05 else "<br>missed"
            told = "no seeds" if p is None else f"p {p:.2g}"
            shown.append(f"{one[0]:+.1%}{words}<br>{told}{mark}" if one else "")
        print_row(f"found against {title}", *shown)
        tested = [(cell, one) for cell, one in zip(cells.cells, found, strict=True) if one and one[2] is not None]
        means[name] = {"bits": mean_of([one[0] for _, one in tested])}
        means[name]["words"] = mean_of([one[1] for _, one in tested if one[1] is not None])
        if name in AIMS and means[name]["words"] is not None:
            means[name]["aim"] = "reached" if means[name]["words"] <= AIMS[name] else "missed"
        pairs = [[cells.values(one, cell) for one in ("found", name)] for cell, _ in tested]
        means[name]["p"] = permuted(pairs) if pairs else None
    print()
    print_row("text, budget", *PREDICTORS, header=True)
    for text, budget in cells.cells:
        rows = [row for row in cells.rows if row["text"] == text and row["budget"] in ("", str(budget))]
        print_row(f"{text}, {budget}", *("; ".join(choices(name, rows)) for name in PREDICTORS))
    return means


def choices(predictor: str, rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["what"] for row in rows if row["predictor"] == predictor))


def mean_of(values: list[float]) -> float | None:
    """The mean ratio - 1, of logarithms."""
    return round(math.expm1(float(np.mean(np.log1p(values)))), 4) if values else None


def draw(cells: Cells, path: Path) -> None:
    """Bits per byte over the budget, a panel for each text."""
    texts = list(dict.fromkeys(text for text, _ in cells.cells))
    figure, axes = new_figure(8, 2.9 * math.ceil(len(texts) / 2) + 0.6, rows=math.ceil(len(texts) / 2), columns=2)
    panels = np.atleast_1d(axes).ravel()
    for panel, text in zip(panels, texts, strict=False):
        for name, (title, style) in PREDICTORS.items():
            own = [(budget, cells.values(name, (text, budget))) for budget in BUDGETS]
            points = [(budget, values.mean()) for budget, values in own if len(values)]
            if points and style is None:
                told = ", ".join(f"{bits:.2f} at {budget:g}" for budget, bits in points)
                panel.text(0.02, 0.9, f"{title}: {told}", transform=panel.transAxes, va="top", fontsize=8)
            elif points:
                panel.plot(*zip(*points, strict=True), label=title, **style)
        panel.set_xscale("log")
        panel.set_xticks(BUDGETS, [f"{budget:g}" for budget in BUDGETS])
        panel.minorticks_off()
        panel.set(title=text, xlabel="time for the same text, reference = 1", ylabel="bits per byte on test")
        tidy(panel)
    for panel in panels[len(texts) :]:
        panel.axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, metavar="RESULTS", help="folder of the runs")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the files (default: beside this program)")
    arguments = parser.parse_args()
    table = arguments.out / "results.csv"
    new = read_results(arguments.results) if arguments.results else []
    kept = read_table(table) if table.exists() else []
    replaced = {(row["text"], row["predictor"]) for row in new}
    rows = [*new, *(row for row in kept if (row["text"], row["predictor"]) not in replaced)]
    if not rows:
        raise InputError(
            f"{arguments.results or table} has no results: run.py and the programs of experiments/outside make them"
        )
    write_text(table, csv_text(rows))
    cells = Cells(read_table(table))  # whose figures are rounded
    means = print_tables(cells)
    draw(cells, arguments.out / "frontier.png")
    print(json.dumps(means))


if __name__ == "__main__":
    run_command(main)
