"""Fit the prior means of the surrogate: `python experiments/versus/prior.py [TEXT FOLDER ...]`.

The data are trainings.csv, which has trials and trainings of searches, and the grids and trainings of
experiments/frontier. With a text and folders of searches, the program first copies their trials into trainings.csv.
They replace earlier trials of the same searches. The text `again` serves again.py, and is not fitted here.

They give the posterior of the surrogate's factors, from means of 0 and WIDER times the spreads of
nas/search/surrogate.py. A training that several tables have counts once, also if one table rounds its loss. Each text
has an offset, a slope in T, and an offset of whole trainings, whose learning rates have decayed. Trials of networks
with full attention that were judged at full lengths (README.md, "The lengths at which trials are judged") have terms of
their own. The last line is JSON.
"""

import argparse
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import grid_network, named_network, print_row, read_table
from nas.core.errors import InputError, run_command
from nas.core.files import read_yaml
from nas.core.pattern import abbreviate, expand
from nas.core.run_folder import CONFIG, RESULTS
from nas.search.space import make_network
from nas.search.surrogate import NOISE, OWN, TERMS, Point, Surrogate, log_sizes
from nas.search.trials import RUNGS

TEXTS = {"wikitext2": "frontier", "stdlib": "python"}  # and the table of their trainings in experiments/frontier
AGAIN_TEXT = "again"  # WikiText-2, read 2.88 times, with model.dropout=auto (experiments/frontier, "A larger case")
GRIDS = Path(__file__).parents[1] / "frontier"
TRAININGS = Path(__file__).with_name("trainings.csv")
COLUMNS = "text", "search", "vocab_size", "d_model", "blocks", "share", "bits_per_byte", "lengths"
FULL, OF_TRIALS = "full", "trial"  # lengths at which trials were judged
WIDER = 3
MISJUDGED = 0.02  # standard deviation of the terms of trials with full attention that were judged at full lengths


def read_grid(text: str) -> list[Point]:
    points = []
    for row in read_table(GRIDS / f"{text}.csv"):
        losses = {share: row[str(share)] for share, *_ in RUNGS} | {1.0: row["bits_per_byte"]}
        points += [Point(grid_network(row), share, float(loss)) for share, loss in losses.items() if loss]
    return points


def read_frontier(text: str) -> list[Point]:
    """The ends of trainings of experiments/frontier, without those that have other heads."""
    points = []
    for row in read_table(GRIDS / f"{TEXTS[text]}.csv"):
        if row["network"].count("-") == 2:  # else with heads
            points.append(Point(named_network(row["network"]), 1.0, float(row["valid_bits_per_byte"])))
    return points


def read_trials(text: str) -> list[tuple[Point, str]]:
    """The losses in TRAININGS, and the lengths at which they were judged."""
    found = []
    for row in read_table(TRAININGS):
        if row["text"] == text:
            network = make_network(int(row["vocab_size"]), int(row["d_model"]), expand(row["blocks"]))
            found.append((Point(network, float(row["share"]), float(row["bits_per_byte"])), row["lengths"]))
    return found


def read_points(text: str) -> dict[Point, bool]:
    """All losses of a text, and whether full lengths judged them."""
    found = [(point, False) for point in read_frontier(text)] + [(point, True) for point in read_grid(text)]
    found += [(point, lengths == FULL) for point, lengths in read_trials(text)]
    return {replace(point, loss=round(point.loss, 4)): full for point, full in found}


def write_trainings(text: str, folders: list[Path]) -> None:
    """Replace the losses of searches of a text in TRAININGS by those of the trials in folders."""
    rows = []
    for folder in folders:
        for run in sorted({file.parent for file in folder.rglob("trial-*.yaml")}):
            content = read_yaml(run / CONFIG)
            own = content["data"]["vocab_size"], content["model"]["d_model"], abbreviate(content["pattern"])
            losses = {}
            for trial in map(read_yaml, sorted(run.glob("trial-*.yaml"))):
                if (done := trial["step"] / trial["of_steps"]) < 1:
                    losses[min((share for share, *_ in RUNGS), key=lambda share: abs(share - done))] = trial["valid"]
            if (run / RESULTS).exists():
                losses[1.0] = read_yaml(run / RESULTS)["valid"]
            about = text, str(run.parent.relative_to(folder.parent)), *own
            rows += [(*about, share, round(one["bits_per_byte"], 5), OF_TRIALS) for share, one in losses.items()]
    if not rows:
        raise InputError(f"no trials in {', '.join(map(str, folders))}; give folders of searches")
    again = {row[:2] for row in rows}
    kept = [tuple(row.values()) for row in read_table(TRAININGS) if (row["text"], row["search"]) not in again]
    with TRAININGS.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *kept, *rows])


