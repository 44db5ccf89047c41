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
    law, points = Law([], networks), [point for own in texts for point in own]
    known = law.inputs([point.network for point in points], [point.share for point in points])
    columns = [list(row) for row in known.features]
    priors = [*zip([0] * len(law.mean), prior.WIDER * law.spread), *[(0, 1)] * 6]
    effects = sorted(
        {(text, key) for text, own in enumerate(texts) for p in own for key in (p.network, p.network[:2])}, key=str
    )
    priors += [(0, OWN)] * len(effects)
    of_text = [text for text, own in enumerate(texts) for _ in own]
    for row, point, text in zip(columns, points, of_text, strict=True):
        for value in (1.0, np.log(point.share), point.share == 1):
            row += [value * (text == number) for number in range(2)]
        row += [float(effect in ((text, point.network), (text, point.network[:2]))) for effect in effects]
    means, spreads = np.array(priors, dtype=float).T
    rows = np.vstack([np.array(columns) / NOISE, np.diag(1 / spreads)])
    wanted = np.concatenate([np.log([point.loss for point in points]) / NOISE, means / spreads])
    expected = np.linalg.lstsq(rows, wanted, rcond=None)[0][: len(TERMS)]
    errors = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))[: len(TERMS)]
    found = prior.fit([[*own, *own[:3]] for own in texts])  # a repeated training counts once
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    np.testing.assert_allclose(found[1], errors, rtol=1e-4)
