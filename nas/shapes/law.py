"""A law of the loss in vocabulary, width, number of blocks and text read, fitted to probes."""

from dataclasses import dataclass

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
NOISE = 0.004  # of a loss, relative


@dataclass(frozen=True)
class Point:
    """The loss of a network on valid, in bits per byte, after a share of the text of a training."""

    shape: NetworkShape
    text: float
    loss: float


class Law:
    """A quadratic polynomial for the logarithm of the loss, by Bayesian linear regression.

    Sizes are relative to the geometric means of the probes.
    """

    def __init__(self, points: list[Point]):
        self.centre = np.log(np.array([point.shape for point in points], dtype=float)).mean(axis=0)
        shapes, text, losses = zip(*((point.shape, point.text, point.loss) for point in points), strict=True)
        features = self.features(shapes, np.array(text))
        self.covariance = np.linalg.inv(features.T @ features / NOISE**2 + np.diag(SPREAD**-2))
        errors = np.log(losses) - features @ MEAN
        self.factors = MEAN + self.covariance @ (features.T @ errors) / NOISE**2

    def features(self, shapes: list[NetworkShape], text: np.ndarray) -> np.ndarray:
        """[P, terms]"""
        logs = np.column_stack([np.log(np.array(shapes, dtype=float)) - self.centre, np.log(text)])
        return (logs[:, None, :] ** POWERS).prod(axis=-1)

    def predict(self, shapes: list[NetworkShape]) -> np.ndarray:
        """Losses [P] of shapes at the end of a training, up to a factor that is the same for all."""
        return np.exp(self.features(shapes, np.ones(len(shapes))) @ self.factors)

    def errors(self, shapes: list[NetworkShape], other: NetworkShape) -> np.ndarray:
        """Standard errors [P] of loss / loss of the other shape - 1, at the end of a training."""
        features = self.features([*shapes, other], np.ones(len(shapes) + 1))
        differences = features[:-1] - features[-1]
        return np.sqrt(np.einsum("pi,ij,pj->p", differences, self.covariance, differences))
