"""The estimate of experiments/bench/scaling.py agrees with a small model: parameters, FLOPs and saved bytes."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nas.core.pattern import interleaved
from nas.training.build import build_fixed
from tests.making import load_script

VOCABULARY, ROWS = 3000, 4


def test_a_step_of_a_small_model_costs_what_the_estimate_says(monkeypatch):
    scaling = load_script("bench/scaling")
    monkeypatch.setattr(scaling, "CUTOFFS", [300, 1000])
    config = scaling.make_config(blocks=6, d_model=128)
    config.train.batch_size = ROWS
    segment, memory = config.train.segment, config.train.memory
    torch.manual_seed(0)
    model = build_fixed(interleaved(6), config, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (ROWS, segment + 1))
    counts = torch.bincount(tokens[:, 1:].flatten(), minlength=VOCABULARY).numpy()
    with torch.no_grad():
        _, memories = model(tokens[:, :-1], tokens[:, 1:], None, memory)
    saved = {}

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # a reference, so no address is reused
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            nll, _ = model(tokens[:, :-1], tokens[:, 1:], memories, memory)
        nll.mean().backward()
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    step = scaling.step_costs(config, counts, "retrain", value=scaling.FP32)
    assert step.parameters == step.gradients == sum(parameter.numel() for parameter in model.parameters())
    assert counter.get_total_flops() / (ROWS * segment) == pytest.approx(step.flops_per_token, rel=0.01)
    assert sum(map(len, saved.values())) == pytest.approx(ROWS * step.saved_per_row, rel=0.05)


def test_the_command_prints_the_papers_size(monkeypatch, capsys):
    scaling = load_script("bench/scaling")
    monkeypatch.setattr("sys.argv", ["scaling.py"])
    scaling.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    one, eight, _ = rows[:3]  # a retraining of the paper's size
    assert one["sent_gb"] == 0 and one["compute_ms"] == pytest.approx(8 * eight["compute_ms"])
    assert eight["sent_gb"] == pytest.approx(2 * 7 / 8 * 4 * eight["parameters_m"] / 1e3)
