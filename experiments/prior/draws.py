"""Random networks of a given cost: the opponents of the search, and the pool of a random search."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from nas.core.config import Config
from nas.core.errors import InputError
from nas.costs.budget import PatternLattice
from nas.costs.cost_table import CostTable
from nas.search.space import Network, make_network

SAMPLES, MAX_MISSES = 200, 4000  # samples at once; in a row, without a new network


def sample_paths(lattice: PatternLattice, logits: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Patterns [K, N] drawn from pi = softmax(logits) within the limit. noise [K, N, O]: standard Gumbel noise."""
    nodes, paths = np.zeros(len(noise), dtype=np.int64), []
    for row, edges, block_noise in zip(lattice.conditional(logits), lattice.edges, noise.swapaxes(0, 1), strict=True):
        paths.append(np.argmax(row[nodes] + block_noise, axis=1))  # arXiv 1611.01144, equation 1
        nodes = edges[nodes, paths[-1]]
    return np.stack(paths, axis=1)


def random_patterns(
    blocks: int, operations: list[str], costs: CostTable, target: float, tolerance: float, seed: int
) -> Iterator[list[str]]:
    """Different networks whose cost is within a share `tolerance` of the target.

    The number of blocks is uniform, and then the operations are; identity comes last. So each network has one spelling,
    and deep networks are as frequent as shallow ones. A number of blocks is left out after MAX_MISSES samples in a row
    without a new network.

    target: cost in the table's unit. Raises InputError if no sample has such a cost.
    """
    names, lattices = [name for name in operations if name != "identity"], {}
    for count in range(1, blocks + 1) if len(names) < len(operations) else [blocks]:
        with suppress(ValueError):  # too many blocks
            highest = target * (1 + tolerance) - costs.overhead
            lattices[count] = PatternLattice([costs.blocks[name] for name in names], count, highest)
    generator, seen, misses = np.random.default_rng(seed), set(), Counter()
    while lattices:
        count = int(generator.choice(list(lattices)))
        uniform = np.zeros((count, len(names)))
        noise = generator.gumbel(size=(SAMPLES, *uniform.shape))
        for path in sample_paths(lattices[count], uniform, noise).tolist():
            misses[count] += 1
            pattern = [names[index] for index in path]
            if tuple(path) not in seen and abs(costs.cost(pattern) / target - 1) <= tolerance:
                seen.add(tuple(path))
                misses[count] = 0
                yield [*pattern, *["identity"] * (blocks - count)]
                break
        if misses[count] >= MAX_MISSES:
            del lattices[count]
    if not seen:
        raise InputError(f"no pattern of {blocks} blocks costs {target:.4g} {costs.unit}, within {tolerance:.0%}")


def random_networks(
    config: Config, tables: dict[tuple[int, int], CostTable], limit: float, band: float
) -> Iterator[Network]:
    """Different networks of `band` to 1 of a cost. Vocabulary and width are uniform, and then as in random_patterns().

    tables: costs of each vocabulary and width. Those that have no network, or none left, are left out.
    """
    middle, tolerance = limit * (1 + band) / 2, (1 - band) / (1 + band)
    about, generator = (config.model.blocks, config.search.operations), np.random.default_rng(config.seed)
    draws = {
        shape: random_patterns(*about, table, middle, tolerance, config.seed * len(tables) + number)
        for number, (shape, table) in enumerate(tables.items())
    }
    while draws:
        shape = list(draws)[generator.integers(len(draws))]
        try:
            yield make_network(*shape, next(draws[shape]))
        except (InputError, StopIteration):
            del draws[shape]
