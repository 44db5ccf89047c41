"""The surrogate model: a Gaussian process regression of the loss in sizes, operations and text read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from nas.core.pattern import kind_of, parse_block
from nas.search.space import BYTES_PER_PIECE, Network

# Terms of the logarithm of the loss, and mean and standard deviation of the factor of each before the fit. A term is a
# product of these letters. V, D, N and T are logarithms: of vocabulary, width, number of blocks, and share of a
# training. A and F are also logarithms: the number of attending blocks, and the dense widths in units of 4x, both
# relative to interleaved. P tells how much later the attending blocks stand. O is 1 if no block attends, and else 0.
# E is 1 at the end of a training, whose learning rates have decayed, and else 0. The means are a fit to losses of
# mixtures with networks (experiments/prior).
# fmt: off
TERMS = {
    "": (0, 3), "T": (-0.04, 0.05), "TT": (-0.0022, 0.025), "V": (0.0009, 0.015), "D": (-0.0145, 0.0075),
    "N": (-0.011, 0.005), "VT": (-0.0026, 0.003), "DT": (-0.005, 0.003), "NT": (-0.0036, 0.002), "VV": (0.0009, 0.005),
    "DD": (0.0048, 0.0075), "NN": (0.0001, 0.003), "VD": (-0.0014, 0.004), "VN": (-0.0003, 0.003),
    "DN": (-0.0025, 0.004), "A": (-0.0107, 0.004), "F": (0.0031, 0.003), "P": (-0.0006, 0.0025), "AA": (-0.0004, 0.002),
    "FF": (0.0022, 0.003), "AF": (-0.002, 0.0025), "PP": (0.0002, 0.0025), "AT": (-0.0016, 0.002),
    "FT": (0.0024, 0.002), "PT": (0.0005, 0.0015), "AN": (-0.0004, 0.0025), "FN": (0.0001, 0.0025),
    "AD": (-0.0035, 0.0025), "FD": (0.0042, 0.0025), "VE": (-0.0047, 0.0025), "VVT": (0.0024, 0.0015),
    "VVE": (-0.0012, 0.0015), "O": (0.024, 0.01), "OT": (0.0134, 0.004),
}
# fmt: on
# Terms of a text that is read again. R is the number of passes after the first, and W the vocabulary as a share of the
# largest that suits the text. How much large vocabularies lose differs between texts.
AGAIN = {"R": (0, 0.1), "WR": (0, 0.03)}
LETTERS = "VDNTAFPOERW"
CENTRE = 9.0, 4.5, 1.0  # of V, D and N, the same for the data of the prior and for every search
OTHER, OTHER_TEXT = 0.005, 0.002  # standard deviations of the effect of 1 + another operation's blocks, and with T
OWN = 0.003  # standard deviation of what a network, and a pair of sizes, have beyond the terms at any time; relative
NOISE = 0.0015  # standard deviation of a loss, relative
ALONE = 2.0  # times all of these, for networks without a mixture, which would know a part of what they differ in
NO_BLOCKS = 0.5  # instead of 0 blocks, for the logarithm
LEAST_LOSS = 1e-6  # bits per byte; a smaller loss has no logarithm to compare
DRAWS = 1000  # for the probability of being the best


@dataclass(frozen=True)
class Point:
    """The loss of a network on valid, in bits per byte, after a share of a training."""

    network: Network
    share: float
    loss: float


class Text(NamedTuple):
    """What a whole training reads. passes: over its text. bytes: of the text."""

    passes: float = 1.0
    bytes: int = 1

    @property
    def is_read_again(self) -> bool:
        return self.passes > 1


ONCE = Text()


class Inputs(NamedTuple):
    """The features [P, terms] of networks; effects [P, 2]: the index of each one's pair of sizes, and its own index."""

    features: np.ndarray
    effects: np.ndarray


@cache
def log_sizes(network: Network, d_ffn: int | str) -> tuple[float, ...]:
    """What the terms are made of: the logarithms of sizes, A, F, P and O. d_ffn: of dense blocks that give no width."""
    blocks, half = network.blocks, len(network.blocks) / 2
    attends = np.array([kind_of(block).reaches_far for block in blocks])
    widths = sum(width_of(block, network.d_model, d_ffn) for block in blocks)
    later = 0.0
    if 0 < attends.sum() < len(blocks):
        places = np.linspace(-1, 1, len(blocks))
        later = places[attends].mean() - places[~attends].mean()
    logs = np.log([network.vocab_size, network.d_model, max(len(blocks), NO_BLOCKS)])
    relative = np.log((np.array([attends.sum(), widths]) + 0.5) / (half + 0.5))
    return *logs, *relative, later, float(not attends.any())


def width_of(block: str, d_model: int, d_ffn: int | str) -> float:
    """The inner width of a dense block in units of 4x; 0 for other blocks. d_ffn: its width if it gives none."""
    name, sizes = parse_block(block)
    if name != "dense":
        return 0.0
    size = str(sizes.get("d_ffn", d_ffn))
    return float(size[:-1]) / 4 if size.endswith("x") else float(size) / (4 * d_model)


