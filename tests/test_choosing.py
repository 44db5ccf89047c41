"""What a sequential search chooses by: seeds of pi, budgets, the SuperNet's weights, and what it says about them."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nas.derivation.supernet_evaluator import choose_among_seeds, compare_with_rules
from nas.search.estimators import risk_seeking_weights
from nas.search.schedule import describe_maturity

import derive
from nas.core.config import LatencyOptions
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import expand
from nas.costs.budget import likeliest_path
from nas.costs.cost_table import MILLISECONDS, CostTable
from nas.derivation import choosing, relearning
from nas.derivation.pattern_record import Choice, candidates_table, pattern_record
from nas.derivation.runs import SearchRun, check_seeds, describe_spread
from nas.search import phase as phases
from nas.search.outcome import cost_in_trainings
from nas.search.sampling import PathsWithinBudget
from nas.search.supernet import MUST_EQUAL
from tests.making import COSTS, NAMES, Evaluator, make_search, one_hot, search_run

SHARED = ["search.shared_projections=true", "search.operations=[attention,sparse_fixed,dense]"]
SEQUENTIAL = ["search.schedule=sequential", "search.warmup_steps=null", "search.estimator=risk_seeking"]


# --- the logits


def test_the_share_of_best_paths_grows_with_the_progress(small_config):
    phase = make_search(small_config(*SEQUENTIAL, "search.logits_steps=10", "search.best_fraction=0.2"))
    losses = torch.tensor([3.0, 1.0, 2.0, 7.0, 5.0, 4.0], dtype=torch.float64)
    for progress, share in ((-0.5, 0.2), (0.0, 0.2), (0.35, 0.6), (0.7, 1.0), (1.0, 1.0)):
        phase.estimator.progress = progress
        torch.testing.assert_close(phase.estimator.weights(losses), risk_seeking_weights(losses, share))


def test_each_seed_of_the_logits_has_its_own_progress(small_config):
    more = ["train.steps=2", "search.logits_steps=10", "search.logits_seeds=2"]
    phase = make_search(small_config(*SEQUENTIAL, *more))
    seen = []
    phase.estimator.weights = lambda losses: seen.append(phase.estimator.progress) or losses * 0
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
    assert seen == pytest.approx([0.1 * step for step in range(1, 11)] * 2)


def test_the_marginals_within_a_budget_equal_those_of_enumeration(small_config):
    phase = make_search(small_config(*SEQUENTIAL, "search.latency.source=flops", "search.latency.target=0.6"))
    assert isinstance(phase.paths, PathsWithinBudget)
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).double()
    names = phase.supernet.operations
    expected, total = torch.zeros(3, 3, dtype=torch.float64), 0.0
    for path in product(range(3), repeat=3):
        if phase.flops.ratio([names[index] for index in path]) <= 0.6:
            probability = torch.stack([logits[block].softmax(-1)[index] for block, index in enumerate(path)]).prod()
            total += probability
            expected[range(3), path] += probability
    assert 0 < total < 1
    torch.testing.assert_close(phase.paths.marginals(logits), expected / total)


def test_the_search_chooses_the_best_seed_of_pi_on_valid(small_config, monkeypatch):
    phase = make_search(small_config(*SEQUENTIAL))
    for best in range(3):
        paths = [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
        seeds = [torch.tensor(np.log(one_hot(*path))) for path in paths]
        phase.learned, phase.supernet.logits.data = seeds[:2], seeds[2].float()
        losses = iter([5.0 - (tuple(path) == paths[best]) for path in {tuple(path) for path in paths}])
        monkeypatch.setattr(phases, "evaluate_split", lambda *inputs: {"nll": next(losses)})  # noqa: B023
        assert phase.evaluate(None, 1) == {"nll": 4.0} and phase.chosen == list(paths[best])


def test_a_search_stops_early_only_in_its_last_seed_of_pi(small_config):
    more = ["train.steps=4", "search.logits_steps=10", "search.logits_seeds=2"]
    phase = make_search(small_config(*SEQUENTIAL, *more, "search.stable_share=1", "search.stable_steps=6"))
    stopped = []
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
        phase.convergence.changed_at = [0, 0, 0]
        if phase.finished(step):
            stopped.append(step)
    assert stopped[0] == 15 + 6  # the last seed begins at step 15


# --- the choice among patterns


def test_the_best_path_among_seeds_of_pi_is_derived():
    runs = [search_run(one_hot(0, 1), one_hot(1, 1)), search_run(one_hot(1, 0), one_hot(2, 0))]
    for best in ((0, 1), (1, 1), (1, 0), (2, 0)):
        evaluator = Evaluator({path: 3.0 - (path == best) for path in product(range(3), repeat=2)})
        assert choose_among_seeds(Choice([0, 1]), runs, COSTS, [evaluator]).path == list(best)


def test_rules_cost_at_most_the_limit():
    evaluators = [Evaluator({path: sum(path) + more for path in product(range(3), repeat=4)}) for more in (0, 1)]
    rules = compare_with_rules(
        evaluators, ["attention"] * 4, NAMES, COSTS, COSTS.ratio(["attention", "dense", "identity", "identity"])
    )
    assert rules == {
        "pi": {"pattern": "aaaa", "nll": 0.5},
        "interleaved": {"pattern": "adii", "nll": 5.5},
        "sandwich": {"pattern": "adii", "nll": 5.5},
        "par": {"pattern": "adii", "nll": 5.5},
        "one attention": {"pattern": "adii", "nll": 5.5},
    }


def rules_shown(capsys, nll: float, blocks: list[str]) -> str:
    rules = {"pi": {"pattern": "aa", "nll": 3.0}, "par": {"pattern": "ad", "nll": nll}}
    confidence = [{"pi": {"attention": 0.5, "dense": 0.5}}]
    derive.print_candidates({"derived_from": {"candidates": rules}, "confidence": confidence, "blocks": blocks})
    return capsys.readouterr().out


def test_a_rule_that_the_supernet_prefers_causes_a_warning(capsys):
    assert "WARNING" not in rules_shown(capsys, 2.996, ["attention", "dense"])
    assert "WARNING: the SuperNet prefers 'par'" in rules_shown(capsys, 2.99, ["attention", "dense"])


@pytest.mark.parametrize(
    ("letters", "same"), [("iaid", " (the network ad, because identity does nothing)"), ("ad", "")]
)
def test_the_pattern_is_shown_with_its_network(capsys, letters, same):
    blocks = expand(letters)
    confidence = [{"pi": {"attention": 0.5, "dense": 0.5}}]
    derive.print_pattern({"blocks": blocks, "flops_ratio_to_interleaved": 1.0, "confidence": confidence})
    assert capsys.readouterr().out.splitlines()[0] == f"pattern {letters}: {', '.join(blocks)}{same}"


def test_a_rule_that_wins_the_trials_is_named(capsys):
    par = {"pattern": "ad", "nll": 3.0, "trial_nll": 2.5}
    origin = {"candidates": {"pi": {"pattern": "aa", "nll": 3.0, "trial_nll": 2.6}, "par": par}, "chosen": "par"}
    pattern = {"derived_from": origin, "confidence": [{"pi": {"attention": 1.0}}], "blocks": ["attention"]}
    derive.print_candidates(pattern)
    assert "'par' is derived: after trials it is 0.1000 ahead of the pattern of pi\n" in capsys.readouterr().out
    par["trial_nll"] = 2.595
    derive.print_candidates(pattern)
    assert "0.0050 ahead of the pattern of pi, which may be chance" in capsys.readouterr().out
    derive.print_candidates(pattern | {"derived_from": origin | {"chosen": "pi"}})
    assert "NOTICE" not in capsys.readouterr().out


def test_a_pattern_without_attention_causes_a_warning(capsys):
    pattern = {"blocks": ["dense", "identity"], "flops_ratio_to_interleaved": 0.5}
    derive.print_pattern(pattern | {"confidence": [{"pi": {"attention": 0.5, "dense": 0.5}}]})
    assert "WARNING: the pattern has no attention" in capsys.readouterr().out
    derive.print_pattern(pattern | {"confidence": [{"pi": {"dense": 0.5, "identity": 0.5}}]})
    assert "WARNING" not in capsys.readouterr().out


def test_the_table_of_rules_has_a_line_per_network():
    rules = {
        "pi": {"pattern": "aid", "nll": 3.0, "trial_nll": 2.5},
        "par": {"pattern": "adi", "nll": 3.001, "trial_nll": 2.5},
        "sandwich": {"pattern": "aad", "nll": 3.25},
    }
    first, second = candidates_table(rules).splitlines()[1:]
    assert first.split() == ["aid", "3.0000", "2.5000", "pi,", "par"]
    assert second.split() == ["aad", "3.2500", "no", "trial:", "0.250", "behind", "sandwich"]
    assert "trial" not in candidates_table({"pi": {"pattern": "aid", "nll": 3.0}})


# --- other budgets


def make_run(folder: Path, **options) -> SearchRun:
    """A run folder with a configuration and an empty checkpoint."""
    options = {"schedule": "sequential", "sampling": "hard", "weights_from": None} | options
    latency = {"source": "flops", "mode": "budget", "target": 0.6}
    folder.mkdir()
    (folder / "checkpoint.pt").touch()
    content = {"search": options | {"latency": latency}}
    write_yaml(folder / "config.yaml", content)
    return search_run(one_hot(0, 1), path=folder, **content)


def test_only_weights_of_uniform_paths_judge_patterns(tmp_path):
    assert make_run(tmp_path / "hard").can_evaluate_patterns
    assert not make_run(tmp_path / "soft", sampling="soft").can_evaluate_patterns
    joint = make_run(tmp_path / "joint", schedule="joint")
    assert not make_run(tmp_path / "of-joint", weights_from=str(tmp_path / "joint")).can_evaluate_patterns
    with pytest.raises(InputError, match="needs weights that trained on uniform paths"):
        relearning.relearn([joint], COSTS, [0.5])


def test_a_budget_in_another_unit_is_learned_anew(tmp_path):
    run, measured = make_run(tmp_path / "run"), CostTable(MILLISECONDS, 1.0, COSTS.blocks)
    assert choosing.default_method([run], [], COSTS) == "argmax"
    assert choosing.default_method([run], [0.6], COSTS) == "budget"
    assert choosing.default_method([run], [0.6], measured) == "relearn"
    assert choosing.default_method([run], [0.5], COSTS) == "relearn"


@pytest.mark.parametrize(("estimator", "attentions"), [("risk_seeking", 1), ("straight_through", None)])
def test_pi_is_learned_from_paths_within_the_new_limits(small_config, monkeypatch, estimator, attentions):
    phase = make_search(small_config(*SEQUENTIAL, "train.steps=2", f"search.estimator={estimator}"))
    search = replace(phase.config.search, latency=LatencyOptions(source="measured"))  # the limits of the search itself
    parts = {
        "config": replace(phase.config, search=search),
        "supernet": phase.supernet,
        "corpus": phase.corpus,
        "context": phase.context,
    }
    drawn, sample = [], PathsWithinBudget.sample
    monkeypatch.setattr(PathsWithinBudget, "sample", lambda *inputs: drawn.extend(sample(*inputs)) or drawn[-4:])
    run = search_run(one_hot(0, 0, 0))
    learned = relearning.learn_within(run, SimpleNamespace(**parts), phase.flops, 0.95, attentions)
    patterns = [phase.supernet.names(path) for path in drawn]
    assert drawn and 0.4 < max(map(phase.flops.ratio, patterns)) <= 0.95
    assert max(pattern.count("attention") for pattern in patterns) == (attentions or 2)
    torch.testing.assert_close(torch.from_numpy(learned.seed_pi[0]), phase.supernet.pi().double())


def test_the_likeliest_path_keeps_the_limit_of_attentions(monkeypatch):
    pi = one_hot(0, 0, 1)  # prefers two attentions
    assert likeliest_path(pi, NAMES, COSTS, 1.0) == [0, 0, 1]
    expected = likeliest_path(pi, NAMES, COSTS, 1.0, 1)
    assert expected.count(0) == 1 and expected[2] == 1
    assert likeliest_path(one_hot(0, 2, 1), NAMES, COSTS, 1.0, 1) == [0, 1, 1]  # identity would leave budget unused
    run = search_run(pi)
    monkeypatch.setattr(SearchRun, "can_evaluate_patterns", True)
    monkeypatch.setattr(relearning, "load_evaluator", lambda path: None)
    monkeypatch.setattr(relearning, "learn_within", lambda run, *limits: run)
    (choice,) = relearning.relearn([run], COSTS, [1.0], 1)
    assert choice.path == expected and choice.attentions == 1
    evaluator = Evaluator({path: sum(path) for path in product(range(3), repeat=3)})
    assert choose_among_seeds(replace(choice, path=[2, 2, 2]), [run], COSTS, [evaluator]).path == expected


# --- several runs


def test_runs_with_the_same_weights_show_the_spread_of_pi(tmp_path):
    first = make_run(tmp_path / "first")
    second = make_run(tmp_path / "second", weights_from=str(tmp_path / "first"))
    third = make_run(tmp_path / "third")
    choose = lambda pi: pi.argmax(axis=1).tolist()  # noqa: E731
    second = search_run(one_hot(1, 0), path=second.path, **second.content)
    assert describe_spread([first, second], choose)[2:] == [
        "2.0 of 2 blocks differ between two seeds of pi with the same weights"
    ]
    third = search_run(one_hot(0, 0), path=third.path, **third.content)
    assert describe_spread([first, third], choose)[2:] == ["1.0 of 2 blocks differ between two SuperNets"]
    second.content["seed"] = 2
    assert any("so it shows the spread of pi alone" in notice for notice in check_seeds([first, second]))


# --- statements


def test_the_spread_and_the_certainty_keep_the_limit_of_attentions(capsys):
    runs = [search_run(one_hot(0, 0, 1), one_hot(0, 0, 1))]
    choice = Choice([0, 1, 1], 1.0, 1)
    derive.print_spread(choice, runs, COSTS)
    assert "aad" not in capsys.readouterr().out
    record = pattern_record(choice, runs, "relearn", COSTS)["confidence"]
    assert sum(block["pi"]["attention"] for block in record) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("more", "times"),
    [
        ([], 30),
        (SHARED, 45),
        ([*SHARED, "search.fair_warmup=false"], 30),
        (["search.sampling=soft"], 90),
    ],
)
def test_maturity_counts_the_updates_of_each_operation(small_config, more, times):
    config = small_config(*SEQUENTIAL, "train.steps=90", *more)
    assert f"train each operation of a block {times} times" in describe_maturity(config, 90)


def test_the_cost_is_counted_in_trainings(small_config):
    phase = make_search(small_config(*SEQUENTIAL, "train.steps=90", "search.retrain_steps=20"))
    trainer = SimpleNamespace(weights_seconds=9.0, weights_steps=45)  # 0.2 s per step, so 4 s for 20 steps
    assert cost_in_trainings(phase, trainer, 14.0) == pytest.approx(3.5)
    phase.config.search.retrain_steps = None  # then a training has as many steps as an operation has updates: 30
    assert cost_in_trainings(phase, trainer, 15.0) == pytest.approx(2.5)
    soft = make_search(small_config(*SEQUENTIAL, "search.sampling=soft", "train.steps=90"))
    assert cost_in_trainings(soft, trainer, 14.0) is None


def test_weights_serve_only_searches_with_the_same_network():
    assert {"model.", "search.operations", "search.shared_projections", "search.sampling"} <= set(MUST_EQUAL)
