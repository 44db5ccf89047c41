"""What experiments/bench/scaling.py predicts is what small models have, compute, keep and send."""

import json

import pytest

from models.transformer_xl import TransformerXL
from tests.making import load_script


@pytest.fixture(scope="module")
def scaling():
    return load_script("bench/scaling")


MODES = ["retrain", "soft", "hard"]


def entries(tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_those_of_the_built_model(mode, scaling):
    step = scaling.SmallStep(mode, scaling.small_config())
    assert step.prediction.parameters(mode) == entries(step.weights.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_flops_are_those_that_a_step_computes(mode, scaling):
    predicted, counted = scaling.count_step_flops(mode)
    assert counted == pytest.approx(predicted, rel=0.01)  # the positions' encodings need no gradient


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_kept_is_what_autograd_saves(mode, dropout, scaling):
    predicted, counted = scaling.count_kept(mode, scaling.FP32, dropout)
    assert counted == pytest.approx(predicted, rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_of_bf16_products_too(mode, scaling):
    predicted, counted = scaling.count_kept(mode, scaling.BF16)
    assert counted == pytest.approx(predicted, rel=0.01)  # the encodings are kept, but not by autograd


def test_a_hard_step_has_the_gradients_of_its_path_alone(scaling):
    step = scaling.SmallStep("hard", scaling.small_config())
    found = []
    for shift in range(3):  # together each operation of each block once
        step.set_path(shift)
        step.optimizer.clear()
        step.forward().backward()
        found.append(entries(p.grad for p in step.optimizer.parameters if p.grad is not None))
    assert sum(found) / 3 == pytest.approx(step.prediction.gradients("hard"), rel=1e-12)


@pytest.mark.parametrize("mode", ["retrain", "soft"])
def test_the_tables_gradient_comes_last(mode, scaling):
    """So that no backward pass is left to hide its all-reduce."""
    step, order = scaling.SmallStep(mode, scaling.small_config()), []
    backbone: TransformerXL = step.weights
    for name, parameter in backbone.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    step.forward().backward()
    assert order[-1] == "embedding.weight" and len(order) == len(list(backbone.parameters()))


def test_a_ring_sends_nothing_alone_and_at_most_everything_twice(scaling):
    prediction = scaling.Prediction(scaling.small_config(), scaling.word_counts(3000, 1.07), scaling.FP32)
    for mode in MODES:
        assert prediction.sent(mode, 1) == 0
        assert prediction.sent(mode, 2) == prediction.reduced(mode)
    share, gradients = 0.2, prediction.gradients("hard")
    assert prediction.reduced("hard") == pytest.approx(4 * (0.8 * (gradients + 1) + share * (4 + 6 * 3)))


def test_the_command_ends_in_json(scaling, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scaling.py"])
    scaling.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    paper = found["scales"]["paper"]
    assert paper["sizes"]["table"] == 267_735 * 512
    assert paper["traffic"]["retrain"]["ranks"]["2"]["sent"] == pytest.approx(4 * paper["sizes"]["whole"], rel=1e-6)
    tenfold = found["scales"]["tenfold"]["sizes"]["blocks"] / paper["sizes"]["blocks"]
    assert tenfold == pytest.approx(10, rel=0.02)
