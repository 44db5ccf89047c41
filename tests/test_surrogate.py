"""The surrogate model of the losses."""

import numpy as np
import pytest

from nas.core.pattern import expand
from nas.search.space import Network, make_network
from nas.search.surrogate import AGAIN, ALONE, CENTRE, MIXED, Point, Surrogate, Text


@pytest.mark.parametrize("prior", [MIXED, ALONE], ids=["mixed", "alone"])
@pytest.mark.parametrize("passes", [1.0, 6.0])
def test_the_surrogate_is_a_regression_with_effects_of_its_own_as_a_slow_reference(passes, prior):
    """Weighted least squares, with the prior means as further rows; draws have the same means and errors."""
    generator = np.random.default_rng(0)
    networks = [make_network(*values) for values in ((1000, 64, expand("ad")), (1000, 64, expand("daadd8x")))]
    networks.append(make_network(4000, 96, expand("dc")))
    points = [Point(network, text, 2 + generator.random()) for network in networks[:2] for text in (0.125, 0.25)]
    logs = np.log([[n.vocab_size, n.d_model, len(n.blocks)] for n in networks])
    # Attending blocks, widths of 4x, and how much later attention stands, by hand
    given = {0: (1, 1, -2.0), 1: (2, 4, -0.25 - 1 / 6), 2: (0, 1, 0.0)}
    shapes, names = [(1000, 64), (4000, 96)], [str(network) for network in networks]
    known = prior.terms | (AGAIN if passes > 1 else {})
    spreads = np.array([*(spread for _, spread in known.values()), prior.other, prior.other_text, *[prior.own] * 5])
    means = np.array([*(mean for mean, _ in known.values()), *[0] * 7])

    def row(network, text):
        index = networks.index(network)
        attends, widths, later = given[index]
        half = len(network.blocks) / 2 + 0.5
        values = [*(logs[index] - CENTRE), np.log(text), np.log((attends + 0.5) / half)]
        values += [np.log((widths + 0.5) / half), later, attends == 0, text == 1, max(0, passes * text - 1)]
        values = dict(zip("VDNTAFPOERW", [*values, network.vocab_size * 300 / 900_000], strict=True))
        conv = np.log1p(network.blocks.count("conv"))
        terms = [np.prod([values[letter] for letter in term]) for term in known]
        own = [float(network[:2] == shape) for shape in shapes] + [float(str(network) == name) for name in names]
        return [*terms, conv, conv * np.log(text), *own]

    rows = np.array([row(point.network, point.share) for point in points]) / prior.noise
    q, r = np.linalg.qr(np.concatenate([rows, np.diag(1 / spreads)]))
    values = np.concatenate([np.log([point.loss for point in points]) / prior.noise, means / spreads])
    factors = np.linalg.solve(r, q.T @ values)
    surrogate = Surrogate(points, networks, prior=prior, text=Text(passes, 900_000))
    ends = np.array([row(network, 1) for network in networks])
    np.testing.assert_allclose(surrogate.predict(networks), np.exp(ends @ factors), rtol=1e-6)
    errors = [np.linalg.norm(np.linalg.solve(r.T, end - ends[1])) for end in ends]
    np.testing.assert_allclose(surrogate.errors(networks, networks[1]), errors, rtol=1e-4, atol=1e-4)
    draws = surrogate.draw(networks, 20_000, np.random.default_rng(1))
    before = surrogate.sample(networks[:1])
    surrogate.predict([make_network(900, 8, ["dense"])])  # other predictions do not change draws
    np.testing.assert_array_equal(surrogate.sample(networks[:1]), before)
    spread = np.linalg.norm(np.linalg.solve(r.T, ends.T), axis=0).max()
    np.testing.assert_allclose(draws.mean(axis=0), ends @ factors, atol=4 * spread / 20_000**0.5)
    np.testing.assert_allclose((draws - draws[:, [1]]).std(axis=0), errors, rtol=0.03, atol=1e-6)
    assert np.isfinite(Surrogate([], networks).draw(networks, 3, generator)).all()  # before the first trial


def test_dense_blocks_count_with_their_width():
    narrow, wide = Network(900, 64, ("attention", "dense")), Network(900, 64, ("attention", "dense 8x"))
    for d_ffn, same in (("8x", True), (512, True), ("4x", False)):
        one, two = Surrogate([], [narrow, wide], d_ffn).inputs([narrow, wide]).features
        assert np.allclose(one, two) == same
