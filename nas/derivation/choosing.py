"""From the pi of search runs to patterns: the method, the budgets, and the choice for each budget."""

from dataclasses import replace

from nas.costs.budget import likeliest_path
from nas.costs.cost_table import CostTable
from nas.derivation.pattern_record import Choice
from nas.derivation.runs import SearchRun, average_pi

AUTO = float("inf")  # trials of enough steps


def plan(
    method: str | None, budgets: list[float], runs: list[SearchRun], costs: CostTable
) -> tuple[str, list[float], CostTable]:
    """The method, the budgets and the costs: those that were given, or else those of the search.

    costs: milliseconds if a run has a table of them, else FLOPs.
    """
    if not method and not budgets and runs[0].budget:
        budgets, costs = [runs[0].budget], runs[0].costs
    return method or default_method(runs, budgets, costs), budgets, costs


def default_method(runs: list[SearchRun], budgets: list[float], costs: CostTable) -> str:
    """argmax without a budget. Else relearn where the weights allow it, unless pi was learned within this budget."""
    if not budgets:
        return "argmax"
    learned = budgets == [runs[0].budget] and costs.unit == runs[0].costs.unit
    return "relearn" if not learned and all(run.can_evaluate_patterns for run in runs) else "budget"


def choose(method: str, runs: list[SearchRun], costs: CostTable, budgets: list[float]) -> list[Choice]:
    """The choice of a method for each budget, or a single one without budgets."""
    if method == "relearn":
        from nas.derivation.relearning import relearn  # imported here because it needs torch

        return relearn(runs, costs, budgets)
    if method == "perturbation":
        from nas.derivation.perturbation import perturb

        path, losses = perturb([run.path for run in runs])
        return [Choice(path, losses=losses)]
    pi = average_pi(runs)
    return [Choice(likeliest_path(pi, runs[0].operations, costs, budget), budget) for budget in budgets or [None]]


def judge(choices: list[Choice], runs: list[SearchRun], costs: CostTable, trial_steps: int | None) -> list[Choice]:
    """Let the SuperNets' weights choose among the seeds of pi, and compare each choice with rules of its cost.

    With trials, the choice is the best of these patterns, and of those with fewer attention blocks, after trials.

    Args:
        trial_steps: None for no trials, AUTO for enough steps to order patterns.
    """
    from nas.derivation.supernet_evaluator import choose_among_seeds, compare_with_rules, load_evaluator
    from nas.derivation.trials import Trials

    evaluators, operations = [load_evaluator(run.path) for run in runs], runs[0].operations
    trials = Trials(runs, costs, evaluators, None if trial_steps == AUTO else trial_steps) if trial_steps else None
    judged = []
    for choice in choices:
        choice = choose_among_seeds(choice, runs, costs, evaluators)
        pattern = [operations[index] for index in choice.path]
        budget = max(costs.ratio(pattern), choice.budget or 0)
        choice = replace(choice, candidates=compare_with_rules(evaluators, pattern, operations, costs, budget))
        judged.append(trials.choose(choice, budget) if trials else choice)
    return judged
