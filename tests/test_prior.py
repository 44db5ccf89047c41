"""The fit of the law's prior, against a slow reference."""

import numpy as np

from nas.networks.law import NOISE, OWN, TERMS, Law, Point
from nas.networks.space import make_network
from tests.making import load_script


def test_the_fit_is_a_regression_with_random_effects_of_networks_and_sizes():
    """Least squares in which every effect is a column, and every prior a row. The law has seen no text."""
    prior, generator = load_script("versus/prior"), np.random.default_rng(0)
    patterns = [["attention"], ["dense"], ["attention", "dense"], ["dense", "attention", "dense"]]
    networks = [make_network(size, 8 * size // 100, own) for size in (800, 1600) for own in patterns]
    texts = [[Point(n, t, 2 + generator.random()) for n in networks[:count] for t in (0.125, 1.0)] for count in (8, 6)]
    full = [[row % 4 < 2 for row in range(len(own))] for own in texts]  # judged at full lengths, if it is a trial
    law, points = Law([], networks), [point for own in texts for point in own]
    known = law.inputs([point.network for point in points], [point.share for point in points])
    columns = [list(row) for row in known.features]
    priors = [*zip([0] * len(law.mean), prior.WIDER * law.spread), *[(0, prior.MISJUDGED)] * 8, *[(0, 1)] * 6]
    effects = sorted(
        {(text, key) for text, own in enumerate(texts) for p in own for key in (p.network, p.network[:2])}, key=str
    )
    priors += [(0, OWN)] * len(effects)
    of_text = [text for text, own in enumerate(texts) for _ in own]
    for row, point, text, long in zip(columns, points, of_text, [flag for own in full for flag in own], strict=True):
        blocks = point.network.blocks
        attending = [place for place, block in enumerate(blocks) if block == "attention"]
        wrong = [0.0] * 4
        if long and point.share < 1 and attending:
            places = np.linspace(-1, 1, len(blocks)) if len(blocks) > 1 else np.zeros(1)
            others = [places[place] for place in range(len(blocks)) if place not in attending]
            later = np.mean(places[attending]) - np.mean(others) if others else 0.0
            share = np.log((len(attending) + 0.5) / (len(blocks) / 2 + 0.5))
            wrong = [1.0, np.log(len(blocks)) - law.centre[2], share, later]
        row += [*wrong, *(np.log(point.share) * np.array(wrong))]
        for value in (1.0, np.log(point.share), point.share == 1):
            row += [value * (text == number) for number in range(2)]
        row += [float(effect in ((text, point.network), (text, point.network[:2]))) for effect in effects]
    means, spreads = np.array(priors, dtype=float).T
    rows = np.vstack([np.array(columns) / NOISE, np.diag(1 / spreads)])
    wanted = np.concatenate([np.log([point.loss for point in points]) / NOISE, means / spreads])
    expected = np.linalg.lstsq(rows, wanted, rcond=None)[0][: len(TERMS)]
    errors = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))[: len(TERMS)]
    found = prior.fit([dict(zip(own, flags, strict=True)) for own, flags in zip(texts, full, strict=True)])
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    np.testing.assert_allclose(found[1], errors, rtol=1e-4)
