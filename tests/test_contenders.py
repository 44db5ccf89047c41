"""The patterns that a comparison trains: their random patterns, latencies and names."""

import os
from dataclasses import replace

import pytest

from nas.comparison.baselines import choose_baselines
from nas.comparison.comparison import Comparison
from nas.comparison.spec import Contender, given_contenders, pattern_file, read_settings
from nas.comparison.timer import Timer
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.pattern import interleaved, network, read_pattern
from nas.costs.cost_table import MILLISECONDS, CostTable
from tests.comparing import write_comparison_yaml

COSTS = CostTable(MILLISECONDS, 1.0, {"attention": 4.0, "dense": 1.0, "identity": 0.0})


@pytest.fixture
def comparison(tmp_path, small_yaml, monkeypatch):
    """A comparison of 6 blocks with a fake timer: the latency of COSTS, plus 10% if the first block is dense."""

    def measure(self, contenders, rounds=0):
        times = {c.key: COSTS.cost(c.blocks) * (1.1 if c.blocks[0] == "dense" else 1.0) for c in contenders}
        return {key: {"median_ms": ms, "ratio_to_interleaved": ms / 16} for key, ms in times.items()}

    monkeypatch.setattr(Timer, "table", lambda self, kept: COSTS)
    monkeypatch.setattr(Timer, "measure", measure)

    def make(*overrides, **changed) -> Comparison:
        path = write_comparison_yaml(tmp_path, small_yaml, **changed)
        settings, config = read_settings(path, {}), load_config(tmp_path / "small.yaml", ["model.blocks=6", *overrides])
        given = given_contenders(settings, path, 6)
        comparison = Comparison(settings, given, config, config, tmp_path / "run", ["model.blocks=6", *overrides])
        comparison.start(path.read_text())
        return comparison

    return make


SEARCHED = Contender("searched", "searched", ["attention", "dense", "dense", "identity", "attention", "dense"])  # 12 ms


def test_random_patterns_have_the_measured_latency_of_the_searched_pattern(comparison):
    made = comparison(random=4, patterns=["interleaved"], budgets=None)
    made.write_pattern(SEARCHED)
    choose_baselines(made)
    random = [contender for contender in made.known_contenders() if contender.kind == "random"]
    assert [contender.name for contender in random] == [f"random-{n}" for n in range(1, 5)]
    assert len({network(c.blocks) for c in [SEARCHED, *random]}) == 5
    for contender in random:
        assert COSTS.cost(contender.blocks) == 12.0 and contender.blocks[0] != "dense"
        origin = read_pattern(pattern_file(made.path, contender.name))["derived_from"]
        assert origin == {"method": "random", "at_latency_of": "addiad", "predicted_ratio": 1.0, "measured_ratio": 1.0}


def test_each_searched_pattern_has_its_own_random_patterns(comparison):
    made = comparison(random=2, patterns=["interleaved"], budgets=[0.5, 0.75])
    blocks = {11.0: ["attention", "dense", "dense", "attention", "identity", "identity"], 12.0: SEARCHED.blocks}
    for name, pattern in zip(("searched-0.5", "searched-0.75"), blocks.values(), strict=True):
        made.write_pattern(Contender(name, "searched", pattern))
    choose_baselines(made)
    costs = {c.name: COSTS.cost(c.blocks) for c in made.known_contenders() if c.kind == "random"}
    assert costs == {"random-0.5-1": 11.0, "random-0.5-2": 11.0, "random-0.75-1": 12.0, "random-0.75-2": 12.0}


def test_random_patterns_train_with_their_own_seeds(comparison):
    made = comparison(random=1, patterns=["interleaved"], budgets=None, seeds=[1, 2], random_seeds=[2, 5])
    random = Contender("random-1", "random", ["dense"] * 6)
    names = [task.name for task in made.training_tasks([*made.given, random])]
    assert names == ["adadad-1", "adadad-2", "dddddd-2", "dddddd-5"]


def test_each_budget_is_derived_with_the_default_method(comparison):
    def commands(**changed) -> list[list[str]]:
        made = comparison(patterns=["interleaved"], **changed)
        os.close(made.run.lock)
        return [task.command[3:-2] for task in made.derivation_tasks()]

    assert commands(budgets=None) == [[]]
    assert commands(budgets=[0.65, 1.0]) == [["--latency-budget", "0.65"], ["--latency-budget", "1.0"]]
    assert commands(budgets=[0.5], trials=9) == [["--latency-budget", "0.5", "--trials", "9"]]


def test_a_search_that_trains_operations_less_than_the_recipe_gives_a_warning(comparison, capsys):
    os.close(comparison(patterns=["interleaved"], budgets=None).run.lock)
    assert "WARNING" not in capsys.readouterr().out  # it is a joint search
    comparison("search.schedule=sequential", "search.warmup_steps=null", patterns=["interleaved"], budgets=None)
    assert capsys.readouterr().out.count("train each operation of a block 3 times, ") == 1


def test_random_patterns_stay_when_more_are_drawn(comparison):
    made = comparison(random=2, patterns=["interleaved"], budgets=None)
    made.write_pattern(SEARCHED)
    choose_baselines(made)
    before = [contender.blocks for contender in made.known_contenders()]
    os.close(made.run.lock)
    more = comparison(random=4, patterns=["interleaved"], budgets=None)
    choose_baselines(more)
    assert [contender.blocks for contender in more.known_contenders()][: len(before)] == before
    assert len({network(contender.blocks) for contender in more.known_contenders()}) == len(before) + 2


def test_most_parameters_within_the_latency(comparison):
    made = comparison(patterns=["parameters"], budgets=[0.75, 0.9])
    made.write_pattern(Contender("searched-0.9", "searched", ["attention", "dense", "dense"] * 2))  # 13 ms
    choose_baselines(made)
    assert not pattern_file(made.path, "parameters").exists()  # the smallest latency is not known yet
    made.write_pattern(replace(SEARCHED, name="searched-0.75"))
    choose_baselines(made)
    (richest,) = [contender for contender in made.known_contenders() if contender.kind == "parameters"]
    assert COSTS.cost(richest.blocks) <= 12.0
    sizes = {name: made.parameters([name]) for name in COSTS.blocks}
    assert sizes["attention"] > sizes["dense"]  # at these sizes, so it prefers attention within the budget
    assert sorted(richest.blocks) == ["attention"] * 1 + ["dense"] * 5 or COSTS.cost(richest.blocks) == 12.0


def test_another_pattern_under_a_known_name_is_refused(comparison):
    made = comparison(patterns=["interleaved"], budgets=None)
    with pytest.raises(InputError, match=r"interleaved\.yaml holds another pattern than dddddd"):
        made.write_pattern(Contender("interleaved", "given", ["dense"] * 6))


def test_latencies_are_measured_again_only_if_conditions_change(comparison, monkeypatch):
    made, calls = comparison(patterns=["interleaved"], budgets=None), []
    monkeypatch.setattr(
        Timer, "measure", lambda self, contenders, rounds: calls.append(1) or {c.key: {} for c in contenders}
    )
    baseline, other = Contender("interleaved", "given", interleaved(6)), Contender("other", "given", ["dense"] * 6)
    known = made.timer.measure_or_reuse([baseline], {})
    assert made.timer.measure_or_reuse([baseline], known) is known and len(calls) == 1
    both = made.timer.measure_or_reuse([baseline, other], known)
    assert len(calls) == 2 and made.timer.measure_or_reuse([baseline], both) is both
    made.timer.measure_or_reuse([baseline], known | {"holds_for": known["holds_for"] | {"threads": 99}})
    assert len(calls) == 3
