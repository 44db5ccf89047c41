"""The choice of a pattern: by the trials of a search, or candidates judged by the weights of a SuperNet.

N blocks, O candidate operations.
"""

import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.pattern import abbreviate, expand, network
from nas.costs.baselines import rules_within
from nas.costs.budget import likeliest_path
from nas.costs.cost_table import CostTable, least_ratio
from nas.derivation.pattern_record import PI, RUNNER_UP, SEED, Candidate, Choice
from nas.derivation.runs import SearchRun, average_pi
from nas.networks.halving import block_probabilities, probabilities
from nas.networks.law import Law, Point
from nas.networks.space import cheapest, networks_within, read_network, within
from nas.search.learn_pi import learn_pi
from nas.search.shared_weights import load_shared_weights

RUNNERS_UP, LATE = 8, 0.2  # networks that pi draws most often in this last share of its steps


def choose_pattern(runs: list[SearchRun], costs: CostTable, budget: float | None) -> Choice:
    """The best candidate by shared weights. Raises InputError if no pattern is within the budget."""
    began = time.monotonic()
    learned = [learn_anew(run, costs, budget) for run in runs] if needs_learning(runs, costs, budget) else runs
    candidates = find_candidates(learned, costs, budget)
    weights, operations = [load_shared_weights(run.path) for run in runs], runs[0].operations
    for candidate in candidates:
        path = [operations.index(name) for name in expand(candidate.pattern)]
        candidate.nll = float(np.mean([one.nll(path) for one in weights]))
    candidates.sort(key=lambda candidate: candidate.nll)
    seconds = time.monotonic() - began
    return Choice(expand(candidates[0].pattern), budget, learned, candidates, seconds=seconds)


def tried_choice(run: SearchRun, content: dict, costs: CostTable, budget: float | None) -> Choice:
    """The network that trials chose or, for another budget, the best one of its vocabulary and width by their law.

    content: of choice.yaml.
    """
    own, trials = content["network"], content["trials"]
    if budget in (None, run.budget):
        return Choice(own["blocks"], budget, [run], trials=trials, trial=Path(content["trial"]["folder"]))
    shape, config = (own["vocab_size"], own["d_model"]), load_config(run.path / "config.yaml", [])
    tried = [read_network(one) for one in trials]
    limit = budget * costs.reference(len(run.pi))
    fitting = [one for one in tried if one[:2] == shape and within(costs, limit)(one.blocks)]
    networks = list(dict.fromkeys([*networks_within(config, {shape: costs}, limit), *fitting]))
    if not networks:
        least = least_ratio(cheapest(config, costs) / costs.reference(len(run.pi)))
        raise InputError(f"no network is within {budget:.4g} of the reference's cost; give at least {least}")
    points = [Point(one, trial["share"], trial["bits_per_byte"]) for one, trial in zip(tried, trials, strict=True)]
    law = Law(points, list(dict.fromkeys([*networks, *tried])), config.model.d_ffn)
    pi = block_probabilities(networks, probabilities(law, networks), run.operations, len(run.pi))
    best = networks[int(np.argmin(law.predict(networks)))]
    return Choice(list(best.blocks), budget, [replace(run, seed_pi=pi[None])], trials=trials)


def likeliest_choice(runs: list[SearchRun], costs: CostTable, budget: float | None) -> Choice:
    """The likeliest pattern, for weights that cannot judge others because they favour their own pi."""
    path = likeliest_path(average_pi(runs), runs[0].operations, costs, budget)
    return Choice([runs[0].operations[index] for index in path], budget, runs)


def needs_learning(runs: list[SearchRun], costs: CostTable, budget: float | None) -> bool:
    """Whether pi was learned within another budget, or in another unit of cost."""
    others = any(budget != run.budget for run in runs)
    return others or (budget is not None and costs.unit != runs[0].costs.unit)


def learn_anew(run: SearchRun, costs: CostTable, budget: float | None) -> SearchRun:
    """The run with pi learned within a budget."""
    title = "pi" if budget is None else f"pi within {budget:.4g}"
    if not sys.stderr.isatty():  # a terminal shows a bar
        print(f"learning {title}", flush=True)
    learned = learn_pi(load_shared_weights(run.path), costs, budget, title)
    return replace(run, seed_pi=learned.pi, evaluated=learned.evaluated)


def find_candidates(runs: list[SearchRun], costs: CostTable, budget: float | None) -> list[Candidate]:
    """Different networks: pi's likeliest pattern, those of its seeds, its runners-up, and the rules of the same cost.

    Without a budget, rules may cost as much as the likeliest pattern. Networks that differ in the places of identity
    only are one candidate.
    """
    operations, limits = runs[0].operations, (runs[0].operations, costs, budget)
    likeliest = likeliest_path(average_pi(runs), *limits)
    paths = [(PI, likeliest)]
    seeds = [pi for run in runs for pi in run.seed_pi]
    paths += [(SEED, likeliest_path(pi, *limits)) for pi in seeds[len(seeds) == 1 :]]
    paths += [(RUNNER_UP, path) for path in runners_up(runs)]
    patterns = [(name, [operations[index] for index in path]) for name, path in paths]
    if budget is not None:  # runs with latency tables of their own may have drawn costlier paths
        patterns = [(name, blocks) for name, blocks in patterns if name != RUNNER_UP or costs.fits(blocks, budget)]
    limit = costs.ratio(patterns[0][1]) if budget is None else budget
    patterns += rules_within(len(likeliest), operations, lambda blocks: costs.fits(blocks, limit)).items()
    found: dict[str, Candidate] = {}
    for name, blocks in patterns:
        candidate = found.setdefault(network(blocks), Candidate([], abbreviate(blocks)))
        if name not in candidate.names:
            candidate.names.append(name)
    return list(found.values())


def runners_up(runs: list[SearchRun]) -> list[list[int]]:
    """Paths of the networks that pi drew most often in its last steps, in any run and seed."""
    drawn, paths = Counter(), {}
    for run in runs:
        steps = run.options["search.logits_steps"]  # of each seed
        for index, line in enumerate(run.evaluated):
            for path in line["paths"] if index % steps >= (1 - LATE) * steps else ():
                name = network([run.operations[index] for index in path])
                drawn[name] += 1
                paths.setdefault(name, list(path))
    return [paths[name] for name, _ in drawn.most_common(RUNNERS_UP)]
