"""Baseline patterns: rules from the literature, and random patterns of a given cost."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from nas.core.errors import InputError
from nas.core.operations import kind_of
from nas.core.pattern import interleaved
from nas.costs.cost_table import CostTable
from nas.costs.lattice import PatternLattice

SAMPLES, MAX_MISSES = 200, 4000  # samples at once; in a row, without a new network


def sandwich(blocks: int) -> list[str]:
    """Sandwich Transformer (Press, Smith, Levy 2019, arXiv 1911.03864): attention first, dense last.

    The blocks of the interleaved pattern are reordered: 6/16 of the attention blocks come first, and 6/16 of the dense
    blocks come last. This share is the best one in the paper.
    """
    pairs = blocks // 2
    ends = round(pairs * 6 / 16)
    middle = interleaved(2 * (pairs - ends) + blocks % 2)
    return ["attention"] * ends + middle + ["dense"] * ends


def par(blocks: int) -> list[str]:
    """The PAR rule (Mandava et al. 2020, arXiv 2009.04534): one block in five is attention, the others are dense.

    The attention blocks are spread evenly over the first two thirds.
    """
    count, reach = max(1, round(blocks / 5)), math.ceil(2 * blocks / 3)
    distance = min(math.ceil(2 * blocks / 3 / count), (reach - 1) // (count - 1) if count > 1 else reach)
    positions = set(range(0, distance * count, distance))
    return ["attention" if index in positions else "dense" for index in range(blocks)]


def hybrid(blocks: int, cheap: str, ratio: int, last_full: bool = False) -> list[str]:
    """Interleaved, in which only one attention block in ratio + 1 is full attention; the others are `cheap`.

    Each group of ratio + 1 ends with full attention. If there are fewer blocks than one group, or with last_full, the
    last one is full.
    """
    pattern = interleaved(blocks)
    places = [index for index, name in enumerate(pattern) if name == "attention"]
    full = places[ratio :: ratio + 1]
    if last_full or not full:
        full = [*full, places[-1]]
    return [cheap if index in places and index not in full else name for index, name in enumerate(pattern)]


def local_global(blocks: int) -> list[str]:
    """Five sliding windows, then one full attention, with dense blocks in between (Gemma 3, arXiv 2503.19786)."""
    return hybrid(blocks, "window", 5)


def linear_full(blocks: int) -> list[str]:
    """Three linear attentions, then one full, with dense blocks in between (Kimi Linear, arXiv 2510.26692).

    The last attention is full, also if its group is incomplete, as in the published model of 27 layers.
    """
    return hybrid(blocks, "linear", 3, last_full=True)


def conv_attention(blocks: int) -> list[str]:
    """Two short convolutions, then one full attention, with dense blocks in between (LFM2, arXiv 2511.23404)."""
    return hybrid(blocks, "conv", 2)


# Patterns that depend on the number of blocks only.
RULES: dict[str, Callable[[int], list[str]]] = {
    "interleaved": interleaved,
    "sandwich": sandwich,
    "par": par,
    "local-global": local_global,
    "linear-full": linear_full,
    "conv-attention": conv_attention,
    "attention-only": lambda blocks: ["attention"] * blocks,
    "dense-only": lambda blocks: ["dense"] * blocks,
}


def deepest(rule: Callable[[int], list[str]], most: int, fits: Callable[[list[str]], bool]) -> list[str] | None:
    """The pattern of a rule with the most blocks, at most `most`, that fits; None if not even one block does."""
    return next(filter(fits, map(rule, range(most, 0, -1))), None)


def rules_within(blocks: int, operations: list[str], fits: Callable[[list[str]], bool]) -> dict[str, list[str]]:
    """{name: pattern} of rules that fit: as many of their blocks as do.

    Identity fills the other blocks. Besides rules of the literature there is `one attention`: an attention block, and
    then dense blocks. Each rule exists with each size of its operations that is a candidate. Rules without cheap
    attentions also exist with each other attention in place of full attention. A rule of which not even one block fits
    is left out.
    """
    plain = {name: RULES[name] for name in ("interleaved", "sandwich", "par")}
    plain["one attention"] = lambda count: ["attention", *["dense"] * (count - 1)]
    rules, found = plain | {name: RULES[name] for name in ("local-global", "linear-full", "conv-attention")}, {}
    sizes = range(blocks, 0, -1) if "identity" in operations else [blocks]
    for name, rule in rules.items():
        parts = sorted(set(rule(blocks)))
        choices = [[block for block in operations if block.split()[0] == part] for part in parts]
        if name in plain and "attention" in parts:
            choices[parts.index("attention")] = [block for block in operations if kind_of(block).attends]
        for chosen in itertools.product(*choices):
            own = dict(zip(parts, chosen, strict=True))
            patterns = ([own[part] for part in rule(count)] + ["identity"] * (blocks - count) for count in sizes)
            fitting = next(filter(fits, patterns), None)
            if fitting:
                others = " and ".join(block for part, block in own.items() if block != part)
                found[f"{name} with {others}" if others else name] = fitting
    return found


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
        for path in lattices[count].sample(uniform, generator.gumbel(size=(SAMPLES, *uniform.shape))).tolist():
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
