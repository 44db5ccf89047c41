"""Fit the prior means of the surrogate: `python experiments/prior/fit.py`.

The first step fits losses of networks alone, on the texts of SOURCES: those of run.py, in losses.csv, and those of
earlier searches and grids, in earlier.csv. Their trials of full attention were judged at full lengths, which they had
not learned, so these have terms of their own. The fit begins with means of 0 and WIDER times BETWEEN. The second step
fits losses of mixtures, of COUNTED. It begins with PART of the means of the first step and PART of BETWEEN, because
cache and counts know a part of what networks differ in. Each text has an offset, a slope in T, and an offset of whole
trainings, whose learning rates have decayed. The prior of another text has the posterior means, and PART of BETWEEN.
The offset and the slope in T stay as they are.

The tables show the log likelihoods of the losses of mixtures, by which PART, OWN and NOISE were chosen, and all terms.
The last line has the TERMS of nas/search/surrogate.py.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, read_table
from nas.core.pattern import expand
from nas.search.space import make_network
from nas.search.surrogate import CENTRE, NOISE, OWN, TERMS, Point, Surrogate, log_sizes

HERE = Path(__file__).parent
SOURCES, COUNTED = ("wikitext-2",), ("kernel",)  # texts of the library's prior
WIDER, PART = 3, 0.5
PARTS = 0.0, 0.25, 0.5, 1.0  # that are compared
ALONE = 0.006, 0.004  # OWN and NOISE of networks alone
MISJUDGED = 0.02  # standard deviation of the terms of trials that were judged at full lengths
# fmt: off
BETWEEN = {  # standard deviations of the factors between texts, of networks alone
    "": 3, "T": 0.1, "TT": 0.05, "V": 0.03, "D": 0.015, "N": 0.01, "VT": 0.006, "DT": 0.006, "NT": 0.004, "VV": 0.01,
    "DD": 0.015, "NN": 0.006, "VD": 0.008, "VN": 0.006, "DN": 0.008, "A": 0.008, "F": 0.006, "P": 0.005, "AA": 0.004,
    "FF": 0.006, "AF": 0.005, "PP": 0.005, "AT": 0.004, "FT": 0.004, "PT": 0.003, "AN": 0.005, "FN": 0.005,
    "AD": 0.005, "FD": 0.005, "VE": 0.005, "VVT": 0.003, "VVE": 0.003, "O": 0.02, "OT": 0.008,
}
# fmt: on
Terms = dict[str, tuple[float, float]]
Losses = dict[Point, bool]  # and whether full lengths judged them


def read_points() -> tuple[dict[str, Losses], dict[str, Losses]]:
    """The losses of each text: of networks alone, and of their mixtures."""
    alone, mixed = {}, {}
    for row in [*read_table(HERE / "losses.csv"), *read_table(HERE / "earlier.csv")]:
        about = make_network(int(row["vocab_size"]), int(row["d_model"]), expand(row["blocks"])), float(row["share"])
        point = Point(*about, float(row["bits_per_byte"]))
        alone.setdefault(row["text"], {})[point] = row.get("lengths") == "full"
        if row.get("mixture"):
            mixed.setdefault(row["text"], {})[Point(*about, float(row["mixture"]))] = False
    return alone, mixed


def misjudged_columns(surrogate: Surrogate, points: Losses) -> np.ndarray:
    """[P, 8] for trials of full attention at full lengths: an offset, N, A and P, and these times T. 0 for others."""
    rows = []
    for point, full in points.items():
        _, _, blocks, attending, _, later, _ = log_sizes(point.network, surrogate.d_ffn)
        full = full and point.share < 1 and any(block.split()[0] == "attention" for block in point.network.blocks)
        own = full * np.array([1.0, blocks - CENTRE[2], attending, later])
        rows.append([*own, *(own * np.log(point.share))])
    return np.array(rows)


class Fit:
    """The posterior of the surrogate's factors. terms: their prior. wider: times the spread of those of other
    operations. own, noise: as OWN and NOISE.

    names: of the factors; those of other operations stand at the end. means, errors: of each. likelihood: the logarithm
    of that of the losses.
    """

    def __init__(self, texts: list[Losses], terms: Terms, wider: float = 1.0, own: float = OWN, noise: float = NOISE):
        points = [point for losses in texts for point in losses]
        surrogate = Surrogate([], list(dict.fromkeys(point.network for point in points)), terms=terms)
        known = surrogate.inputs([point.network for point in points], [point.share for point in points])
        of_text = np.repeat(np.eye(len(texts)), [len(losses) for losses in texts], axis=0)
        time = np.log([[point.share] for point in points])
        misjudged = np.vstack([misjudged_columns(surrogate, losses) for losses in texts])
        features = np.hstack([known.features, misjudged, of_text, of_text * time, of_text * (time == 0)])
        others = [MISJUDGED] * misjudged.shape[1] + [1.0] * 3 * len(texts)
        spread, count = np.concatenate([surrogate.spread, others]), len(surrogate.spread)
        spread[len(terms) : count] *= wider
        mean = np.append(surrogate.mean, np.zeros(len(others)))
        same = (known.effects[:, None] == known.effects).sum(axis=-1) * (of_text @ of_text.T)
        covariance = (features * spread**2) @ features.T + own**2 * same + noise**2 * np.eye(len(points))
        gain = spread[:, None] ** 2 * np.linalg.solve(covariance, features).T
        missed = np.log([point.loss for point in points]) - features @ mean
        variances = np.diag(np.diag(spread**2) - gain @ (features * spread**2))
        self.names = [*terms, *surrogate.names, *(f"{name}, T" for name in surrogate.names)]
        self.means, self.errors = (mean + gain @ missed)[:count], np.sqrt(variances[:count])
        fit = missed @ np.linalg.solve(covariance, missed)
        self.likelihood = -0.5 * (fit + np.linalg.slogdet(2 * np.pi * covariance)[1])

    def terms(self, part: float = PART) -> Terms:
        """The prior of another text, in which everything differs by a part."""
        known = dict(zip(self.names, (part * self.means).tolist(), strict=True))
        return {term: TERMS[term] if term in ("", "T") else (known[term], PART * own) for term, own in BETWEEN.items()}


def fit_alone(texts: Iterable[Losses]) -> Fit:
    return Fit([*texts], {term: (0.0, WIDER * spread) for term, spread in BETWEEN.items()}, WIDER / PART, *ALONE)


def prior_of(alone: Iterable[Losses], mixed: Iterable[Losses]) -> Terms:
    """The terms of the surrogate for another text."""
    found = Fit([*mixed], fit_alone(alone).terms()).terms(1.0)
    return {term: (round(mean, 4), spread) for term, (mean, spread) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    alone, mixed = read_points()
    source = fit_alone(alone[text] for text in SOURCES)
    counted = Fit([mixed[text] for text in COUNTED], source.terms())
    print_row("prior of mixtures", *(f"{text}, {len(own)} losses" for text, own in mixed.items()), header=True)
    priors = {f"{part:g} of the means of networks alone": source.terms(part) for part in PARTS}
    for name, terms in {**priors, f"the fit to {', '.join(COUNTED)}": counted.terms(1.0)}.items():
        rows = (None if "the fit" in name and text in COUNTED else Fit([own], terms) for text, own in mixed.items())
        print_row(name, *(row and f"{row.likelihood:.1f}" for row in rows))
    print()
    fits = {"networks alone, " + ", ".join(SOURCES): source, "mixtures, " + ", ".join(COUNTED): counted}
    fits |= {f"mixtures, {text}": Fit([own], source.terms()) for text, own in mixed.items() if text not in COUNTED}
    print_row("term", *fits, header=True)
    for term in BETWEEN:
        places = ((own, own.names.index(term)) for own in fits.values())
        print_row(term or "1", *(f"{own.means[index]:.4f} ± {own.errors[index]:.4f}" for own, index in places))
    terms = prior_of([alone[text] for text in SOURCES], [mixed[text] for text in COUNTED])
    print(", ".join(f'"{term}": ({mean:g}, {spread:g})' for term, (mean, spread) in terms.items()))


if __name__ == "__main__":
    main()