class Surrogate:
    """A Gaussian process of the logarithm of the loss: a polynomial, and effects of networks and of pairs of sizes.

    networks: all candidates. d_ffn: model.d_ffn. terms: as TERMS. text: what a whole training reads. scale: times all
    means and standard deviations.
    """

    def __init__(
        self,
        points: Sequence[Point],
        networks: Sequence[Network],
        d_ffn: int | str = "4x",
        terms: dict[str, tuple[float, float]] = TERMS,
        text: Text = ONCE,
        scale: float = 1.0,
    ):
        known = [*networks, *(point.network for point in points)]
        blocks = {block for network in known for block in network.blocks} - {"attention"}
        self.names = sorted(block for block in blocks if block.split()[0] != "dense")
        self.d_ffn, self.text = d_ffn, text
        self.keys: dict = {}
        terms = terms | AGAIN if text.is_read_again else terms
        self.powers = np.array([[term.count(letter) for letter in LETTERS] for term in terms])
        means, spreads = np.array(list(terms.values())).T
        self.mean = scale * np.append(means, np.zeros(2 * len(self.names)))
        self.spread = scale * np.concatenate([spreads, [OTHER] * len(self.names), [OTHER_TEXT] * len(self.names)])
        self.own, self.noise = scale * OWN, scale * NOISE
        self.known = self.inputs([point.network for point in points], [point.share for point in points])
        self.factor = cho_factor(self.covariance(self.known, self.known) + self.noise**2 * np.eye(len(points)))
        self.logs = np.log([max(point.loss, LEAST_LOSS) for point in points])

    def inputs(self, networks: Sequence[Network], share: Sequence[float] | float = 1.0) -> Inputs:
        """share: of a training."""
        given = np.array([log_sizes(network, self.d_ffn) for network in networks]).reshape(-1, 7)
        time = np.broadcast_to(np.log(share), len(given))[:, None]
        again = np.maximum(0, self.text.passes * np.exp(time) - 1)
        suited = np.exp(given[:, :1]) * BYTES_PER_PIECE / self.text.bytes
        columns = np.hstack([given[:, :3] - CENTRE, time, given[:, 3:], time == 0, again, suited])
        counts = np.log1p([[network.blocks.count(name) for name in self.names] for network in networks])
        counts = counts.reshape(len(given), len(self.names))
        features = np.hstack([(columns[:, None, :] ** self.powers).prod(axis=-1), counts, counts * time])
        keys = [[self.keys.setdefault(key, len(self.keys)) for key in (n[:2], n)] for n in networks]
        return Inputs(features, np.array(keys, dtype=int).reshape(-1, 2))

    def covariance(self, one: Inputs, two: Inputs) -> np.ndarray:
        """[P, Q] of the logarithms of losses before the fit, without noise."""
        same = (one.effects[:, None] == two.effects).sum(axis=-1)
        return (one.features * self.spread**2) @ two.features.T + self.own**2 * same

    def variance(self, one: Inputs) -> np.ndarray:
        """The diagonal [P] of covariance(one, one)."""
        return one.features**2 @ self.spread**2 + 2 * self.own**2

    def predict(self, networks: Sequence[Network]) -> np.ndarray:
        """Losses [P] at the end of a training, up to a factor that is the same for all."""
        wanted, missed = self.inputs(networks), self.logs - self.known.features @ self.mean
        learned = self.covariance(wanted, self.known) @ cho_solve(self.factor, missed)
        return np.exp(wanted.features @ self.mean + learned)

    def errors(self, networks: Sequence[Network], other: Network) -> np.ndarray:
        """Standard errors [P] of loss / loss of the other network - 1, at the end of a training."""
        wanted, against = self.inputs(networks), self.inputs([other])
        before = self.variance(wanted) + self.variance(against) - 2 * self.covariance(against, wanted)[0]
        shared = self.covariance(self.known, wanted) - self.covariance(self.known, against)
        return np.sqrt(np.maximum(before - (shared * cho_solve(self.factor, shared)).sum(axis=0), 0))

    def draw(self, networks: Sequence[Network], count: int, generator: np.random.Generator) -> np.ndarray:
        """Draws [count, P] of the logarithms of losses at the end of a training, by Matheron's rule (arXiv 2002.09309,
        section 3): a draw before the fit, corrected by what it misses at the points.
        """
        wanted = self.inputs(networks)
        keys = list(dict.fromkeys(np.vstack([self.known.effects, wanted.effects]).ravel().tolist()))
        factors = self.spread * generator.standard_normal((count, len(self.spread))) + self.mean
        effects = np.zeros((count, len(self.keys)))
        effects[:, keys] = self.own * generator.standard_normal((count, len(keys)))  # whatever was predicted before
        own, known = [factors @ one.features.T + effects[:, one.effects].sum(axis=-1) for one in (wanted, self.known)]
        missed = self.logs - known - self.noise * generator.standard_normal(known.shape)
        return own + cho_solve(self.factor, missed.T).T @ self.covariance(self.known, wanted)

    def sample(self, networks: Sequence[Network]) -> np.ndarray:
        """Draws [DRAWS, P], always the same ones for the same points and networks."""
        return self.draw(networks, DRAWS, np.random.default_rng(0))

    def probability_best(self, networks: Sequence[Network]) -> np.ndarray:
        """The probability [P] of each network to be the best of these at the end of a training."""
        return np.bincount(self.sample(networks).argmin(axis=1), minlength=len(networks)) / DRAWS

    def best_of_vocabularies(self, networks: Sequence[Network]) -> list[Network]:
        """The best network of each vocabulary, the best first."""
        first: dict[int, Network] = {}
        for index in np.argsort(self.predict(networks)):
            first.setdefault(networks[index].vocab_size, networks[index])
        return list(first.values())
