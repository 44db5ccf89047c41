"""The ranking experiment: its tables, and the correction of the judgement of width."""

from types import SimpleNamespace

import numpy as np
import pytest

from nas.core.pattern import expand
from nas.costs.flops import count_flops
from tests.making import load_script


@pytest.fixture(scope="module")
def ranking():
    return load_script("ranking/run")


def test_the_correction_makes_the_judged_effect_of_width_the_true_one(ranking):
    """A SuperNet that halves the effect of width orders two patterns wrongly, and rightly once it is corrected."""
    patterns = [expand("ad16xad"), expand("adad"), expand("ad8xad")]
    found = ranking.corrected([3.03, 3.04, 3.035], patterns, family=[3.0, 2.98, 2.96], truth=[3.0, 2.0, 2.92])
    assert found == pytest.approx([3.03 - 0.01, 3.04, 3.035 - 0.005])  # (-0.08 - -0.04) / 4 blocks for 16x, half for 8x


def test_the_report_has_a_tau_for_each_judge_of_the_finished_jobs(ranking, tmp_path, capsys):
    jobs, patterns = ranking.Jobs(tmp_path, [], "*"), [expand("adi"), expand("a d8x i"), expand("aad")]
    for index, pattern in enumerate([*patterns, *ranking.FAMILY]):
        assert ranking.report(jobs, patterns) == {"missing": 6 - index}
        result = {"nll": 3.0 - index / 10, "short_nll": 4.0 + index, "flops": index, "seconds": 1.0}
        jobs.do(f"alone-{ranking.file_name(pattern)}", lambda: result)  # noqa: B023
    jobs.do("supernet-shared-1", lambda: {"nll": [5.0, 4.0, 4.5, 3.0, 3.0, 3.0]})
    taus = ranking.report(jobs, patterns)["tau"]
    assert taus["shared weights, seed 1"] == pytest.approx(1 / 3, abs=1e-3) and taus["FLOPs (more is better)"] == 1
    assert taus["alone, 1/6 of the steps"] == -1 and "separate weights, seed 1" not in taus
    shown = capsys.readouterr().out
    assert "| a d8x i | 2.9000 | 4.0000 |" in shown


def test_a_supernet_trains_each_operation_as_often_as_a_pattern_alone(ranking, monkeypatch, small_config):
    def open_experiment(path, overrides):
        return small_config("search.operations=[dense,dense 8x,attention]", "train.steps=10", *overrides), None, None

    def train_supernet(config, corpus, context):
        return SimpleNamespace(supernet=SimpleNamespace(operations=config.search.operations), nll=sum)

    monkeypatch.setattr(ranking, "open_experiment", open_experiment)
    monkeypatch.setattr(ranking, "train_supernet", train_supernet)
    judged = ranking.judge("shared", ["seed=2"], [["dense", "attention"]])
    assert judged["steps"] == 30 and judged["nll"] == [2]


def test_the_patterns_are_different_networks_of_one_budget(ranking, monkeypatch, small_config):
    config = small_config("search.operations=[attention,conv,dense,dense 8x,identity]", "model.blocks=6")
    costs = count_flops(config, np.arange(40, 0, -1))
    monkeypatch.setattr(ranking, "open_costs", lambda overrides: (config, None, None, costs))
    patterns = ranking.random_patterns([])
    assert len({ranking.file_name([b for b in pattern if b != "identity"]) for pattern in patterns}) == len(patterns)
    assert all(abs(costs.ratio(pattern) / ranking.BUDGET - 1) <= 0.05 for pattern in patterns)
