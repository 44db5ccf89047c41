"""Derivation by evolution (Guo et al. 2019, arXiv 1904.00420, section 3.4).

It chooses the pattern within a budget that has the lowest loss with the SuperNet's weights. pi has separate
probabilities for each block, which were learned while the other blocks were random. Therefore it does not show how
operations work together in a pattern; evolution evaluates whole patterns. As in the paper, the weights should be
trained on uniform paths (search.schedule=sequential). Weights trained on paths from pi favour the operations of pi.
"""

import time
from collections.abc import Callable
from itertools import islice

import numpy as np

from nas.core.errors import InputError
from nas.core.pattern import abbreviate, interleaved, network
from nas.costs.budget import best_within
from nas.costs.cost_table import CostTable
from nas.derivation.baselines import random_patterns
from nas.derivation.pattern_record import Choice
from nas.derivation.runs import SearchRun
from nas.derivation.supernet_evaluator import SuperNetEvaluator
from nas.retraining.phase import train_pattern

POPULATION, PARENTS, GENERATIONS = 36, 12, 10
MUTATION_RATE = 0.1  # of each block
MAX_ATTEMPTS = 10_000  # to generate children that are new and within the budget
TRIAL_SHARE = 5  # a trial takes the search's number of steps divided by this
Architecture = tuple[int, ...]  # an operation's index for each block


def evolve(
    evaluate: Callable[[Architecture], float],
    first: Architecture,
    operations: list[str],
    costs: CostTable,
    budget: float,
    seed: int = 0,
) -> dict[Architecture, float]:
    """The loss of each architecture that was evaluated; all are within the budget.

    evaluate: returns the loss of an architecture; budget: the highest cost, in the table's unit. The first generation
    consists of `first` and of random patterns, see random_population(). Patterns above the budget are dropped.
    """
    generator = np.random.default_rng(seed)
    losses: dict[Architecture, float] = {}
    block_costs = np.array([costs.blocks[name] for name in operations])

    def within_budget(architecture: Architecture) -> bool:
        return costs.overhead + block_costs[list(architecture)].sum() <= budget * (1 + 1e-9)

    limit = min(budget, costs.overhead + len(first) * block_costs.max())
    others = random_population(limit, len(first), operations, costs, seed)
    population = [first, *(tuple(map(operations.index, pattern)) for pattern in others)]
    population = list(filter(within_budget, population))
    for generation in range(GENERATIONS + 1):
        losses |= {architecture: evaluate(architecture) for architecture in population if architecture not in losses}
        parents = sorted(losses, key=losses.get)[:PARENTS]
        if generation < GENERATIONS:
            population = children(parents, len(operations), set(losses), within_budget, generator)
    return losses


def random_population(limit: float, blocks: int, operations: list[str], costs: CostTable, seed: int) -> list[list[str]]:
    """Random patterns that cost 0.9 to 1 of the limit, and cheaper ones if these are too few."""
    patterns: list[list[str]] = []
    for share in (0.1, 1.0):
        try:
            source = random_patterns(blocks, operations, costs, (1 - share / 2) * limit, share / (2 - share), seed)
            patterns += islice(source, POPULATION - 1 - len(patterns))
        except InputError:  # no pattern has such a cost
            continue
    return patterns


def children(parents: list[Architecture], operations: int, known: set, within_budget, generator) -> list[Architecture]:
    """New architectures within the budget, alternately mutations of one parent and crossovers of two.

    known: the architectures so far, to which new ones are added. within_budget: a function from an architecture to
    bool. Half of the mutations also exchange two blocks. Returns fewer architectures if new ones are hard to find.
    """
    result: list[Architecture] = []
    for attempt in range(MAX_ATTEMPTS):
        if len(result) == POPULATION - PARENTS:
            break
        one, two = (parents[generator.integers(len(parents))] for _ in range(2))
        if attempt % 2:
            child = np.where(generator.random(len(one)) < 0.5, one, two)
        else:
            mutated = generator.random(len(one)) < MUTATION_RATE
            child = np.where(mutated, generator.integers(operations, size=len(one)), one)
            if generator.random() < 0.5:
                i, j = generator.integers(len(one), size=2)
                child[[i, j]] = child[[j, i]]
        architecture = tuple(child.tolist())
        if architecture not in known and within_budget(architecture):
            known.add(architecture)
            result.append(architecture)
    return result


def shortlist(losses: dict[Architecture, float], operations: list[str], count: int) -> list[Architecture]:
    """The `count` different networks of lowest loss. Architectures that differ in identity blocks
    only are one network.
    """
    best: dict[str, Architecture] = {}
    for architecture in sorted(losses, key=losses.get):
        best.setdefault(network([operations[index] for index in architecture]), architecture)
    return list(best.values())[:count]


def run_trial(evaluator: SuperNetEvaluator, pattern: list[str], steps: int) -> float:
    """nll per token on the beginning of valid after training a pattern from scratch."""
    model = train_pattern(pattern, evaluator.config, evaluator.corpus, evaluator.context, steps)
    nll = evaluator.model_nll(model)
    print(f"trial of {abbreviate(pattern)}: nll {nll:.4f} after {steps} steps", flush=True)
    return nll


def evolve_pattern(
    runs: list[SearchRun], pi: np.ndarray, costs: CostTable, budget: float | None, trials: int
) -> Choice:
    """The path with the lowest mean loss over the runs, and the record of its evolution.

    pi [N, O]: its own choice within the budget joins the first generation; budget: ratio to the interleaved pattern's
    cost, or None for the target of the search, if it has one. trials: if positive, this number of the best patterns
    is trained from scratch for a fifth of the search's steps. The one with the lowest loss on valid is then chosen,
    because shared weights show little about the order of blocks. Raises InputError if no pattern is cheap enough or a
    run has no checkpoint.
    """
    start, search, baseline = time.monotonic(), runs[0], costs.cost(interleaved(len(pi)))
    limit = search.target if budget is None else budget
    if limit is None:
        limit = max(costs.ratio([name] * len(pi)) for name in search.operations)
    first = tuple(best_within([limit], pi, search.operations, costs)[0])
    if search.options["search.schedule"] != "sequential":
        print("NOTICE: this search trained its weights on paths from pi; evolution needs search.schedule=sequential")
    evaluators = [SuperNetEvaluator(run.path) for run in runs]

    def evaluate(architecture: Architecture) -> float:
        return float(np.mean([evaluator.path_nll(list(architecture)) for evaluator in evaluators]))

    losses = evolve(evaluate, first, search.operations, costs, limit * baseline)
    best = min(losses, key=losses.get)
    record = {"budget": round(limit, 4), "judged": len(losses)}
    if trials:
        steps, candidates = max(1, search.of_steps // TRIAL_SHARE), shortlist(losses, search.operations, trials)
        patterns = [[search.operations[index] for index in candidate] for candidate in candidates]
        nlls = [run_trial(evaluators[0], pattern, steps) for pattern in patterns]
        best = candidates[int(np.argmin(nlls))]
        record["trials"] = {abbreviate(p): round(nll, 4) for p, nll in zip(patterns, nlls, strict=True)}
        record["trial_steps"] = steps
    record |= {"nll": round(losses[best], 4), "nll_of_pi": round(losses[first], 4)}
    return Choice(list(best), budget, evolution=record | {"seconds": round(time.monotonic() - start)})
