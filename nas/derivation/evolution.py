"""Derivation by evolution (Guo et al. 2019, arXiv 1904.00420, section 3.4): of all patterns within a budget, the one
with which the SuperNet's weights have the lowest loss.

pi has one probability for each block by itself, learned while the other blocks were drawn at random; what an operation
is worth beside the others of a pattern it cannot say. Here whole patterns are judged. The weights should have been
trained on uniform paths (search.weights_paths=uniform), as in the paper: those that followed pi are best where pi is.
Of the best, some can be trained from scratch for a while, to choose among them by more than shared weights.
"""

import copy
import time
from collections.abc import Callable
from itertools import islice

import numpy as np

from nas.core.errors import InputError
from nas.core.pattern import abbreviate, interleaved, network
from nas.costs.table import CostTable
from nas.derivation.baselines import random_patterns
from nas.derivation.budget import choose_within
from nas.derivation.runs import SearchRun
from nas.derivation.supernet_evaluator import TrainedSuperNet
from nas.retraining.phase import RetrainPhase
from nas.training.build import build_fixed
from nas.training.device import set_up_device
from nas.training.evaluation import count_memory_blocks

POPULATION, PARENTS, GENERATIONS = 36, 12, 10


MUTATION = 0.1  # of each block


TRIAL_SHARE = 5  # of the search's steps, one in so many is a trial


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
        return costs.overhead + price[list(path)].sum() <= budget * (1 + 1e-9)

    most = min(budget, costs.overhead + len(first) * price.max())
    population = [
        first,
        *(tuple(map(operations.index, p)) for p in drawn_below(most, len(first), operations, costs, seed)),
    ]
    population = list(filter(affordable, population))
    for generation in range(GENERATIONS + 1):
        losses |= {path: judge(path) for path in population if path not in losses}
        parents = sorted(losses, key=losses.get)[:PARENTS]
        if generation < GENERATIONS:
            population = children(parents, len(operations), set(losses), affordable, source)
    return losses


def drawn_below(most: float, blocks: int, operations: list[str], costs: CostTable, seed: int) -> list[list[str]]:
    """Random patterns that cost from 0.9 of the most to all of it; anything below it, where few do."""
    found: list[list[str]] = []
    for share in (0.1, 1.0):
        try:
            window = random_patterns(blocks, operations, costs, (1 - share / 2) * most, share / (2 - share), seed)
            found += islice(window, POPULATION - 1 - len(found))
        except InputError:  # nothing costs so much
            continue
    return found


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


def shortlist(losses: dict[Choice, float], operations: list[str], count: int) -> list[Choice]:
    """So many of the lowest loss that are different networks: identity does nothing wherever it stands."""
    found: dict[str, Choice] = {}
    for path in sorted(losses, key=losses.get):
        found.setdefault(network([operations[index] for index in path]), path)
    return list(found.values())[:count]


def trial(net: TrainedSuperNet, pattern: list[str], steps: int) -> float:
    """nll per token on the beginning of valid of a pattern that was trained from scratch for so many steps, with the
    search's configuration and a learning rate that ends with them."""
    config = copy.deepcopy(net.config)
    config.train.steps, config.train.epochs = steps, None
    config.train.warmup_steps = min(config.train.warmup_steps, steps // 4)
    set_up_device(config.seed, config.train)  # all begin with the same seed
    phase = RetrainPhase(build_fixed(pattern, config, net.corpus), net.corpus, config, net.context)
    for step in range(1, steps + 1):
        phase.step(step)
    phase.model.eval()
    return net.nll_of(phase.model, count_memory_blocks(phase.model.blocks), net.parts)


def choose_by_evolution(
    runs: list[SearchRun], pi: np.ndarray, costs: CostTable, budget: float | None, trials: int
) -> tuple[list[int], dict]:
    """The path of lowest loss, mean over the runs, and how it was found: how many patterns were judged, its nll per
    token on the beginning of valid, and that of the choice of pi [N, O] within the same budget.

    budget: ratio to the interleaved pattern's cost; None: the target of a search that had one, or else no bound.
    trials: where there are any, so many of the best are trained from scratch for a fifth of the search's steps each,
    and the one with the lowest loss on valid is chosen: weights that all patterns share say little of the order of
    blocks. Raises InputError where no pattern is so cheap, or a run has no checkpoint.
    """
    begun, search, usual = time.monotonic(), runs[0], costs.pattern(interleaved(len(pi)))
    if budget is None:
        dearest = costs.overhead + len(pi) * max(costs.blocks[name] for name in search.operations)
        budget = dearest / usual if search.target is None else search.target
    (first,) = choose_within([budget], pi, search.operations, costs)
    if search.options["search.weights_paths"] != "uniform":
        print("NOTICE: the weights of this search followed pi, and are best where pi is: search.weights_paths=uniform")
    nets = [TrainedSuperNet(run.path, "evolution") for run in runs]

    def judge(path: Choice) -> float:
        return float(np.mean([net.path_nll(list(path)) for net in nets]))

    losses = evolve(judge, tuple(first), search.operations, costs, budget * usual)
    best, tried = min(losses, key=losses.get), {}
    about = {"budget": round(budget, 4), "judged": len(losses)}
    if trials:
        steps = max(1, search.of_steps // TRIAL_SHARE)
        for path in shortlist(losses, search.operations, trials):
            tried[path] = trial(nets[0], [search.operations[index] for index in path], steps)
            print(f"trial of {letters(path, search)}: nll {tried[path]:.4f} after {steps} steps", flush=True)
        best = min(tried, key=tried.get)
        about |= {"trials": {letters(path, search): round(nll, 4) for path, nll in tried.items()}, "trial_steps": steps}
    about |= {"nll": round(losses[best], 4), "nll_of_pi": round(losses[tuple(first)], 4)}
    return list(best), about | {"seconds": round(time.monotonic() - begun)}


def letters(path: Choice, search: SearchRun) -> str:
    return abbreviate([search.operations[index] for index in path])
