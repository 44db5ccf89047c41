"""The choice of a pattern: by the trials of a search, or by pi."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.run_folder import CONFIG
from nas.costs.budget import likeliest_path
from nas.costs.cost_table import CostTable
from nas.costs.printing import least_ratio
from nas.derivation.pattern_record import Choice
from nas.derivation.runs import SearchRun
from nas.search.choice import block_probabilities
from nas.search.space import cheapest, first_candidates, read_network, within_budget
from nas.search.strategy import with_neighbours
from nas.search.surrogate import Point, Surrogate, Text


def tried_choice(run: SearchRun, content: dict, costs: CostTable, budget: float | None) -> Choice:
    """The network that trials chose or, for another budget, the predicted best one of its vocabulary and width.

    content: of choice.yaml.
    """
    own, trials = content["network"], content["trials"]
    if budget is None or (budget == run.budget and costs.unit == run.costs.unit):
        return Choice(own["blocks"], budget, [run], trials=trials, trial=Path(content["trial"]["folder"]))
    shape, config = (own["vocab_size"], own["d_model"]), load_config(run.path / CONFIG, [])
    tried = [read_network(one) for one in trials]
    limit = budget * costs.reference(len(run.pi))
    affordable = within_budget(costs, limit)
    fitting = [one for one in tried if one[:2] == shape and affordable(one.blocks)]
    networks = list(dict.fromkeys([*first_candidates(config, {shape: costs}, limit), *fitting]))
    if not networks:
        least = least_ratio(cheapest(config, costs) / costs.reference(len(run.pi)))
        raise InputError(f"no network is within {budget:.4g} of the reference's cost; give at least {least}")
    points = [Point(one, trial["share"], trial["bits_per_byte"]) for one, trial in zip(tried, trials, strict=True)]
    origin, text = content["surrogate"]["mean_log_sizes"], Text(**content["surrogate"]["text"])
    surrogate = Surrogate(points, [*networks, *tried], config.model.d_ffn, origin, text=text)
    networks = with_neighbours(networks, surrogate, config, {shape: costs}, limit)
    pi = block_probabilities(networks, surrogate.probability_best(networks), run.operations, len(run.pi))
    best = networks[int(np.argmin(surrogate.predict(networks)))]
    return Choice(list(best.blocks), budget, [replace(run, pi=pi)], trials=trials)


def likeliest_choice(runs: list[SearchRun], costs: CostTable, budget: float | None) -> Choice:
    """The likeliest pattern by pi, averaged over the runs."""
    pi = np.mean([run.pi for run in runs], axis=0)
    path = likeliest_path(pi, runs[0].operations, costs, budget)
    return Choice([runs[0].operations[index] for index in path], budget, runs)
