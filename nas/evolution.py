"""Derivation by evolution (Guo et al. 2019, arXiv 1904.00420, section 3.4): of all patterns within a budget, the one
with which the SuperNet's weights have the lowest loss.

pi has one probability for each block by itself, learned while the other blocks were drawn at random; what an operation
is worth beside the others of a pattern it cannot say. Here whole patterns are judged. The weights should have been
trained on uniform paths (search.weights_paths=uniform), as in the paper: those that followed pi are best where pi is.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np

from nas.baselines import random_patterns
from nas.costs import CostTable
from nas.derivation import SearchRun, choose_within
from nas.pattern import interleaved
from nas.trained import TrainedSuperNet

POPULATION, PARENTS, GENERATIONS = 36, 12, 10
MUTATION = 0.1  # of each block
MOST_TRIES = 10_000  # to find children that are new and within the budget

Choice = tuple[int, ...]  # an operation's index for each block


def evolve(
    judge: Callable[[Choice], float],
    first: Choice,
    operations: list[str],
    costs: CostTable,
    budget: float,
    seed: int = 0,
) -> dict[Choice, float]:
    """The loss of each path that was judged, all within the budget.

    judge: loss of a path; first: one within the budget, which joins the first generation, so that the best is no
    worse; budget: the most that a pattern may cost, in the table's unit. The rest of the first generation is drawn
    uniformly from the patterns that cost from 0.9 of the budget to all of it.
    """
    source = np.random.default_rng(seed)
    losses: dict[Choice, float] = {}
    price = np.array([costs.blocks[name] for name in operations])

    def affordable(path: Choice) -> bool:
        return costs.rest + price[list(path)].sum() <= budget * (1 + 1e-9)

    most = min(budget, costs.rest + len(first) * price.max())
    drawn = random_patterns(len(first), operations, costs, 0.95 * most, 0.05 / 0.95, seed)
    population = [first, *(tuple(map(operations.index, pattern)) for pattern in islice(drawn, POPULATION - 1))]
    population = list(filter(affordable, population))
    for generation in range(GENERATIONS + 1):
        losses |= {path: judge(path) for path in population if path not in losses}
        parents = sorted(losses, key=losses.get)[:PARENTS]
        if generation < GENERATIONS:
            population = children(parents, len(operations), set(losses), affordable, source)
    return losses


def children(parents: list[Choice], operations: int, known: set[Choice], affordable, source) -> list[Choice]:
    """New paths within the budget, by turns mutated from one of the parents, with two of its blocks exchanged half of
    the time, and mixed block by block from two of them. Fewer where new ones are hard to find."""
    found: list[Choice] = []
    for attempt in range(MOST_TRIES):
        if len(found) == POPULATION - PARENTS:
            break
        one, two = (parents[source.integers(len(parents))] for _ in range(2))
        if attempt % 2:
            child = np.where(source.random(len(one)) < 0.5, one, two)
        else:
            child = np.where(source.random(len(one)) < MUTATION, source.integers(operations, size=len(one)), one)
            if source.random() < 0.5:
                i, j = source.integers(len(one), size=2)
                child[[i, j]] = child[[j, i]]
        path = tuple(child.tolist())
        if path not in known and affordable(path):
            known.add(path)
            found.append(path)
    return found


def choose_by_evolution(
    runs: list[SearchRun], pi: np.ndarray, costs: CostTable, budget: float | None
) -> tuple[list[int], dict]:
    """The path of lowest loss, mean over the runs, and how it was found: how many patterns were judged, its nll per
    token on the beginning of valid, and that of the choice of pi [N, O] within the same budget.

    budget: ratio to the interleaved pattern's cost; None: the target of a search that had one, or else no bound.
    Raises InputError where no pattern is so cheap, or a run has no checkpoint.
    """
    search, usual = runs[0], costs.pattern(interleaved(len(pi)))
    if budget is None:
        priced = search.options["search.latency.source"] != "none" and search.options["search.latency.mode"] == "target"
        dearest = costs.rest + len(pi) * max(costs.blocks[name] for name in search.operations)
        budget = search.options["search.latency.target"] if priced else dearest / usual
    (first,) = choose_within([budget], pi, search.operations, costs)
    nets = [TrainedSuperNet(run.path, "evolution") for run in runs]

    def judge(path: Choice) -> float:
        return float(np.mean([net.path_nll(list(path)) for net in nets]))

    losses = evolve(judge, tuple(first), search.operations, costs, budget * usual)
    best = min(losses, key=losses.get)
    about = {"budget": round(budget, 4), "judged": len(losses)}
    return list(best), about | {"nll": round(losses[best], 4), "nll_of_pi": round(losses[tuple(first)], 4)}
