"""The surrogate model: a Gaussian process regression of the loss in sizes, operations and text read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from nas.core.config import Config
from nas.core.pattern import kind_of, parse_block
from nas.search.space import BYTES_PER_PIECE, Network


class Prior(NamedTuple):
    """What the logarithm of a loss depends on before the first trial. All standard deviations are relative to the loss.

    terms: mean and standard deviation of the factor of each term. A term is a product of these letters. V, D, N and T
    are logarithms: of vocabulary, width, number of blocks, and share of a training. A and F are also logarithms: the
    number of attending blocks, and the dense widths in units of 4x, both relative to interleaved. P tells how much
    later the attending blocks stand. O is 1 if no block attends, and else 0. E is 1 at the end of a training, whose
    learning rates have decayed, and else 0. other, other_text: standard deviations of the effect of 1 + another
    operation's blocks, and with T. own: of what a network, and a pair of sizes, have beyond the terms at any time.
    noise: of a loss.
    """

    terms: dict[str, tuple[float, float]]
    other: float
    other_text: float
    own: float
    noise: float


# The means are fits to losses of other texts (experiments/prior): of networks together with cache and counts, which
# know a part of what networks differ in, and of networks alone.
# fmt: off
MIXED = Prior(
    {
        "": (0, 3), "T": (-0.04, 0.05), "TT": (-0.0022, 0.025), "V": (0.0009, 0.015), "D": (-0.0145, 0.0075),
        "N": (-0.011, 0.005), "VT": (-0.0026, 0.003), "DT": (-0.005, 0.003), "NT": (-0.0036, 0.002),
        "VV": (0.0009, 0.005), "DD": (0.0048, 0.0075), "NN": (0.0001, 0.003), "VD": (-0.0014, 0.004),
        "VN": (-0.0003, 0.003), "DN": (-0.0025, 0.004), "A": (-0.0107, 0.004), "F": (0.0031, 0.003),
        "P": (-0.0006, 0.0025), "AA": (-0.0004, 0.002), "FF": (0.0022, 0.003), "AF": (-0.002, 0.0025),
        "PP": (0.0002, 0.0025), "AT": (-0.0016, 0.002), "FT": (0.0024, 0.002), "PT": (0.0005, 0.0015),
        "AN": (-0.0004, 0.0025), "FN": (0.0001, 0.0025), "AD": (-0.0035, 0.0025), "FD": (0.0042, 0.0025),
        "VE": (-0.0047, 0.0025), "VVT": (0.0024, 0.0015), "VVE": (-0.0012, 0.0015), "O": (0.024, 0.01),
        "OT": (0.0134, 0.004),
    },
    other=0.005, other_text=0.002, own=0.003, noise=0.0015,
)
ALONE = Prior(
    {
        "": (0, 3), "T": (-0.145, 0.1), "TT": (0.005, 0.05), "V": (-0.0199, 0.03), "D": (-0.0354, 0.015),
        "N": (-0.0121, 0.01), "VT": (0.011, 0.006), "DT": (-0.0042, 0.006), "NT": (-0.0053, 0.004),
        "VV": (-0.0044, 0.01), "DD": (0.0111, 0.015), "NN": (0.0009, 0.006), "VD": (-0.0013, 0.008),
        "VN": (-0.002, 0.006), "DN": (-0.007, 0.008), "A": (-0.0168, 0.008), "F": (0.0034, 0.006), "P": (0.0015, 0.005),
        "AA": (-0.0013, 0.004), "FF": (0.0037, 0.006), "AF": (-0.0033, 0.005), "PP": (0.0004, 0.005),
        "AT": (-0.003, 0.004), "FT": (0.0031, 0.004), "PT": (0.0001, 0.003), "AN": (-0.0013, 0.005),
        "FN": (-0.0003, 0.005), "AD": (-0.0077, 0.005), "FD": (0.0091, 0.005), "VE": (-0.0108, 0.005),
        "VVT": (0.0018, 0.003), "VVE": (0.002, 0.003), "O": (0.0234, 0.02), "OT": (0.0161, 0.008),
    },
    other=0.01, other_text=0.004, own=0.006, noise=0.004,
)
# fmt: on
# Terms of a text that is read again. R is the number of passes after the first, and W the vocabulary as a share of the
# largest that suits the text. How much large vocabularies lose differs between texts.
AGAIN = {"R": (0, 0.1), "WR": (0, 0.03)}
LETTERS = "VDNTAFPOERW"
CENTRE = 9.0, 4.5, 1.0  # of V, D and N, the same for the data of the prior and for every search
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


def prior_for(config: Config) -> Prior:
    """The prior of the losses by which a search judges networks."""
    beside = config.beside
    return MIXED if beside.states or beside.cache or beside.counts else ALONE


class Surrogate:
    """A Gaussian process of the logarithm of the loss: a polynomial, and effects of networks and of pairs of sizes.

    networks: all candidates. d_ffn: model.d_ffn. text: what a whole training reads.
    """

    def __init__(
        self,
        points: Sequence[Point],
        networks: Sequence[Network],
        d_ffn: int | str = "4x",
        prior: Prior = MIXED,
        text: Text = ONCE,
    ):
        known = [*networks, *(point.network for point in points)]
        blocks = {block for network in known for block in network.blocks} - {"attention"}
        self.names = sorted(block for block in blocks if block.split()[0] != "dense")
        self.d_ffn, self.prior, self.text = d_ffn, prior, text
        self.keys: dict = {}
        terms = prior.terms | AGAIN if text.is_read_again else prior.terms
        self.powers = np.array([[term.count(letter) for letter in LETTERS] for term in terms])
        means, spreads = np.array(list(terms.values())).T
        self.mean = np.append(means, np.zeros(2 * len(self.names)))
        self.spread = np.concatenate([spreads, np.repeat([prior.other, prior.other_text], len(self.names))])
        self.known = self.inputs([point.network for point in points], [point.share for point in points])
        self.factor = cho_factor(self.covariance(self.known, self.known) + self.prior.noise**2 * np.eye(len(points)))
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
        return (one.features * self.spread**2) @ two.features.T + self.prior.own**2 * same

    def variance(self, one: Inputs) -> np.ndarray:
        """The diagonal [P] of covariance(one, one)."""
        return one.features**2 @ self.spread**2 + 2 * self.prior.own**2

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
        effects[:, keys] = self.prior.own * generator.standard_normal(
            (count, len(keys))
        )  # whatever was predicted before
        own, known = [factors @ one.features.T + effects[:, one.effects].sum(axis=-1) for one in (wanted, self.known)]
        missed = self.logs - known - self.prior.noise * generator.standard_normal(known.shape)
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
