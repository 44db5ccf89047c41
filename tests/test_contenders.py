"""The tasks of a comparison, its random patterns and its latencies."""

import os
from dataclasses import asdict, replace

import pytest
import yaml

from nas.comparison.comparison import Comparison
from nas.comparison.results import LATENCIES, read_latencies
from nas.comparison.runner import draw_random
from nas.comparison.spec import Contender, given_contenders, pattern_file, read_settings
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import file_name, interleaved, network, read_pattern
from nas.costs.cost_table import MILLISECONDS, CostTable
from tests.comparing import write_comparison_yaml

COSTS = CostTable(MILLISECONDS, 1.0, {"attention": 4.0, "dense": 1.0, "identity": 0.0})
SEARCHED = Contender("searched", "searched", ["attention", "dense", "dense", "identity", "attention", "dense"])  # 12 ms


@pytest.fixture
def comparison(tmp_path, small_yaml, monkeypatch):
    """A comparison of 6 blocks with fake timing: the latency of COSTS, plus 10% if the first block is dense."""

    def measure(self, patterns, rounds=0):
        times = {file_name(p): COSTS.cost(p) * (1.1 if p[0] == "dense" else 1.0) for p in patterns}
        return {key: {"median_ms": ms, "ratio_to_interleaved": ms / 16} for key, ms in times.items()}

    monkeypatch.setattr(Comparison, "cost_table", lambda self, path: COSTS)
    monkeypatch.setattr(Comparison, "measure", measure)
    opened = []

    def make(*overrides, **changed) -> Comparison:
        for earlier in opened:
            os.close(earlier.run.lock)
        path = write_comparison_yaml(tmp_path, small_yaml, **{"patterns": ["interleaved"], "budgets": None, **changed})
        settings, config = read_settings(path, {}), load_config(tmp_path / "small.yaml", ["model.blocks=6", *overrides])
        given = given_contenders(settings, path, 6, config)
        opened[:] = [Comparison(settings, given, config, config, tmp_path / "run", ["model.blocks=6", *overrides])]
        opened[0].start(path.read_text())
        return opened[0]

    return make


def random_of(made) -> dict[str, list[str]]:
    return {c.name: c.blocks for c in made.known_contenders() if c.kind == "random"}


def test_random_patterns_have_the_measured_latency_of_their_searched_pattern_and_stay(comparison):
    made = comparison(random=2)
    made.write_pattern(SEARCHED)
    draw_random(made, SEARCHED)
    first = random_of(made)
    more = comparison(random=3)
    draw_random(more, SEARCHED)
    random = random_of(more)
    assert list(random) == [f"random-{n}" for n in range(1, 4)] and first.items() <= random.items()
    assert len({network(blocks) for blocks in [SEARCHED.blocks, *random.values()]}) == 4
    for name, blocks in random.items():
        assert COSTS.cost(blocks) == 12.0 and blocks[0] != "dense"
        origin = read_pattern(pattern_file(more.path, name))["derived_from"]
        assert origin == {"method": "random", "at_latency_of": "addiad", "predicted_ratio": 1.0, "measured_ratio": 1.0}


def test_a_search_that_chooses_its_shape_cannot_be_compared_yet(comparison):
    with pytest.raises(InputError, match="needs one vocabulary and width: remove"):
        comparison(
            "search.method=trials", "search.d_model=[8,16]", "data.vocab_size=300", "search.latency.source=flops"
        )


def test_a_repeated_command_accepts_the_runs_of_a_pattern_that_spells_out_a_default_size(comparison, tmp_path):
    blocks = "[attention, dense 24, attention heads=2, dense 24, attention, dense]"  # the defaults of the recipe
    (tmp_path / "spelled.yaml").write_text(f"format: par-pattern/2\nblocks: {blocks}\n")
    made = comparison(patterns=["spelled.yaml"])
    (task, _) = made.training_tasks(made.known_contenders())  # one for each seed
    (folder := task.result.parent).mkdir(parents=True)
    recipe = asdict(replace(made.recipe, seed=1))
    content = {"stage": "retrain", **recipe, "pattern": interleaved(6)}  # as retrain.py records it
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    assert len(comparison(patterns=["spelled.yaml"]).training_tasks(made.known_contenders())) == 2


def test_each_searched_pattern_has_its_own_random_patterns(comparison):
    made = comparison(random=2, budgets=[0.5, 0.75])
    cheap = ["attention", "dense", "dense", "attention", "identity", "identity"]  # 11 ms
    for name, blocks in (("searched-0.5", cheap), ("searched-0.75", SEARCHED.blocks)):
        made.write_pattern(Contender(name, "searched", blocks))
        draw_random(made, Contender(name, "searched", blocks))
    costs = {name: COSTS.cost(blocks) for name, blocks in random_of(made).items()}
    assert costs == {"random-0.5-1": 11.0, "random-0.5-2": 11.0, "random-0.75-1": 12.0, "random-0.75-2": 12.0}


def test_tasks_train_each_pattern_with_its_seeds_and_derive_each_budget(comparison):
    made = comparison(random=1, seeds=[1, 2], random_seeds=[2, 5])
    same = Contender("same", "given", interleaved(6))  # shares the runs of interleaved
    tasks = made.training_tasks([*made.given, same, Contender("r", "random", ["dense"] * 6)])
    assert [task.name for task in tasks] == ["adadad-1", "adadad-2", "dddddd-2", "dddddd-5"]
    assert tasks[0].arguments[1].endswith("interleaved.yaml")
    with pytest.raises(InputError, match=r"interleaved\.yaml holds another pattern than dddddd"):
        made.write_pattern(Contender("interleaved", "given", ["dense"] * 6))
    for changed, commands in (
        ({}, [[]]),
        ({"budgets": [0.5, 1.0]}, [["--latency-budget", b] for b in ("0.5", "1.0")]),
    ):
        assert [task.arguments[2:-2] for task in comparison(**changed).derivation_tasks()] == commands


def test_latencies_are_measured_again_only_if_conditions_change(comparison, monkeypatch):
    made, calls = comparison(), []

    def measure(self, patterns, rounds):
        calls.append(1)
        return {file_name(blocks): {} for blocks in patterns}

    monkeypatch.setattr(Comparison, "measure", measure)
    for count in (1, 1, 2, 2):
        if count == 2:
            made.write_pattern(Contender("other", "given", ["dense"] * 6))
        made.measure_latencies()
        assert len(calls) == count
    known = read_latencies(made.path)
    assert known["patterns"].keys() == {"adadad", "dddddd"}
    write_yaml(made.path / LATENCIES, known | {"holds_for": known["holds_for"] | {"threads": 99}})
    made.measure_latencies()
    assert len(calls) == 3 and read_latencies(made.path) == known
