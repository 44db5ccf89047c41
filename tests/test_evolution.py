"""Derivation by evolution, on a known loss function and on a small search."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nas.core.errors import InputError
from nas.core.run_folder import open_run
from nas.costs.cost_table import MILLISECONDS, CostTable
from nas.costs.flops import count_flops
from nas.derivation import evolution
from nas.derivation.evolution import POPULATION, evolve, evolve_pattern, shortlist
from nas.derivation.runs import read_run
from nas.derivation.supernet_evaluator import SuperNetEvaluator
from nas.retraining.phase import train_pattern
from nas.training.trainer import Trainer
from tests.making import make_retraining, make_search

pytestmark = pytest.mark.slow

OPERATIONS = ["attention", "dense", "identity"]
COSTS = CostTable(MILLISECONDS, 2.0, {"attention": 5.0, "dense": 1.0, "identity": 0.0})


def loss(path) -> float:
    """Attention helps only after dense, and more in early blocks, so no block can be evaluated separately."""
    good = sum(10 - index for index in range(1, len(path)) if path[index] == 0 and path[index - 1] == 1)
    return -good - 0.1 * path.count(1)


def test_evolution_finds_the_best_pattern_within_the_budget():
    budget = 24.0
    candidates = [
        path for path in itertools.product(range(3), repeat=9) if COSTS.cost([OPERATIONS[i] for i in path]) <= budget
    ]
    judged = []
    losses = evolve(lambda path: judged.append(path) or loss(path), (2,) * 9, OPERATIONS, COSTS, budget)
    assert min(losses.values()) == min(map(loss, candidates))
    assert len(judged) == len(set(judged)) == len(losses) < 0.05 * len(candidates)
    assert set(losses) <= set(candidates) and (2,) * 9 in losses


def test_evolution_is_deterministic_and_not_worse_than_its_first_pattern():
    first = (1, 0, 1, 0, 1, 0, 1, 0, 1)
    one, two = (evolve(loss, first, OPERATIONS, COSTS, 100.0, seed=3) for _ in range(2))
    assert one == two and min(one.values()) <= loss(first)
    assert evolve(loss, first, OPERATIONS, COSTS, 100.0, seed=4).keys() != one.keys()


def test_evolution_evaluates_few_patterns_once_each():
    """Two blocks have only nine patterns, so children() finds no more new ones."""
    losses = evolve(loss, (2, 2), OPERATIONS, COSTS, 100.0)
    assert len(losses) <= 9 < POPULATION


def test_a_shortlist_has_different_networks():
    losses = {(1, 2, 0): 1.0, (1, 0, 2): 1.1, (0, 1, 2): 1.2, (1, 1, 1): 1.3}
    assert shortlist(losses, OPERATIONS, 3) == [(1, 2, 0), (0, 1, 2), (1, 1, 1)]
    assert shortlist(losses, OPERATIONS, 1) == [(1, 2, 0)]


@pytest.fixture(scope="module")
def searched(tmp_path_factory, small_yaml):
    from nas.core.config_loading import load_config

    config = load_config(
        small_yaml, ["search.schedule=sequential", "search.warmup_steps=null", "search.logits_steps=6"]
    )
    run = open_run(tmp_path_factory.mktemp("evolution") / "run", config, "search", False)
    run.start(config, {})
    phase = make_search(config)
    count_flops(config, phase.corpus.counts()).write(run.path / "flops.yaml")
    Trainer(phase, run).fit()
    return run.path, config, phase


def test_the_choice_has_the_lowest_loss_of_all_patterns_with_the_searched_weights(searched):
    path, _, _ = searched
    run = read_run(path)
    evaluator = SuperNetEvaluator(path)
    nlls = {p: evaluator.path_nll(list(p)) for p in itertools.product(range(3), repeat=3)}
    choice = evolve_pattern([run], run.pi, run.flops, None, trials=0)
    record = choice.evolution
    assert tuple(choice.path) == min(nlls, key=nlls.get)
    assert record["judged"] == 27 and record["nll"] == pytest.approx(min(nlls.values()), abs=1e-4)
    assert record["nll_of_pi"] == pytest.approx(nlls[tuple(run.pi.argmax(axis=1))], abs=1e-4)
    cheap = evolve_pattern([run], run.pi, run.flops, 0.5, trials=0)
    within = [p for p in nlls if run.flops.ratio([run.operations[i] for i in p]) <= 0.5]
    assert tuple(cheap.path) == min(within, key=nlls.get) and cheap.evolution["budget"] == 0.5
    with pytest.raises(InputError, match="no pattern fits a budget"):
        evolve_pattern([run], run.pi, run.flops, 0.01, trials=0)


def test_trials_train_the_best_patterns_and_choose_one(searched, monkeypatch):
    path, config, _ = searched
    run, tried = read_run(path), []
    monkeypatch.setattr(evolution, "run_trial", lambda _, *trial: tried.append(trial) or -len(tried))
    choice = evolve_pattern([run], run.pi, run.flops, None, trials=3)
    assert len(tried) == len(choice.evolution["trials"]) == 3
    assert {steps for _, steps in tried} == {config.train.steps // 5}
    assert [run.operations[i] for i in choice.path] == tried[-1][0]  # the last had the lowest


def test_a_trial_is_training_from_scratch(searched):
    path, config, phase = searched
    pattern, evaluator = ["dense", "attention", "identity"], SuperNetEvaluator(path)
    config = replace(config, train=replace(config.train, steps=6, warmup_steps=1))
    torch.manual_seed(config.seed)
    alone = make_retraining(config, pattern, phase.corpus)
    for step in range(1, 7):
        alone.step(step)
    alone.model.eval()
    expected = evaluator.model_nll(alone.model)

    def trial(steps: int) -> float:
        return evaluator.model_nll(train_pattern(pattern, evaluator.config, evaluator.corpus, evaluator.context, steps))

    assert trial(6) == pytest.approx(expected, rel=1e-6)
    assert trial(6) != pytest.approx(trial(3), rel=1e-4)
    assert np.isfinite(expected)
