"""Fit the prior means of the surrogate: `python experiments/prior/fit.py`.

The data are losses of networks on several texts. Those of `kernel` and `stdlib` are of run.py, in losses.csv. Those of
earlier searches and grids are in earlier.csv. Their trials of full attention were judged at full lengths, which they
had not learned, so these have terms of their own. All give the posterior of the surrogate's factors, from means of 0
and WIDER times BETWEEN. Each text has an offset, a slope in T, and an offset of whole trainings, whose learning rates
have decayed. The prior of another text has the posterior means and the spreads BETWEEN. The offset and the slope in T
stay as they are. The last line has the TERMS of nas/search/surrogate.py, which are the prior of SOURCE.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, read_table
from nas.core.errors import run_command
from nas.core.pattern import expand
from nas.search.space import make_network
from nas.search.surrogate import CENTRE, NOISE, OWN, TERMS, Point, Surrogate, log_sizes

HERE = Path(__file__).parent
SOURCE = "wikitext-2"  # the text of the library's prior
WIDER = 3
MISJUDGED = 0.02  # standard deviation of the terms of trials that were judged at full lengths
# fmt: off
BETWEEN = {  # standard deviations of the factors between texts
    "": 3, "T": 0.1, "TT": 0.05, "V": 0.03, "D": 0.015, "N": 0.01, "VT": 0.006, "DT": 0.006, "NT": 0.004, "VV": 0.01,
    "DD": 0.015, "NN": 0.006, "VD": 0.008, "VN": 0.006, "DN": 0.008, "A": 0.008, "F": 0.006, "P": 0.005, "AA": 0.004,
    "FF": 0.006, "AF": 0.005, "PP": 0.005, "AT": 0.004, "FT": 0.004, "PT": 0.003, "AN": 0.005, "FN": 0.005,
    "AD": 0.005, "FD": 0.005, "VE": 0.005, "VVT": 0.003, "VVE": 0.003, "O": 0.02, "OT": 0.008,
}
# fmt: on


def read_points() -> dict[str, dict[Point, bool]]:
    """The losses of each text, and whether full lengths judged them."""
    found = {}
    for row in [*read_table(HERE / "losses.csv"), *read_table(HERE / "earlier.csv")]:
        network = make_network(int(row["vocab_size"]), int(row["d_model"]), expand(row["blocks"]))
        point = Point(network, float(row["share"]), float(row["bits_per_byte"]))
        found.setdefault(row["text"], {})[point] = row.get("lengths") == "full"
    return found


def misjudged_columns(surrogate: Surrogate, points: dict[Point, bool]) -> np.ndarray:
    """[P, 8] for trials of full attention at full lengths: an offset, N, A and P, and these times T. 0 for others."""
    rows = []
    for point, full in points.items():
        _, _, blocks, attending, _, later, _ = log_sizes(point.network, surrogate.d_ffn)
        full = full and point.share < 1 and any(block.split()[0] == "attention" for block in point.network.blocks)
        own = full * np.array([1.0, blocks - CENTRE[2], attending, later])
        rows.append([*own, *(own * np.log(point.share))])
    return np.array(rows)


def fit(texts: list[dict[Point, bool]]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of the factors, of which those of other operations stand at the end; their means and standard errors."""
    terms = {term: (0.0, spread) for term, spread in BETWEEN.items()}
    points = [point for own in texts for point in own]
    surrogate = Surrogate([], list(dict.fromkeys(point.network for point in points)), terms=terms)
    known = surrogate.inputs([point.network for point in points], [point.share for point in points])
    of_text = np.repeat(np.eye(len(texts)), [len(own) for own in texts], axis=0)
    time = np.log([[point.share] for point in points])
    misjudged = np.vstack([misjudged_columns(surrogate, own) for own in texts])
    features = np.hstack([known.features, misjudged, of_text, of_text * time, of_text * (time == 0)])
    others = [MISJUDGED] * misjudged.shape[1] + [1.0] * 3 * len(texts)
    spread = np.concatenate([WIDER * surrogate.spread, others])
    same = (known.effects[:, None] == known.effects).sum(axis=-1) * (of_text @ of_text.T)
    covariance = (features * spread**2) @ features.T + OWN**2 * same + NOISE**2 * np.eye(len(points))
    gain = spread[:, None] ** 2 * np.linalg.solve(covariance, features).T
    means = gain @ np.log([point.loss for point in points])
    errors = np.sqrt(np.diag(np.diag(spread**2) - gain @ (features * spread**2)))
    count = len(surrogate.spread)
    return [*terms, *surrogate.names, *(f"{name}, T" for name in surrogate.names)], means[:count], errors[:count]


def prior_of(texts: list[dict[Point, bool]]) -> dict[str, tuple[float, float]]:
    """The terms of the surrogate for another text."""
    names, means, _ = fit(texts)
    known = dict(zip(names, means.round(4).tolist(), strict=True))
    return {term: TERMS[term] if term in ("", "T") else (known[term], spread) for term, spread in BETWEEN.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    texts = read_points()
    fits = {"all": fit([*texts.values()]), **{text: fit([own]) for text, own in texts.items()}}
    titles = [f"{name}, {len(texts[name])} losses" if name in texts else "all texts" for name in fits]
    print_row("term", *titles, header=True)
    for term in BETWEEN:
        cells = []
        for names, means, errors in fits.values():
            index = names.index(term)
            cells.append(f"{means[index]:.4f} ± {errors[index]:.4f}")
        print_row(term or "1", *cells)
    terms = prior_of([texts[SOURCE]])
    print(", ".join(f'"{term}": ({mean:g}, {spread:g})' for term, (mean, spread) in terms.items()))


if __name__ == "__main__":
    run_command(main)
