"""Fit the prior means of the surrogate: `python experiments/prior/fit.py`.

The first step fits losses of networks alone, on the texts of SOURCES: those of run.py, in losses.csv, and those of
earlier searches and grids, in earlier.csv. Their trials of full attention were judged at full lengths, which they had
not learned, so these have terms of their own. The fit begins with means of 0 and WIDER times the spreads of ALONE. The
second step fits losses of mixtures, of COUNTED. It begins with PART of the means of the first step, and the spreads of
MIXED. Each text has an offset, a slope in T, and an offset of whole trainings, whose learning rates have decayed. The
prior of another text has the posterior means, and the spreads of ALONE or MIXED. The offset and the slope in T stay as
they are.

The tables show the log likelihoods of the losses of mixtures with several parts of the means of the first step, with
those of the vocabulary and without, and all terms. The last lines have the terms of nas/search/surrogate.py.
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
from nas.search.surrogate import ALONE, CENTRE, MIXED, Point, Prior, Surrogate, log_sizes

HERE = Path(__file__).parent
SOURCES, COUNTED = ("wikitext-2",), ("kernel",)  # texts of the library's prior
WIDER, PART = 3, 0.5
PARTS = 0.0, 0.25, 0.5, 0.75, 1.0  # that are compared
MISJUDGED = 0.02  # standard deviation of the terms of trials that were judged at full lengths
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
    """The posterior of the surrogate's factors.

    names: of the factors; those of other operations stand at the end. means, errors: of each. likelihood: the logarithm
    of that of the losses.
    """

    def __init__(self, texts: list[Losses], prior: Prior):
        points = [point for losses in texts for point in losses]
        surrogate = Surrogate([], list(dict.fromkeys(point.network for point in points)), prior=prior)
        known = surrogate.inputs([point.network for point in points], [point.share for point in points])
        of_text = np.repeat(np.eye(len(texts)), [len(losses) for losses in texts], axis=0)
        time = np.log([[point.share] for point in points])
        misjudged = np.vstack([misjudged_columns(surrogate, losses) for losses in texts])
        features = np.hstack([known.features, misjudged, of_text, of_text * time, of_text * (time == 0)])
        others = [MISJUDGED] * misjudged.shape[1] + [1.0] * 3 * len(texts)
        spread, count = np.concatenate([surrogate.spread, others]), len(surrogate.spread)
        mean = np.append(surrogate.mean, np.zeros(len(others)))
        same = (known.effects[:, None] == known.effects).sum(axis=-1) * (of_text @ of_text.T)
        covariance = (features * spread**2) @ features.T + prior.own**2 * same + prior.noise**2 * np.eye(len(points))
        gain = spread[:, None] ** 2 * np.linalg.solve(covariance, features).T
        missed = np.log([point.loss for point in points]) - features @ mean
        variances = np.diag(np.diag(spread**2) - gain @ (features * spread**2))
        self.names = [*prior.terms, *surrogate.names, *(f"{name}, T" for name in surrogate.names)]
        self.means, self.errors = (mean + gain @ missed)[:count], np.sqrt(variances[:count])
        fit = missed @ np.linalg.solve(covariance, missed)
        self.likelihood = -0.5 * (fit + np.linalg.slogdet(2 * np.pi * covariance)[1])

    def prior(self, form: Prior, part: float = 1.0, vocabulary: float | None = None) -> Prior:
        """The prior of another text: a part of these means, and the spreads of a prior. vocabulary: another part for
        the terms of the vocabulary.
        """
        known, terms = dict(zip(self.names, self.means.tolist(), strict=True)), dict(form.terms)
        for term in terms.keys() - {"", "T"}:
            own = part if vocabulary is None or "V" not in term else vocabulary
            terms[term] = round(own * known[term], 4), terms[term][1]
        return form._replace(terms=terms)


def fit_alone(texts: Iterable[Losses]) -> Fit:
    terms = {term: (0.0, WIDER * spread) for term, (_, spread) in ALONE.terms.items()}
    wider = {"other": WIDER * ALONE.other, "other_text": WIDER * ALONE.other_text}
    return Fit([*texts], ALONE._replace(terms=terms, **wider))


def prior_of(alone: Iterable[Losses], mixed: Iterable[Losses]) -> Prior:
    """The prior of the losses of mixtures on another text."""
    known, mixed = fit_alone(alone).prior(MIXED, PART), [*mixed]
    return Fit(mixed, known).prior(MIXED) if mixed else known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    alone, mixed = read_points()
    source = fit_alone(alone[text] for text in SOURCES)
    counted = Fit([mixed[text] for text in COUNTED], source.prior(MIXED, PART))
    print_row(
        "part of the means of networks alone", *(f"{text}, {len(own)}" for text, own in mixed.items()), header=True
    )
    for vocabulary in None, 0.0:
        for part in PARTS:
            prior = source.prior(MIXED, part, vocabulary)
            name = f"{part:g}" + ("" if vocabulary is None else "; vocabulary 0")
            print_row(name, *(f"{Fit([own], prior).likelihood:.1f}" for own in mixed.values()))
    print()
    fits = {"networks alone, " + ", ".join(SOURCES): source, "mixtures, " + ", ".join(COUNTED): counted}
    print_row("term", *fits, header=True)
    for term in ALONE.terms:
        places = ((own, own.names.index(term)) for own in fits.values())
        print_row(term or "1", *(f"{own.means[index]:.4f} ± {own.errors[index]:.4f}" for own, index in places))
    for name, prior in ("ALONE", source.prior(ALONE)), ("MIXED", counted.prior(MIXED)):
        print(name, ", ".join(f'"{term}": ({mean:g}, {spread:g})' for term, (mean, spread) in prior.terms.items()))


if __name__ == "__main__":
    main()
