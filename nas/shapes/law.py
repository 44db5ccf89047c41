"""A law of the loss in vocabulary, width, number of blocks and text read, fitted to probes."""

from dataclasses import dataclass

import numpy as np

from nas.shapes.space import NetworkShape

# Terms of the loss: (logarithm of the factor, exponents of vocabulary, width, blocks and text), the values around which
# they are fitted, and how far they may lie from them. Text is relative to a whole training.
PRIOR = np.array(
    [
        [0.0, 0.0, 0.0, 0.0, 0.0],  # the loss that no size lowers
        [-1.0, -0.5, 0.0, 0.0, 0.0],
        [-1.0, 0.0, -0.5, 0.0, 0.0],
        [-1.0, 0.0, 0.0, -0.5, 0.0],
        [-1.5, 0.0, 0.0, 0.0, -0.5],
    ]
)
SPREAD = np.array(
    [
        [1.0, 0, 0, 0, 0],
        [1.5, 0.5, 0, 0, 0],
        [1.5, 0, 0.5, 0, 0],
        [1.5, 0, 0, 0.5, 0],
        [1.5, 0.3, 0.3, 0.3, 0.3],  # wide and shallow networks, and large vocabularies, may need more or less text
    ]
)
NOISE = 0.01  # of a loss, relative


@dataclass(frozen=True)
class Point:
    """The loss of a network in bits per byte, around a share of the text of a training."""

    shape: NetworkShape
    text: float
    loss: float


class Law:
    """loss = sum of terms, each exp(factor) * V^a * D^b * N^c * T^d (the form of arXiv 2511.18890, section 3.1).

    V, D and N are relative to the geometric means of the probes.
    """

    def __init__(self, points: list[Point]):
        """Fit the law by least squares of relative errors, with the prior."""
        from scipy.optimize import least_squares  # imported here because it takes half a second

        self.centre = np.log(np.array([point.shape for point in points], dtype=float)).mean(axis=0)
        shapes, text, losses = zip(*((point.shape, point.text, point.loss) for point in points), strict=True)
        features, free = self.features(shapes, np.array(text)), SPREAD > 0
        self.coefficients = PRIOR.copy()

        def residuals(values: np.ndarray) -> np.ndarray:
            self.coefficients[free] = values
            errors = (self.losses(features) / losses - 1) / NOISE
            return np.concatenate([errors, (values - PRIOR[free]) / SPREAD[free]])

        found = least_squares(residuals, PRIOR[free])
        self.coefficients[free] = found.x
        self.covariance = np.linalg.inv(found.jac.T @ found.jac)

    def features(self, shapes: list[NetworkShape], text: np.ndarray) -> np.ndarray:
        """[P, 5]: 1, the logarithms of vocabulary, width and blocks, relative to the probes' means, and of the text."""
        sizes = np.log(np.array(shapes, dtype=float)) - self.centre
        return np.column_stack([np.ones(len(sizes)), sizes, np.log(text)])

    def losses(self, features: np.ndarray) -> np.ndarray:
        return np.exp(features @ self.coefficients.T).sum(axis=1)

    def errors(self, shapes: list[NetworkShape], other: NetworkShape) -> np.ndarray:
        """Standard errors [P] of loss / loss of the other shape - 1, at the end of a training."""
        features = self.features([*shapes, other], np.ones(len(shapes) + 1))
        terms = np.exp(features @ self.coefficients.T)
        slopes = (terms[:, :, None] * features[:, None, :])[:, SPREAD > 0] / terms.sum(axis=1, keepdims=True)
        slopes = slopes[:-1] - slopes[-1]
        return np.sqrt(np.einsum("pi,ij,pj->p", slopes, self.covariance, slopes))

    def predict(self, shapes: list[NetworkShape]) -> np.ndarray:
        """Losses [P] of shapes at the end of a training."""
        return self.losses(self.features(shapes, np.ones(len(shapes))))
