"""The methods of derivation, by name.

Each takes (runs, pi [N, O] averaged over the runs, cost table, budgets, number of trials) and returns a Choice for each
budget, or a single one. Budgets are ratios to the interleaved pattern's cost. Methods that evaluate the SuperNet import
torch when they are called.
"""

from collections.abc import Callable

import numpy as np

from nas.costs.table import CostTable
from nas.derivation.budget import best_within
from nas.derivation.pattern_record import Choice
from nas.derivation.runs import SearchRun

Method = Callable[[list[SearchRun], np.ndarray, CostTable, list[float], int], list[Choice]]


def argmax(runs, pi, costs, budgets, trials) -> list[Choice]:
    """The likeliest operation of each block."""
    return [Choice(pi.argmax(axis=1).tolist())]


def budget(runs, pi, costs, budgets, trials) -> list[Choice]:
    """The highest sum of log pi within each budget."""
    paths = best_within(budgets, pi, runs[0].operations, costs)
    return [Choice(path, budget) for path, budget in zip(paths, budgets, strict=True)]


def perturbation(runs, pi, costs, budgets, trials) -> list[Choice]:
    """The operation whose removal hurts the SuperNet most, for each block."""
    from nas.derivation.perturbation import choose_by_perturbation

    path, losses = choose_by_perturbation([run.path for run in runs])
    return [Choice(path, losses=losses)]


def evolution(runs, pi, costs, budgets, trials) -> list[Choice]:
    """The pattern with which the SuperNet has the lowest loss, within each budget or else the search's target."""
    from nas.derivation.evolution import choose_by_evolution

    print("evaluating patterns with the SuperNet's weights; this takes some minutes", flush=True)
    choices = []
    for budget in budgets or [None]:
        path, record = choose_by_evolution(runs, pi, costs, budget, trials)
        choices.append(Choice(path, budget, evolution=record))
    return choices


METHODS: dict[str, Method] = {
    "argmax": argmax,
    "budget": budget,
    "perturbation": perturbation,
    "evolution": evolution,
}
