"""What a mixture keeps of the network's hidden states: the few directions in which they vary most; and the cache of
states, what followed similar ones in the stream so far (Grave et al. 2017, "Improving Neural Language Models with a
Continuous Cache", arXiv 1612.04426, section 3.1).

In this cache, the probability of a token is proportional to the sum of exp(SHARPNESS * cosine) over those of the last
states that it followed. N tokens, D width, E dimensions.
"""

import numpy as np
import torch
from numba import njit

SHARPNESS, DIMENSIONS = 10.0, 32
LEAST = 1e-4  # of the largest variance; directions that vary less are rounding errors, which the gate would magnify
CHUNK = 64  # tokens that are predicted at once
FEATURES = 2


def principal_directions(hidden: np.ndarray) -> np.ndarray:
    """The projection [D + 1, E] of states [N, D] to their first principal components; its last row is the shift. Those
    that hardly vary are 0, such as the sum of what a layer normalization gives.
    """
    mean = hidden.sum(axis=0, dtype=np.float64) / max(1, len(hidden))
    centred = hidden - mean
    variances, vectors = np.linalg.eigh(centred.T @ centred)
    basis = (vectors * (variances > LEAST * variances[-1]))[:, : -1 - DIMENSIONS : -1]
    return np.append(basis, -mean[None] @ basis, axis=0)


def scaled(states: np.ndarray) -> np.ndarray:
    """States [N, E] with length 1."""
    return states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-9)


class StateCache:
    """The last states of one stream, and the tokens that followed them. length: their number, at most."""

    def __init__(self, dimensions: int, length: int):
        self.length, self.keys = length, np.zeros((0, dimensions), np.float32)
        self.followers = np.zeros(0, np.int64)

    def read(self, states: np.ndarray, tokens: np.ndarray, found: np.ndarray, features: np.ndarray) -> None:
        """Predict each token [N] after its projected state [N, E], and read it. Writes the probabilities to found [N],
        and what was known before to features [N, FEATURES]: the logarithm of the sum, and the share of the largest
        term, which is 0 without a vote.
        """
        first = len(self.keys)
        keys, followers = np.append(self.keys, scaled(states), axis=0), np.append(self.followers, tokens)
        for start in range(first, len(keys), CHUNK):
            low, end = max(0, start - self.length), min(start + CHUNK, len(keys))
            own, others = torch.from_numpy(keys[start:end]), torch.from_numpy(keys[low:end])
            terms = (SHARPNESS * own @ others.T).exp_().numpy()
            rows = slice(start - first, end - first)
            sum_terms(terms, followers[low:end], start - low, self.length, found[rows], features[rows])
        self.keys, self.followers = keys[-self.length :], followers[-self.length :]

    def terms(self, state: np.ndarray, features: np.ndarray) -> np.ndarray:
        """The terms of the next token after a projected state [1, E], one for each of the last states. Writes its
        features.
        """
        terms = np.exp(self.keys @ (SHARPNESS * scaled(state)[0]))
        if len(terms):
            features[:] = np.log(terms.sum()), terms.max() / terms.sum()
        return terms


@njit(cache=True, fastmath=True)
def sum_terms(terms, followers, first, length, found, features):
    """Write found and features as StateCache.read(). terms [N, K]: of K states, of which `first` precede the tokens."""
    for row in range(len(found)):
        target, total, own, largest = followers[first + row], np.float32(0), np.float32(0), np.float32(0)
        for column in range(max(0, first + row - length), first + row):
            term = terms[row, column]
            total += term
            own += term if followers[column] == target else np.float32(0)
            largest = max(largest, term)
        if total > 0:
            found[row], features[row, 0], features[row, 1] = own / total, np.log(total), largest / total
