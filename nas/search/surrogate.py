"""A law of the loss in sizes, operations and text read, fitted to the first parts of trainings."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from nas.core.blocks import kind_of, parse_block
from nas.search.space import BYTES_PER_PIECE, Network

# Terms of the logarithm of the loss, and mean and standard deviation of the factor of each before the fit. A term is a
# product of these letters. V, D, N and T are logarithms: of vocabulary, width, number of blocks, and share of a
# training. A and F are also logarithms: the number of attending blocks, and the dense widths in units of 4x, both
# relative to interleaved. P tells how much later the attending blocks stand. O is 1 if no block attends, and else 0.
# E is 1 at the end of a training, whose learning rates have decayed, and else 0. The means are fits to losses of
# WikiText-2 alone (experiments/versus/prior.py).
# fmt: off
TERMS = {
    "": (0, 3), "T": (-0.145, 0.1), "TT": (0.0048, 0.05), "V": (-0.0236, 0.03), "D": (-0.0374, 0.015),
    "N": (-0.0122, 0.01), "VT": (0.0117, 0.006), "DT": (-0.0051, 0.006), "NT": (-0.0043, 0.004),
    "VV": (-0.005, 0.01), "DD": (0.0065, 0.015), "NN": (0.002, 0.006), "VD": (-0.0045, 0.008),
    "VN": (-0.0029, 0.006), "DN": (-0.0085, 0.008), "A": (-0.0154, 0.008), "F": (0.0042, 0.006),
    "P": (0.0017, 0.005), "AA": (0.001, 0.004), "FF": (0.0038, 0.006), "AF": (-0.003, 0.005),
    "PP": (0.0003, 0.005), "AT": (-0.0014, 0.004), "FT": (0.0024, 0.004), "PT": (-0.0003, 0.003),
    "AN": (0.0006, 0.005), "FN": (-0.0004, 0.005), "AD": (-0.0101, 0.005), "FD": (0.0085, 0.005),
    "VE": (-0.0091, 0.005), "VVT": (0.0015, 0.003), "VVE": (0.0027, 0.003), "O": (0.0207, 0.02),
    "OT": (0.0201, 0.008),
}
# fmt: on
# Terms of a text that is read again. R is the number of passes after the first, and W the vocabulary as a share of the
# largest that suits the text. How much large vocabularies lose differs between texts.
AGAIN = {"R": (0, 0.1), "WR": (0, 0.03)}
LETTERS = "VDNTAFPOERW"
OTHER, OTHER_TEXT = 0.01, 0.004  # standard deviations of the effect of 1 + another operation's blocks, and with T
OWN = 0.006  # standard deviation of what a network, and a pair of sizes, have beyond the terms at any time; relative
NOISE = 0.004  # standard deviation of a loss, relative
DRAWS = 1000  # for the probability that a network is the best


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
    places, later = np.linspace(-1, 1, len(blocks)) if len(blocks) > 1 else np.zeros(1), 0.0
    if 0 < attends.sum() < len(blocks):
        later = places[attends].mean() - places[~attends].mean()
    logs = np.log([network.vocab_size, network.d_model, len(blocks)])
    return *logs, *np.log((np.array([attends.sum(), widths]) + 0.5) / (half + 0.5)), later, float(not attends.any())


def mean_sizes(networks: Sequence[Network]) -> np.ndarray:
    """The mean logarithms of vocabulary, width and number of blocks."""
    return np.mean([log_sizes(network, "4x")[:3] for network in networks], axis=0)


def width_of(block: str, d_model: int, d_ffn: int | str) -> float:
    """The inner width of a dense block in units of 4x; 0 for other blocks. d_ffn: its width if it gives none."""
    name, sizes = parse_block(block)
    if name != "dense":
        return 0.0
    size = str(sizes.get("d_ffn", d_ffn))
    return float(size[:-1]) / 4 if size.endswith("x") else float(size) / (4 * d_model)


class Law:
    """A polynomial for the logarithm of the loss, and effects of its own of each network and of each pair of vocabulary
    and width: a Gaussian process regression.

    networks: all candidates. d_ffn: model.d_ffn. centre: mean_sizes() to which the terms refer; None: those of all
    candidates. terms: as TERMS. text: what a whole training reads.
    """

    def __init__(
        self,
        points: Sequence[Point],
        networks: Sequence[Network],
        d_ffn: int | str = "4x",
        centre: Sequence[float] | None = None,
        terms: dict[str, tuple[float, float]] = TERMS,
        text: Text = ONCE,
    ):
        known, self.d_ffn = [*networks, *(point.network for point in points)], d_ffn
        blocks = {block for network in known for block in network.blocks} - {"attention"}
        self.names = sorted(block for block in blocks if block.split()[0] != "dense")
        self.keys: dict = {}
        self.centre = mean_sizes(networks) if centre is None else np.asarray(centre)
        terms, self.text = terms | AGAIN if text.is_read_again else terms, text
        self.powers = np.array([[term.count(letter) for letter in LETTERS] for term in terms])
        means, spreads = np.array(list(terms.values())).T
        self.mean = np.append(means, np.zeros(2 * len(self.names)))
        self.spread = np.concatenate([spreads, [OTHER] * len(self.names), [OTHER_TEXT] * len(self.names)])
        self.known = self.inputs([point.network for point in points], [point.share for point in points])
        self.inverse = np.linalg.inv(self.covariance(self.known, self.known) + NOISE**2 * np.eye(len(points)))
        self.residuals = np.log([point.loss for point in points]) - self.known.features @ self.mean

    def inputs(self, networks: Sequence[Network], share: Sequence[float] | float = 1.0) -> Inputs:
        """share: of a training."""
        given = np.array([log_sizes(network, self.d_ffn) for network in networks]).reshape(-1, 7)
        time = np.broadcast_to(np.log(share), len(given))[:, None]
        again = np.maximum(0, self.text.passes * np.exp(time) - 1)
        suited = np.exp(given[:, :1]) * BYTES_PER_PIECE / self.text.bytes
        columns = np.hstack([given[:, :3] - self.centre, time, given[:, 3:], time == 0, again, suited])
        counts = np.log1p([[network.blocks.count(name) for name in self.names] for network in networks])
        counts = counts.reshape(len(given), len(self.names))
        features = np.hstack([(columns[:, None, :] ** self.powers).prod(axis=-1), counts, counts * time])
        keys = [[self.keys.setdefault(key, len(self.keys)) for key in (n[:2], n)] for n in networks]
        return Inputs(features, np.array(keys, dtype=int).reshape(-1, 2))

    def covariance(self, one: Inputs, two: Inputs) -> np.ndarray:
        """[P, Q] of the logarithms of losses before the fit, without noise."""
        same = (one.effects[:, None] == two.effects).sum(axis=-1)
        return (one.features * self.spread**2) @ two.features.T + OWN**2 * same

    def predict(self, networks: Sequence[Network]) -> np.ndarray:
        """Losses [P] at the end of a training, up to a factor that is the same for all."""
        wanted = self.inputs(networks)
        return np.exp(wanted.features @ self.mean + self.covariance(wanted, self.known) @ self.inverse @ self.residuals)

    def errors(self, networks: Sequence[Network], other: Network) -> np.ndarray:
        """Standard errors [P] of loss / loss of the other network - 1, at the end of a training."""
        wanted, against = self.inputs(networks), self.inputs([other])
        across = [self.covariance(part, self.known) for part in (wanted, against)]
        own = (wanted.features**2 * self.spread**2).sum(axis=1) + 2 * OWN**2
        own = own - ((across[0] @ self.inverse) * across[0]).sum(axis=1)
        others = (self.covariance(against, against) - across[1] @ self.inverse @ across[1].T).item()
        between = (self.covariance(wanted, against) - across[0] @ self.inverse @ across[1].T)[:, 0]
        return np.sqrt(np.maximum(own + others - 2 * between, 0))

    def draw(self, networks: Sequence[Network], count: int, generator: np.random.Generator) -> np.ndarray:
        """Draws [count, P] of the logarithms of losses at the end of a training, by Matheron's rule (arXiv 2002.09309,
        section 3): a draw before the fit, corrected by what it misses at the points.
        """
        wanted = self.inputs(networks)
        factors = self.spread * generator.standard_normal((count, len(self.spread))) + self.mean
        effects = OWN * generator.standard_normal((count, len(self.keys)))
        values = [factors @ part.features.T + effects[:, part.effects].sum(axis=-1) for part in (wanted, self.known)]
        missed = self.residuals + self.known.features @ self.mean - values[1]
        missed -= NOISE * generator.standard_normal(missed.shape)
        return values[0] + missed @ self.inverse @ self.covariance(self.known, wanted)

    def chances(self, networks: Sequence[Network]) -> np.ndarray:
        """The probability [P] of each network to be the best of these at the end of a training."""
        winners = self.draw(networks, DRAWS, np.random.default_rng(0)).argmin(axis=1)
        return np.bincount(winners, minlength=len(networks)) / DRAWS

    def best_of_vocabularies(self, networks: Sequence[Network]) -> list[Network]:
        """The best network of each vocabulary, the best first."""
        first: dict[int, Network] = {}
        for index in np.argsort(self.predict(networks)):
            first.setdefault(networks[index].vocab_size, networks[index])
        return list(first.values())
