"""The gate of a mixture: a linear softmax of features of what is known before the next token, over the parts that have
a vote (a mixture of experts with fixed experts, Jacobs et al. 1991, "Adaptive Mixtures of Local Experts").

N tokens, P parts, F features, E dimensions of the projected states of the network.
"""

import numpy as np
from numba import njit
from scipy.optimize import minimize
from scipy.special import softmax

PRIOR = 30.0  # times the sum of squared weights of standardised features, in nats: a normal distribution
STEPS = 60  # of L-BFGS
MOST_TOKENS = 100_000  # that a gate is fitted to
SMALLEST = 1e-300


def masked_softmax(logits: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """Weights [N, P] of the parts with a vote [N, P]."""
    return softmax(np.where(votes, logits, -np.inf), axis=1)


@njit(cache=True, fastmath={"reassoc", "contract"})
def mix_parts(p, votes, features, hidden, gate, bounds, nll, shares):
    """Write the nll [N] of targets, and how much each part gives of their probability [N, P].

    p, votes [N, P], features [N, F], hidden [N, E]; gate [P, F + E + 1], bounds [2, F]: float32.
    """
    (count, parts), known, width = p.shape, features.shape[1], hidden.shape[1]
    inputs = np.ones(gate.shape[1], np.float32)
    for place in range(count):
        for index in range(known):
            inputs[index] = min(max(features[place, index], bounds[0, index]), bounds[1, index])
        inputs[known : known + width] = hidden[place]
        highest, total, given = np.float32(-np.inf), 0.0, 0.0
        for part in range(parts):
            logit = np.float32(0)
            for index in range(len(inputs)):
                logit += gate[part, index] * inputs[index]
            shares[place, part] = logit
            if votes[place, part] and logit > highest:
                highest = logit
        for part in range(parts):
            weight = np.exp(np.float32(shares[place, part]) - highest) if votes[place, part] else np.float32(0)
            total += weight
            shares[place, part] = weight * p[place, part]
            given += shares[place, part]
        shares[place] /= max(given, SMALLEST)
        nll[place] = np.log(total) - np.log(max(given, SMALLEST))


def penalised_loss(flat: np.ndarray, inputs: np.ndarray, p: np.ndarray, votes: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean nll of targets, with the penalty of the prior, and its gradient, at gate weights [F * P]. The last input
    is constant, and its weights have no prior, so that a short text still has the best constant weights of parts.

    inputs [N, F]; p [N, P]: the probability of each target by each part; votes [N, P].
    """
    values = flat.reshape(inputs.shape[1], p.shape[1])
    weights, drawn = masked_softmax(inputs @ values.astype(inputs.dtype), votes), values.copy()
    drawn[-1] = 0
    joint = weights * p
    total = np.maximum(joint.sum(axis=1, keepdims=True), SMALLEST)
    gradient = inputs.T @ (weights - joint / total).astype(inputs.dtype) + 2 * PRIOR * drawn
    loss = PRIOR * (drawn**2).sum() - np.log(total).sum(dtype=np.float64)
    return loss / len(p), gradient.ravel().astype(np.float64) / len(p)


def fit_gate(features: np.ndarray, p: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """The weights [F + 1, P] with the lowest penalised_loss() for standardised features. The last row is a bias.

    features [N, F]: what is known before a target; p, votes: as there.
    """
    mean, deviation = features.mean(axis=0), features.std(axis=0)
    scale = np.where(deviation > 1e-9, 1 / np.maximum(deviation, 1e-9), 0)
    inputs = np.append((features - mean) * scale, np.ones((len(features), 1)), axis=1).astype(np.float32)
    start, about = np.zeros(inputs.shape[1] * p.shape[1]), {"jac": True, "method": "L-BFGS-B"}
    values = minimize(penalised_loss, start, (inputs, p, votes), options={"maxiter": STEPS}, **about).x
    values = values.reshape(inputs.shape[1], p.shape[1])
    values[:-1] *= scale[:, None]
    values[-1] -= mean @ values[:-1]
    return values
