"""Derivation for another budget: pi is learned anew with the weights of a finished search.

A SuperNet trained on uniform paths serves all budgets. Learning pi needs only forward passes, so it takes minutes where
training the weights took hours.
"""

import sys
import time
from dataclasses import replace

import torch
from tqdm import tqdm

from nas.core.config import LatencyOptions, SearchOptions
from nas.core.errors import InputError
from nas.costs.budget import likeliest_path, patterns_within
from nas.costs.cost_table import CostTable
from nas.derivation.pattern_record import Choice
from nas.derivation.runs import UNIFORM_WEIGHTS, SearchRun, average_pi
from nas.derivation.supernet_evaluator import SuperNetEvaluator, load_evaluator
from nas.search.phase import SearchPhase
from nas.search.sampling import PathsWithinBudget


def relearn(
    runs: list[SearchRun], costs: CostTable, budgets: list[float], attentions: int | None = None
) -> list[Choice]:
    """A choice for each budget, a ratio to the interleaved pattern's cost, each with its own pi.

    Raises InputError if a run has no checkpoint, if its weights did not train on uniform paths, or if no pattern fits a
    budget.

    Args:
        attentions: the highest number of limited_operations(); None: any.
    """
    for run in runs:
        if not run.can_evaluate_patterns:
            raise InputError(f"--method relearn needs {UNIFORM_WEIGHTS.format(run.path)}")
    evaluators, choices = [load_evaluator(run.path) for run in runs], []
    for budget in budgets:
        began = time.monotonic()
        own = [learn_within(run, one, costs, budget, attentions) for run, one in zip(runs, evaluators, strict=True)]
        path = likeliest_path(average_pi(own), own[0].operations, costs, budget, attentions)
        choices.append(Choice(path, budget, attentions, runs=own, seconds=time.monotonic() - began))
    return choices


def learn_within(
    run: SearchRun, evaluator: SuperNetEvaluator, costs: CostTable, budget: float, attentions: int | None = None
) -> SearchRun:
    """The run with pi learned anew among the patterns within a budget, on the run's held-out text."""
    # weights_from: no step trains the weights. LatencyOptions(): only `paths`, below, limits the cost.
    options = replace(evaluator.config.search, weights_from=str(run.path), latency=LatencyOptions())
    if options.estimator == "straight_through":  # it cannot draw paths within a budget
        options = replace(options, estimator=SearchOptions.estimator)
    config = replace(evaluator.config, search=options)
    paths = PathsWithinBudget(patterns_within(budget, config.model.blocks, options.operations, costs, attentions))
    torch.manual_seed(config.seed)
    phase = SearchPhase(evaluator.supernet, evaluator.corpus, config, evaluator.context, paths=paths)
    title = f"pi within {budget:.4g}" + ("" if attentions is None else f", at most {attentions} attention")
    if not sys.stderr.isatty():  # a terminal shows a bar
        print(f"learning {title}", flush=True)
    bar = tqdm(range(1, phase.total_steps + 1), title, disable=not sys.stderr.isatty())
    for step in bar:
        phase.step(step)
    return replace(run, seed_pi=phase.pi_of_seeds().numpy())
