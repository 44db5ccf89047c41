"""Patterns to hold a searched one against: rules that need no search, and random ones of a given cost. No torch.

N blocks, O candidate operations.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from nas.core.errors import InputError
from nas.core.pattern import interleaved, network
from nas.costs.table import CostTable
from nas.derivation.budget import Frontier


def sandwich(blocks: int) -> list[str]:
    """Press, Smith, Levy 2019 (arXiv 1911.03864): the interleaved pattern's blocks, of which 6 in 16, the best share of
    the paper, stand at each end: attention first, dense last."""
    pairs = blocks // 2
    ends = round(pairs * 6 / 16)
    middle = interleaved(2 * (pairs - ends) + blocks % 2)
    return ["attention"] * ends + middle + ["dense"] * ends


def par(blocks: int) -> list[str]:
    """The rule of Mandava et al. 2020 (arXiv 2009.04534): attention in one block of five, spread over the first two
    thirds, dense elsewhere."""
    count, reach = max(1, round(blocks / 5)), math.ceil(2 * blocks / 3)
    apart = min(math.ceil(2 * blocks / 3 / count), (reach - 1) // (count - 1) if count > 1 else reach)
    places = set(range(0, apart * count, apart))
    return ["attention" if index in places else "dense" for index in range(blocks)]


# Those that depend on nothing but the number of blocks.
RULES: dict[str, Callable[[int], list[str]]] = {
    "interleaved": interleaved,
    "sandwich": sandwich,
    "par": par,
    "attention-only": lambda blocks: ["attention"] * blocks,
    "dense-only": lambda blocks: ["dense"] * blocks,
}


def spread(counts: dict[str, int]) -> list[str]:
    """So many of each operation, each spread evenly: {attention: 2, dense: 2} is the interleaved pattern."""
    placed = [(index / count, name) for name, count in counts.items() for index in range(count)]
    order = list(counts)
    return [name for _, name in sorted(placed, key=lambda item: (item[0], order.index(item[1])))]


def most_parameters(blocks: int, operations: list[str], parameters: dict[str, int], costs: CostTable, budget: float):
    """The most parameters within a cost (in the table's unit), which LiteTransformerSearch (arXiv 2203.02094) takes as
    the stand-in for quality; they do not say in which order, so operations are spread evenly. None where no pattern is
    so cheap."""
    scores = np.tile([float(parameters[name]) for name in operations], (blocks, 1))
    path = Frontier(scores, [costs.blocks[name] for name in operations]).best(budget - costs.overhead)
    return None if path is None else spread({name: path.count(index) for index, name in enumerate(operations)})


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write total as an ordered sum of so many whole numbers from 0."""
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(right - left - 1 for left, right in itertools.pairwise(edges))


def random_patterns(
    blocks: int, operations: list[str], costs: CostTable, target: float, tolerance: float, seed: int
) -> Iterator[list[str]]:
    """Different networks, drawn uniformly among the patterns whose cost is within a share `tolerance` of the target.

    Exact: how often each operation occurs is drawn by the number of patterns that have it so often, and then their
    order. Ends when a thousand draws in a row gave no new network. Raises InputError where no pattern costs so much.
    """
    prices = np.array([costs.blocks[name] for name in operations])
    counts = np.array(list(compositions(blocks, len(operations))))
    counts = counts[abs((costs.overhead + counts @ prices) / target - 1) <= tolerance]
    if not len(counts):
        raise InputError(f"no pattern of {blocks} blocks costs {target:.4g} {costs.unit}, within {tolerance:.0%}")
    log_ways = np.array([-sum(math.lgamma(count + 1) for count in row) for row in counts])
    shares = np.exp(log_ways - log_ways.max())
    source, seen, misses = np.random.default_rng(seed), set(), 0
    while misses < 1000:
        row = counts[source.choice(len(counts), p=shares / shares.sum())]
        pattern = source.permutation(np.repeat(operations, row)).tolist()
        misses += 1
        if network(pattern) not in seen:
            seen.add(network(pattern))
            misses = 0
            yield pattern
