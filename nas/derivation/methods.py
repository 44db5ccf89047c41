"""The methods of derivation, by name.

Each takes (runs, pi [N, O] averaged over the runs, cost table, budgets) and returns a Choice for each budget, or a
single one. Budgets are ratios to the interleaved pattern's cost.
"""

from nas.costs.budget import best_within
from nas.derivation.pattern_record import Choice

# Methods that evaluate the SuperNet import torch when they are called, so that `derive.py --help` is quick.


def choose_argmax(runs, pi, costs, budgets) -> list[Choice]:
    """The likeliest operation of each block."""
    return [Choice(pi.argmax(axis=1).tolist())]


def choose_within_budgets(runs, pi, costs, budgets) -> list[Choice]:
    """The highest sum of log pi within each budget."""
    paths = best_within(budgets, pi, runs[0].operations, costs)
    return [Choice(path, budget) for path, budget in zip(paths, budgets, strict=True)]


def choose_by_relearning(runs, pi, costs, budgets) -> list[Choice]:
    """The highest sum of log pi within each budget, with pi learned anew for each."""
    from nas.derivation.relearning import relearn

    print("learning pi anew for each budget; this takes some minutes", flush=True)
    return relearn(runs, costs, budgets)


def choose_by_perturbation(runs, pi, costs, budgets) -> list[Choice]:
    """The operation whose removal hurts the SuperNet most, for each block."""
    from nas.derivation.perturbation import perturb

    path, losses = perturb([run.path for run in runs])
    return [Choice(path, losses=losses)]


METHODS = {
    "argmax": choose_argmax,
    "budget": choose_within_budgets,
    "relearn": choose_by_relearning,
    "perturbation": choose_by_perturbation,
}