def misjudged_columns(surrogate: Surrogate, points: dict[Point, bool]) -> np.ndarray:
    """[P, 8] for trials of full attention at full lengths: an offset, N, A and P, and these times T. 0 for others."""
    rows = []
    for point, full in points.items():
        _, _, blocks, attending, _, later, _ = log_sizes(point.network, surrogate.d_ffn)
        full = full and point.share < 1 and any(block.split()[0] == "attention" for block in point.network.blocks)
        own = full * np.array([1.0, blocks - surrogate.mean_log_sizes[2], attending, later])
        rows.append([*own, *(own * np.log(point.share))])
    return np.array(rows)


def fit(texts: list[dict[Point, bool]], terms: dict = TERMS) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard errors of the factors of the terms. texts: read_points() of each text."""
    points = [point for own in texts for point in own]
    surrogate = Surrogate([], list(dict.fromkeys(point.network for point in points)), terms=terms)
    known = surrogate.inputs([point.network for point in points], [point.share for point in points])
    of_text = np.repeat(np.eye(len(texts)), [len(own) for own in texts], axis=0)
    time = np.log([[point.share] for point in points])
    misjudged = np.vstack([misjudged_columns(surrogate, own) for own in texts])
    features = np.hstack([known.features, misjudged, of_text, of_text * time, of_text * (time == 0)])
    spreads = WIDER * surrogate.spread, [MISJUDGED] * misjudged.shape[1], [1.0] * 3 * len(texts)
    spread = np.concatenate(spreads)
    same = (known.effects[:, None] == known.effects).sum(axis=-1) * (of_text @ of_text.T)
    covariance = (features * spread**2) @ features.T + OWN**2 * same + NOISE**2 * np.eye(len(points))
    gain = spread[:, None] ** 2 * np.linalg.solve(covariance, features).T
    means = gain @ np.log([point.loss for point in points])
    errors = np.sqrt(np.diag(np.diag(spread**2) - gain @ (features * spread**2)))
    return means[: len(terms)], errors[: len(terms)]


def fitted_terms(texts: list[dict[Point, bool]], terms: dict = TERMS) -> dict[str, tuple[float, float]]:
    """The terms with means fitted to texts, but for the offset and the slope in T, which differ between texts."""
    means = dict(zip(terms, fit(texts, terms)[0], strict=True))
    return {term: (means[term] if {*term} - {"T"} else mean, spread) for term, (mean, spread) in terms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", choices=[*TEXTS, AGAIN_TEXT], help="of the folders")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of searches")
    arguments = parser.parse_args()
    if arguments.text and not arguments.folders:
        parser.error("give the folders of searches after the text")
    if arguments.folders:
        write_trainings(arguments.text, arguments.folders)
    points = {text: read_points(text) for text in TEXTS}
    fits = {"all": fit([*points.values()]), **{text: fit([own]) for text, own in points.items()}}
    titles = [f"{name}, {len(points[name])} losses" if name in points else "both texts" for name in fits]
    print_row("term", "prior of the surrogate", *titles, header=True)
    for index, (term, (mean, spread)) in enumerate(TERMS.items()):
        found = [f"{means[index]:.4f} ± {errors[index]:.4f}" for means, errors in fits.values()]
        print_row(term or "1", f"{mean:.4f} ± {spread:.4f}", *found)
    print(
        json.dumps({name: dict(zip(TERMS, means.round(5).tolist(), strict=True)) for name, (means, _) in fits.items()})
    )


if __name__ == "__main__":
    run_command(main)
