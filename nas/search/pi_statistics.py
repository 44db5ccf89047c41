"""Statistics of pi, the probabilities of each block's operations."""

import numpy as np

TIE = 1e-6  # smaller margins are ties
MARGIN = 0.1  # smaller margins are undecided


def entropy(pi: np.ndarray) -> np.ndarray:
    """Entropy in nats over the last axis: pi [..., O] -> [...]."""
    return -np.where(pi > 0, pi * np.log(np.where(pi > 0, pi, 1)), 0).sum(axis=-1)


def undecided_message(block: int, first: str, second: str, margin: float) -> str:
    """The message that a block has no clear choice. margin: probability of `first`, the likelier one, minus that of
    `second`.
    """
    if margin < TIE:
        return f"block {block} is a TIE between {first} and {second}: its operation is arbitrary"
    return f"block {block} is UNDECIDED: {first} leads {second} by only {margin:.3f}; {second} may be as good"
