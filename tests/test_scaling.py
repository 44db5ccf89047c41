"""Predictions of experiments/bench/step_costs.py agree with small models: sizes, FLOPs, saved and sent bytes."""

import json

import pytest

from models.transformer_xl import TransformerXL
from tests.making import load_script


@pytest.fixture(scope="module")
def scaling():
    return load_script("bench/scaling")


@pytest.fixture(scope="module")
def check():
    return load_script("bench/scaling_check")


MODES = ["retrain", "soft", "hard"]


def entries(tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_those_of_the_built_model(mode, check):
    step = check.SmallStep(mode, check.small_config())
    assert step.costs.parameters(mode) == entries(step.weights.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_predicted_flops_are_those_of_a_step(mode, check):
    predicted, counted = check.count_step_flops(mode)
    assert counted == pytest.approx(predicted, rel=0.01)  # the position encodings need no gradient


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saved_bytes_are_those_that_autograd_saves(mode, dropout, check):
    predicted, counted = check.count_saved(mode, check.FP32, dropout)
    assert counted == pytest.approx(predicted, rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_saved_bytes_of_bf16_products(mode, check):
    predicted, counted = check.count_saved(mode, check.BF16)
    assert counted == pytest.approx(predicted, rel=0.01)  # a cache keeps the position encodings, not autograd


def test_a_hard_step_has_only_the_gradients_of_its_path(check):
    step = check.SmallStep("hard", check.small_config())
    counts = []
    for shift in range(3):  # together, each operation of each block once
        step.set_balanced_path(shift)
        step.optimizer.zero_grad()
        step.forward().backward()
        counts.append(entries(p.grad for p in step.optimizer.parameters if p.grad is not None))
    assert sum(counts) / 3 == pytest.approx(step.costs.gradients("hard"), rel=1e-12)


@pytest.mark.parametrize("mode", ["retrain", "soft"])
def test_the_gradient_of_the_table_is_the_last_one(mode, check):
    """No part of the backward pass can therefore hide the all-reduce of this gradient."""
    step, order = check.SmallStep(mode, check.small_config()), []
    backbone: TransformerXL = step.weights
    for name, parameter in backbone.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    step.forward().backward()
    assert order[-1] == "embedding.weight" and len(order) == len(list(backbone.parameters()))


def test_one_rank_sends_nothing_and_two_ranks_send_each_byte_once(scaling, check):
    costs = scaling.StepCosts(check.small_config(), scaling.word_counts(3000, 1.07), check.FP32)
    for mode in MODES:
        assert costs.sent(mode, 1) == 0
        assert costs.sent(mode, 2) == costs.all_reduced(mode)
    share, gradients = 0.2, costs.gradients("hard")
    assert costs.all_reduced("hard") == pytest.approx(4 * (0.8 * (gradients + 1) + share * (4 + 6 * 3)))


def test_the_command_prints_json_last_and_writes_the_tables(scaling, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["scaling.py", "--out", str(tmp_path / "tables.md")])
    scaling.main()
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    paper = figures["scales"]["paper"]
    assert paper["sizes"]["table"] == 267_735 * 512
    assert paper["traffic"]["retrain"]["ranks"]["2"]["sent"] == pytest.approx(4 * paper["sizes"]["whole"], rel=1e-6)
    tenfold = figures["scales"]["tenfold"]["sizes"]["blocks"] / paper["sizes"]["blocks"]
    assert tenfold == pytest.approx(10, rel=0.02)
    assert printed.rpartition("\n{")[0] in (tmp_path / "tables.md").read_text()
