import math

import pytest
import torch

from nas.checkpoint import load_checkpoint
from nas.evaluation import total_nll
from nas.record import open_run
from nas.retraining import BEST, evaluate_best
from nas.trainer import Trainer
from tests.making import assert_same_state, make_retraining


def test_retraining_keeps_the_best_weights_and_stops_early(small_config, tmp_path, monkeypatch):
    config = small_config("train.patience=2", "train.evaluate_every=1", "train.steps=50")
    phase = make_retraining(config, ["dense"])
    run = open_run(tmp_path / "run", config, "retrain", False, {"pattern": ["dense"]})
    run.start({})
    curve = iter([3.0, 2.0, 2.5, 2.4, 1.0])
    with monkeypatch.context() as patch:
        figures = {"perplexity": 1.0, "tokens": 9}
        patch.setattr("nas.retraining.evaluate_with", lambda *_: {**figures, "nll_per_token": next(curve)})
        trainer = Trainer(phase, run, config.train)
        trainer.fit()
    assert trainer.step == 4
    assert "the best was step 2" in trainer.stopped
    assert load_checkpoint(run.path / BEST, "model")["step"] == 2
    results = evaluate_best(phase, run, {})
    assert results["best_step"] == 2
    assert results["parameters"] == sum(p.numel() for p in phase.model.parameters())


def test_epochs_count_the_training_stream(small_config):
    phase = make_retraining(small_config("train.epochs=2"), ["dense"])
    tokens = len(phase.corpus.tokens("train"))
    assert phase.total_steps == math.ceil(2 * tokens / 32)


def test_weights_are_chosen_on_valid_and_the_results_are_the_chosen_weights(small_config, tmp_path):
    config = small_config("train.evaluate_every=4", "train.steps=12")
    phase = make_retraining(config, ["attention", "dense"])
    run = open_run(tmp_path / "run", config, "retrain", False, {"pattern": ["attention", "dense"]})
    run.start({})
    Trainer(phase, run, config.train).fit()
    first = total_nll(phase.model, phase.corpus.tokens("valid"), 5, 8, 8, 1)[0]
    assert phase.evaluate(run, 12)["nll"] == pytest.approx(first, rel=1e-6)
    best = load_checkpoint(run.path / BEST, "model")
    with torch.no_grad():
        for parameter in phase.model.parameters():
            parameter.add_(1.0)  # what came after the best step
    results = evaluate_best(phase, run, {})
    assert results["valid"]["nll_per_token"] == pytest.approx(phase.best_nll, rel=1e-9)
    assert all(torch.equal(value, best["model"][key]) for key, value in phase.model.state_dict().items())
    expected = total_nll(phase.model, phase.corpus.tokens("test"), 5, 8, 8, 1)[0]
    assert results["test"]["nll"] == pytest.approx(expected, rel=1e-6)


def test_training_carries_its_memories(small_config):
    phase, seen = make_retraining(small_config(), ["attention"]), []
    phase.model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[2]))
    kept = []
    for step in range(1, 4):
        phase.step(step)
        kept.append(phase.stream.memories)
    assert seen[0] is None and seen[1] is kept[0] and seen[2] is kept[1]
    assert all(memories.blocks[0].shape == (4, 8, 16) for memories in kept)


def test_the_state_of_a_retraining_is_whole(small_config):
    phase = make_retraining(small_config(), ["attention"])
    for step in range(1, 4):
        phase.step(step)
    phase.best_nll, phase.best_step, phase.without_improvement = 1.25, 2, 1
    other = make_retraining(small_config("seed=9"), ["attention"])
    other.load_state_dict(phase.state_dict())
    assert_same_state(other.state_dict(), phase.state_dict())
    assert (other.best_nll, other.best_step, other.without_improvement) == (1.25, 2, 1)
