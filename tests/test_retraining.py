import math

from nas.checkpoint import load_checkpoint
from nas.record import open_run
from nas.retraining import BEST, evaluate_best
from nas.trainer import Trainer
from tests.making import make_retraining


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
    results = evaluate_best(phase, run)
    assert results["best_step"] == 2
    assert results["parameters"] == sum(p.numel() for p in phase.model.parameters())


def test_epochs_count_the_training_stream(small_config):
    phase = make_retraining(small_config("train.epochs=2"), ["dense"])
    tokens = len(phase.corpus.tokens("train"))
    assert phase.total_steps == math.ceil(2 * tokens / 32)
