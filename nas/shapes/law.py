"""A law of the loss in vocabulary, width, number of blocks and text read, fitted to probes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nas.shapes.space import NetworkShape

# Terms of the logarithm of the loss: products of the logarithms of vocabulary V, width D, blocks N and text T (1 is a
# whole training), and mean and standard deviation of the factor before the fit. The means are fits to trainings of two
# texts (experiments/frontier): at the start of a training, sizes help less, and large vocabularies more.
# fmt: off
TERMS = {
    "": (0, 3), "T": (-0.15, 0.1), "TT": (0, 0.05), "V": (-0.02, 0.03), "D": (-0.048, 0.015), "N": (-0.0145, 0.01),
    "VT": (0.008, 0.006), "DT": (-0.012, 0.006), "NT": (-0.007, 0.004), "VV": (0, 0.01), "DD": (0.015, 0.015),
    "NN": (0.005, 0.006), "VD": (0, 0.008), "VN": (-0.003, 0.006), "DN": (-0.003, 0.008),
}
# fmt: on
POWERS = np.array([[term.count(letter) for letter in "VDNT"] for term in TERMS])
MEAN, SPREAD = np.array(list(TERMS.values())).T
OWN = 0.008  # standard deviation of what a shape has beyond the terms, the same after each share of the text; relative
NOISE = 0.004  # standard deviation of a loss, relative


@dataclass(frozen=True)
class Point:
    """The loss of a network on valid, in bits per byte, after a share of the text of a training."""

    shape: NetworkShape
    text: float
    loss: float


class Inputs(NamedTuple):
    """Shapes, and the features of each with a length of text [P, terms]."""

    shapes: Sequence[NetworkShape]
    features: np.ndarray


class Law:
    """A quadratic polynomial for the logarithm of the loss, and an effect of each shape: a Gaussian process regression.

    Sizes are relative to the geometric means of the probes.
    """

    def __init__(self, points: list[Point]):
        shapes, text, losses = zip(*((point.shape, point.text, point.loss) for point in points), strict=True)
        self.centre = np.log(np.array(shapes, dtype=float)).mean(axis=0)
        self.known = self.inputs(shapes, np.array(text))
        self.inverse = np.linalg.inv(covariance(self.known, self.known) + NOISE**2 * np.eye(len(points)))
        self.weights = self.inverse @ (np.log(losses) - self.known.features @ MEAN)

    def inputs(self, shapes: Sequence[NetworkShape], text: np.ndarray | float = 1.0) -> Inputs:
        """text: relative to a whole training."""
        sizes = np.log(np.array(shapes, dtype=float)) - self.centre
        logs = np.column_stack([sizes, np.broadcast_to(np.log(text), len(sizes))])
        return Inputs(shapes, (logs[:, None, :] ** POWERS).prod(axis=-1))

    def predict(self, shapes: list[NetworkShape]) -> np.ndarray:
        """Losses [P] of shapes at the end of a training, up to a factor that is the same for all."""
        wanted = self.inputs(shapes)
        return np.exp(wanted.features @ MEAN + covariance(wanted, self.known) @ self.weights)

    def errors(self, shapes: list[NetworkShape], other: NetworkShape) -> np.ndarray:
        """Standard errors [P] of loss / loss of the other shape - 1, at the end of a training."""
        wanted = self.inputs([*shapes, other])
        across = covariance(wanted, self.known)
        posterior = covariance(wanted, wanted) - across @ self.inverse @ across.T
        variances = np.diag(posterior)
        return np.sqrt(np.maximum(variances[:-1] + variances[-1] - 2 * posterior[:-1, -1], 0))


def covariance(one: Inputs, two: Inputs) -> np.ndarray:
    """[P, Q] of the logarithms of losses before the fit, without noise."""
    same = np.array([[shape == other for other in two.shapes] for shape in one.shapes])
    return (one.features * SPREAD**2) @ two.features.T + OWN**2 * same
