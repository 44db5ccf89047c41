"""Fit the prior means of the surrogate: `python experiments/prior/fit.py`.

The data are the losses of random networks in losses.csv (run.py). They give the posterior of the surrogate's factors,
from means of 0 and WIDER times the spreads of nas/search/surrogate.py. Each text has an offset, a slope in T, and an
offset of whole trainings, whose learning rates have decayed. The last line is JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, read_table
from nas.core.errors import run_command
from nas.core.pattern import expand
from nas.search.space import make_network
from nas.search.surrogate import NOISE, OWN, TERMS, Point, Surrogate

LOSSES = Path(__file__).with_name("losses.csv")
WIDER = 3


def read_points() -> dict[str, list[Point]]:
    """The losses of each text."""
    found = {}
    for row in read_table(LOSSES):
        network = make_network(int(row["vocab_size"]), int(row["d_model"]), expand(row["blocks"]))
        point = Point(network, float(row["share"]), float(row["bits_per_byte"]))
        found.setdefault(row["text"], []).append(point)
    return found


def fit(texts: list[list[Point]], terms: dict = TERMS) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard errors of the factors of the terms, and of other operations at the end."""
    points = [point for own in texts for point in own]
    surrogate = Surrogate([], list(dict.fromkeys(point.network for point in points)), terms=terms)
    known = surrogate.inputs([point.network for point in points], [point.share for point in points])
    of_text = np.repeat(np.eye(len(texts)), [len(own) for own in texts], axis=0)
    time = np.log([[point.share] for point in points])
    features = np.hstack([known.features, of_text, of_text * time, of_text * (time == 0)])
    spread = np.concatenate([WIDER * surrogate.spread, [1.0] * 3 * len(texts)])
    same = (known.effects[:, None] == known.effects).sum(axis=-1) * (of_text @ of_text.T)
    covariance = (features * spread**2) @ features.T + OWN**2 * same + NOISE**2 * np.eye(len(points))
    gain = spread[:, None] ** 2 * np.linalg.solve(covariance, features).T
    means = gain @ np.log([point.loss for point in points])
    errors = np.sqrt(np.diag(np.diag(spread**2) - gain @ (features * spread**2)))
    count = len(surrogate.spread)
    return [*terms, *surrogate.names, *(f"{name}, T" for name in surrogate.names)], means[:count], errors[:count]


def main() -> None:
    texts = read_points()
    fits = {"all": fit([*texts.values()]), **{text: fit([own]) for text, own in texts.items()}}
    titles = [f"{name}, {len(texts[name])} losses" if name in texts else "all texts" for name in fits]
    print_row("term", "prior of the surrogate", *titles, header=True)
    for index, term in enumerate(fits["all"][0]):
        found = [f"{means[index]:.4f} ± {errors[index]:.4f}" for _, means, errors in fits.values()]
        mean, spread = TERMS.get(term, (0, 0))
        print_row(term or "1", f"{mean:.4f} ± {spread:.4f}", *found)
    names, means, _ = fits["all"]
    print(json.dumps(dict(zip(names, means.round(4).tolist(), strict=True))))


if __name__ == "__main__":
    run_command(main)
