"""What a network adds to cache and counts, predicted from its own loss.

    gain = exp(intercept - slope * behind)

gain: nats per token by which the mixture is better than cache and counts alone. behind: nats per token by which the
network alone is worse than they are. The gain is small after the first part of a training and grows with it, so the
losses of mixtures then do not tell which one is the best at the end. But trials show where this law of a text lies.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nas.search.space import Network

# Mean and standard deviation of intercept and slope before the fit, and of what a trial misses: fits to ten networks
# after an eighth of a training to all of it (experiments/mixture).
PRIOR, SPREAD, MISSED = np.array([-0.5, 1.9]), np.array([0.5, 0.2]), 0.2
LEAST = 0.002  # nats per token of a gain that is none


class Gain(NamedTuple):
    """The law of a text. alone: bits per byte of cache and counts on valid, of each vocabulary; nats: what one of these
    is for a token. law: intercept and slope.
    """

    alone: dict[int, float]
    nats: dict[int, float]
    law: tuple[float, float] = tuple(PRIOR)

    def fit(self, networks: Sequence[Network], own: np.ndarray, mixed: np.ndarray) -> "Gain":
        """The likeliest law. own, mixed [P]: bits per byte on valid of networks alone and of their mixtures."""
        alone, nats = self.of(networks)
        inputs = np.stack([np.ones(len(own)), -(own - alone) * nats], axis=1)
        missed = np.log(np.maximum((alone - mixed) * nats, LEAST)) - inputs @ PRIOR
        precision = inputs.T @ inputs / MISSED**2 + np.diag(SPREAD**-2.0)
        law = PRIOR + np.linalg.solve(precision, inputs.T @ missed / MISSED**2)
        return self._replace(law=tuple(law.tolist()))

    def of(self, networks: Sequence[Network]) -> tuple[np.ndarray, np.ndarray]:
        """The two figures [P] of the vocabularies of networks."""
        return tuple(np.array([own[network.vocab_size] for network in networks]) for own in (self.alone, self.nats))

    def mixed(self, own: np.ndarray, networks: Sequence[Network]) -> np.ndarray:
        """The predicted bits per byte of mixtures [.., P]. own [.., P]: of the networks alone."""
        alone, nats = self.of(networks)
        return alone - np.exp(self.law[0] - self.law[1] * (own - alone) * nats) / nats
