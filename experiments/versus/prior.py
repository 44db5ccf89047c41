"""Fit the prior means of the law: `python experiments/versus/prior.py FOLDER [FOLDER ...]`.

The data are the grids of experiments/frontier and all trainings in the folders of run.py, at each rung and at the end.
They give the posterior of the law's factors, from a prior WIDER times as wide as that of nas/networks/law.py. Each text
has an offset, a slope in T, and an offset of whole trainings, whose learning rates have decayed. The last line is JSON.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row
from nas.core.errors import run_command
from nas.core.files import read_yaml
from nas.core.pattern import interleaved
from nas.core.run_folder import RESULTS, TRIALS
from nas.networks.law import NOISE, OWN, TERMS, Law, Point
from nas.networks.space import make_network
from nas.networks.trials import RUNGS

GRIDS = [Path(__file__).parents[1] / "frontier" / name for name in ("wikitext2.csv", "library.csv")]
WIDER = 3


def read_grid(file: Path) -> list[Point]:
    points = []
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            network = make_network(int(row["vocab_size"]), int(row["d_model"]), interleaved(int(row["blocks"])))
            losses = {share: row[str(share)] for share, _ in RUNGS} | {1.0: row["bits_per_byte"]}
            points += [Point(network, share, float(loss)) for share, loss in losses.items() if loss]
    return points


def read_trainings(folder: Path) -> list[Point]:
    """The trials and trainings in a folder of run.py."""
    points = []
    for file in sorted(folder.glob(f"*/{TRIALS}/*/config.yaml")):
        content, run = read_yaml(file), file.parent
        network = make_network(content["data"]["vocab_size"], content["model"]["d_model"], content["pattern"])
        for trial in map(read_yaml, sorted(run.glob("trial-*.yaml"))):
            share = min((share for share, _ in RUNGS), key=lambda own: abs(own - trial["step"] / trial["of_steps"]))
            points.append(Point(network, share, trial["valid"]["bits_per_byte"]))
        if (run / RESULTS).exists():
            points.append(Point(network, 1.0, read_yaml(run / RESULTS)["valid"]["bits_per_byte"]))
    return points


def fit(texts: list[list[Point]]) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard errors of the factors of TERMS. texts: the points of each text."""
    points = [point for own in texts for point in own]
    law = Law([], list(dict.fromkeys(point.network for point in points)))
    known = law.inputs([point.network for point in points], [point.text for point in points])
    of_text = np.repeat(np.eye(len(texts)), [len(own) for own in texts], axis=0)
    time = np.log([[point.text] for point in points])
    features = np.hstack([known.features, of_text, of_text * time, of_text * (time == 0)])
    count = features.shape[1] - known.features.shape[1]
    mean, spread = np.append(law.mean, np.zeros(count)), np.append(WIDER * law.spread, np.ones(count))
    same = (known.effects[:, None] == known.effects).sum(axis=-1) * (of_text @ of_text.T)
    covariance = (features * spread**2) @ features.T + OWN**2 * same + NOISE**2 * np.eye(len(points))
    gain = spread[:, None] ** 2 * np.linalg.solve(covariance, features).T
    means = mean + gain @ (np.log([point.loss for point in points]) - features @ mean)
    errors = np.sqrt(np.diag(np.diag(spread**2) - gain @ (features * spread**2)))
    return means[: len(TERMS)], errors[: len(TERMS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of run.py, all of WikiText-2")
    folders = parser.parse_args().folders
    wikitext, library = map(read_grid, GRIDS)
    wikitext += [point for folder in folders for point in read_trainings(folder)]
    means, errors = fit([wikitext, library])
    print_row("term", "prior of the law", f"fit to {len(wikitext) + len(library)} losses", header=True)
    for (term, (mean, spread)), found, error in zip(TERMS.items(), means, errors, strict=True):
        print_row(term or "1", f"{mean:.4f} ± {spread:.4f}", f"{found:.4f} ± {error:.4f}")
    print(json.dumps(dict(zip(TERMS, means.round(5).tolist(), strict=True))))


if __name__ == "__main__":
    run_command(main)
