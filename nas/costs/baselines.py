"""Baseline patterns: rules from the literature."""

import math
from collections.abc import Callable

from nas.core.pattern import interleaved


def sandwich(blocks: int) -> list[str]:
    """Sandwich Transformer (Press, Smith, Levy 2019, arXiv 1911.03864): attention first, dense last.

    Of the interleaved blocks, 6/16 of attention come first and 6/16 of dense come last, the best share in the paper.
    """
    pairs = blocks // 2
    ends = round(pairs * 6 / 16)
    middle = interleaved(2 * (pairs - ends) + blocks % 2)
    return ["attention"] * ends + middle + ["dense"] * ends


def par(blocks: int) -> list[str]:
    """PAR (Mandava et al. 2020, arXiv 2009.04534): one block in five is attention, evenly over the first two thirds."""
    count, reach = max(1, round(blocks / 5)), math.ceil(2 * blocks / 3)
    distance = min(math.ceil(2 * blocks / 3 / count), (reach - 1) // (count - 1) if count > 1 else reach)
    positions = set(range(0, distance * count, distance))
    return ["attention" if index in positions else "dense" for index in range(blocks)]


def hybrid(blocks: int, cheap: str, ratio: int, last_full: bool = False) -> list[str]:
    """Interleaved, in which only one attention block in ratio + 1 is full attention; the others are `cheap`.

    Each group of ratio + 1 ends with full attention. With last_full, or if no group is whole, the last one is full.
    """
    pattern = interleaved(blocks)
    places = [index for index, name in enumerate(pattern) if name == "attention"]
    full = places[ratio :: ratio + 1]
    if last_full or not full:
        full = [*full, places[-1]]
    return [cheap if index in places and index not in full else name for index, name in enumerate(pattern)]


# Patterns that depend on the number of blocks only.
RULES: dict[str, Callable[[int], list[str]]] = {
    "interleaved": interleaved,
    "sandwich": sandwich,
    "par": par,
    # Five sliding windows, then one full attention (Gemma 3, arXiv 2503.19786)
    "local-global": lambda blocks: hybrid(blocks, "window", 5),
    # Three linear attentions, then one full. The last is full, as in the published 27 layers (Kimi Linear, 2510.26692)
    "linear-full": lambda blocks: hybrid(blocks, "linear", 3, last_full=True),
    # Two short convolutions, then one full attention (LFM2, arXiv 2511.23404)
    "conv-attention": lambda blocks: hybrid(blocks, "conv", 2),
    "attention-only": lambda blocks: ["attention"] * blocks,
    "dense-only": lambda blocks: ["dense"] * blocks,
    "no-network": lambda blocks: [],  # cache and counts alone
}


def deepest(rule: Callable[[int], list[str]], most: int, fits: Callable[[list[str]], bool]) -> list[str] | None:
    """The pattern of a rule with the most blocks, at most `most`, that fits; None if not even one block does."""
    return next(filter(fits, map(rule, range(most, 0, -1))), None)
