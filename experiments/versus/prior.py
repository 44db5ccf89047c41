"""Fit the prior means of the law: `python experiments/versus/prior.py [TEXT FOLDER ...]`.

The data are the grids of experiments/frontier and trainings.csv: trainings of run.py at each rung and at the end. With
a text, wikitext2 or stdlib, and folders of run.py, the program first replaces the trainings of this text in the file.
They give the posterior of the law's factors, from means of 0 and WIDER times the spreads of nas/networks/law.py. A
training that two searches repeated counts once. Each text has an offset, a slope in T, and an offset of whole
trainings, whose learning rates have decayed. Also tells how well the law predicts the ends of trainings from their
trials. The last line is JSON.
"""

import argparse
import csv
import itertools
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import kendall_tau, print_row
from nas.core.errors import run_command
from nas.core.files import read_yaml
from nas.core.pattern import abbreviate, expand, interleaved
from nas.core.run_folder import RESULTS, TRIALS
from nas.networks.law import NOISE, OWN, TERMS, Law, Point
from nas.networks.space import Network, make_network
from nas.networks.trials import RUNGS

TEXTS = "wikitext2", "stdlib"
GRIDS = Path(__file__).parents[1] / "frontier"
TRAININGS = Path(__file__).with_name("trainings.csv")
COLUMNS = "text", "search", "vocab_size", "d_model", "blocks", "share", "bits_per_byte"
WIDER = 3


def grid_network(row: dict[str, str]) -> Network:
    """The network of a row of a grid."""
    return make_network(int(row["vocab_size"]), int(row["d_model"]), interleaved(int(row["blocks"])))


def read_grid(text: str) -> list[Point]:
    points = []
    with (GRIDS / f"{text}.csv").open(newline="") as rows:
        for row in csv.DictReader(rows):
            network = grid_network(row)
            losses = {share: row[str(share)] for share, *_ in RUNGS} | {1.0: row["bits_per_byte"]}
            points += [Point(network, share, float(loss)) for share, loss in losses.items() if loss]
    return points


def write_trainings(text: str, folders: list[Path]) -> None:
    """Replace the losses of a text in TRAININGS by those of all trials and trainings in folders of run.py."""
    rows = [tuple(row.values()) for row in read_rows() if row["text"] != text]
    for file in (file for folder in folders for file in sorted(folder.glob(f"*/{TRIALS}/*/config.yaml"))):
        content, run = read_yaml(file), file.parent
        own = content["data"]["vocab_size"], content["model"]["d_model"], abbreviate(content["pattern"])
        for trial in map(read_yaml, sorted(run.glob("trial-*.yaml"))):
            done = trial["step"] / trial["of_steps"]
            share = min((share for share, *_ in RUNGS), key=lambda share: abs(share - done))
            rows.append((text, file.parts[-4], *own, share, round(trial["valid"]["bits_per_byte"], 5)))
        if (run / RESULTS).exists():
            rows.append((text, file.parts[-4], *own, 1.0, round(read_yaml(run / RESULTS)["valid"]["bits_per_byte"], 5)))
    with TRAININGS.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])


def read_rows() -> list[dict]:
    with TRAININGS.open(newline="") as file:
        return list(csv.DictReader(file))


def read_trainings(text: str) -> list[Point]:
    return [
        Point(
            make_network(int(row["vocab_size"]), int(row["d_model"]), expand(row["blocks"])),
            float(row["share"]),
            float(row["bits_per_byte"]),
        )
        for row in read_rows()
        if row["text"] == text
    ]


def fit(texts: list[list[Point]], terms: dict = TERMS) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard errors of the factors of the terms. texts: the points of each text."""
    texts = [list(dict.fromkeys(own)) for own in texts]
    points = [point for own in texts for point in own]
    law = Law([], list(dict.fromkeys(point.network for point in points)), terms=terms)
    known = law.inputs([point.network for point in points], [point.share for point in points])
    of_text = np.repeat(np.eye(len(texts)), [len(own) for own in texts], axis=0)
    time = np.log([[point.share] for point in points])
    features = np.hstack([known.features, of_text, of_text * time, of_text * (time == 0)])
    spread = np.append(WIDER * law.spread, np.ones(features.shape[1] - known.features.shape[1]))
    same = (known.effects[:, None] == known.effects).sum(axis=-1) * (of_text @ of_text.T)
    covariance = (features * spread**2) @ features.T + OWN**2 * same + NOISE**2 * np.eye(len(points))
    gain = spread[:, None] ** 2 * np.linalg.solve(covariance, features).T
    means = gain @ np.log([point.loss for point in points])
    errors = np.sqrt(np.diag(np.diag(spread**2) - gain @ (features * spread**2)))
    return means[: len(terms)], errors[: len(terms)]


def fitted_terms(texts: list[list[Point]], terms: dict = TERMS) -> dict[str, tuple[float, float]]:
    """The terms with means fitted to texts, but for the offset and the slope in T, which differ between texts."""
    means = dict(zip(terms, fit(texts, terms)[0], strict=True))
    return {term: (means[term] if {*term} - {"T"} else mean, spread) for term, (mean, spread) in terms.items()}


def predict_ends(points: list[Point], terms: dict) -> tuple[float, float]:
    """Kendall's tau of the law, given the trials of trained networks, with their losses at the end; and how far the
    network that it prefers is behind the best one.
    """
    ends: dict = {}
    for point in points:
        if point.share == 1:
            ends.setdefault(point.network, []).append(point.loss)
    networks, truth = [*ends], [float(np.mean(losses)) for losses in ends.values()]
    predicted = Law([point for point in points if point.share < 1], networks, terms=terms).predict(networks)
    return kendall_tau(predicted.tolist(), truth), truth[int(predicted.argmin())] / min(truth) - 1


def print_ends(points: dict[str, list[Point]]) -> None:
    """What the terms of the decay add to the prediction of the ends, with means of one text, for both texts."""
    print_row("means of", "terms with E", "trainings of", "Kendall's tau", "its best, behind the best", header=True)
    for text, decay in itertools.product(TEXTS, (False, True)):
        without = {term: (0.0, 1e-9) for term in TERMS if "E" in term and not decay}
        terms = fitted_terms([points[text]], TERMS | without)
        for other, own in points.items():
            tau, behind = predict_ends(own, terms)
            print_row(text, "yes" if decay else "no", other, f"{tau:.3f}", f"{behind:.2%}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", choices=TEXTS, help="of the folders")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of run.py")
    arguments = parser.parse_args()
    if arguments.text and not arguments.folders:
        parser.error("give the folders of run.py after the text")
    if arguments.folders:
        write_trainings(arguments.text, arguments.folders)
    points = {text: read_grid(text) + read_trainings(text) for text in TEXTS}
    print_ends(points)
    fits = {"all": fit([*points.values()]), **{text: fit([own]) for text, own in points.items()}}
    titles = [f"{name}, {len({*points[name]})} losses" if name in points else "both texts" for name in fits]
    print_row("term", "prior of the law", *titles, header=True)
    for index, (term, (mean, spread)) in enumerate(TERMS.items()):
        found = [f"{means[index]:.4f} ± {errors[index]:.4f}" for means, errors in fits.values()]
        print_row(term or "1", f"{mean:.4f} ± {spread:.4f}", *found)
    print(
        json.dumps({name: dict(zip(TERMS, means.round(5).tolist(), strict=True)) for name, (means, _) in fits.items()})
    )


if __name__ == "__main__":
    run_command(main)
