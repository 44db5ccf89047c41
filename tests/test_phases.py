import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nas.assembly import build_fixed, build_supernet
from nas.checkpoint import load_checkpoint
from nas.data import Corpus
from nas.errors import InputError, RunError
from nas.prepare import prepare
from nas.record import open_run, read_lines
from nas.retraining import BEST, Retraining, evaluate_best
from nas.searching import Search
from nas.trainer import Trainer, learning_rate
from tests.reference import expected_loss

GOLDEN = Path(__file__).parent / "golden.json"
STAGES = {
    "search_leave_one_out": ["search.paths=3"],
    "search_straight_through": ["search.estimator=straight_through", "search.split=shared"],
    "search_soft": ["search.sampling=soft", "search.split=shared", "model.norm=post"],
    "retrain": ["model.cutoffs=[5,20]"],
}


def make_phase(config, corpus=None):
    torch.manual_seed(config.seed)
    corpus = corpus or Corpus(prepare(config.data))
    return Search(build_supernet(config, corpus), corpus, config)


def make_retraining(config, pattern, corpus=None):
    torch.manual_seed(config.seed)
    corpus = corpus or Corpus(prepare(config.data))
    return Retraining(build_fixed(pattern, config, corpus), corpus, config)


def losses_of(stage, config) -> list[float]:
    phase = make_retraining(config, ["attention", "dense", "identity"]) if stage == "retrain" else make_phase(config)
    return [phase.step(step)[0] for step in range(1, 16)]


@pytest.mark.parametrize("stage", STAGES)
def test_golden_losses(stage, small_config):
    """The first 15 losses of each stage; a refactoring must not change them. `python -m tests.golden` records anew."""
    expected = json.loads(GOLDEN.read_text())[stage]
    assert losses_of(stage, small_config(*STAGES[stage])) == pytest.approx(expected, rel=1e-4)


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    rates = [learning_rate(step, 100, 2.0, 10, 0.1) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[54] == pytest.approx((2.0 + 0.2) / 2)  # half-way down
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rate(1, 100, 2.0, 0, 0.0) <= 2.0


@pytest.mark.parametrize("more", [[], ["search.sampling=soft"], ["search.estimator=straight_through"]])
def test_heldout_logits_steps_leave_the_weights_alone_and_the_other_way_round(small_config, more):
    config = small_config("search.split=heldout", "search.warmup_steps=2", "search.arch_fraction=0.25", *more)
    phase = make_phase(config)
    for step in range(1, 13):
        weights = [p.clone() for p in phase.supernet.backbone.parameters()]
        logits = phase.supernet.logits.clone()
        phase.step(step)
        is_logits_step = step > 2 and step % 4 == 0
        moved = any(not torch.equal(a, b) for a, b in zip(weights, phase.supernet.backbone.parameters(), strict=True))
        assert moved != is_logits_step
        assert torch.equal(logits, phase.supernet.logits) != is_logits_step


def test_heldout_text_is_contiguous_and_unseen_by_the_weights(small_config):
    phase = make_phase(small_config("search.arch_fraction=0.2"))
    tokens = phase.corpus.tokens("train")
    border = round(0.8 * len(tokens))
    np.testing.assert_array_equal(phase.stream.rows.flatten(), tokens[: phase.stream.rows.size])
    assert phase.stream.rows.size <= border
    held = phase.arch_stream.rows.flatten()
    np.testing.assert_array_equal(held, tokens[border : border + held.size])


@pytest.mark.parametrize("more", [[], ["search.sampling=soft"], ["search.estimator=straight_through"]])
def test_shared_batches_teach_both_after_the_warm_up(small_config, more):
    phase = make_phase(small_config("search.split=shared", "search.warmup_steps=2", *more))
    for step in range(1, 6):
        weights, logits = phase.supernet.backbone.embedding.weight.clone(), phase.supernet.logits.clone()
        phase.step(step)
        assert not torch.equal(weights, phase.supernet.backbone.embedding.weight)
        assert torch.equal(logits, phase.supernet.logits) == (step <= 2)


def test_the_paths_that_are_scored_see_no_dropout_and_the_same_batch(small_config):
    phase = make_phase(small_config("model.dropout=0.5", "search.warmup_steps=0", "search.paths=2"))
    batch = phase.arch_stream.next()
    again = []
    for _ in range(2):
        phase.generator.manual_seed(3)
        phase.score_paths(batch, phase.arch_stream)
        again.append(phase.supernet.logits.grad.clone())
    assert torch.equal(*again)


def test_temperature_starts_after_the_warm_up_and_ends_exactly(small_config):
    phase = make_phase(small_config("search.temperature.start=2.0", "search.temperature.end=0.3"))
    assert [phase.temperature_of(step) for step in (1, 6)] == [2.0, 2.0]
    assert 0.3 < phase.temperature_of(7) < 2.0
    assert phase.temperature_of(24) == 0.3


def test_evaluation_follows_the_likeliest_path_without_noise(small_config, tmp_path):
    phase = make_phase(small_config())
    with torch.no_grad():
        phase.supernet.logits[:, 1] += 1
    first, second = phase.evaluate(None, 0), phase.evaluate(None, 0)
    assert first == second
    assert [block.choice for block in phase.supernet.backbone.blocks] == [[(1, 1.0)]] * 3


def test_a_price_on_flops_is_the_exact_gradient_of_the_expected_cost(small_config):
    price = ["search.latency.source=flops", "search.latency.weight=2", "search.latency.mode=penalty"]
    phase = make_phase(small_config(*price))
    logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    names = phase.supernet.operations
    by_paths = expected_loss(logits, lambda path: torch.tensor(phase.costs.ratio([names[i] for i in path])))
    by_sum = phase.costs.expected_ratio(logits, names)
    assert by_sum.item() == pytest.approx(by_paths.item())
    slow, fast = (torch.autograd.grad(value, logits)[0] for value in (by_paths, by_sum))
    torch.testing.assert_close(slow, fast)


def test_the_hinge_charges_only_above_the_target(small_config):
    for target, charged in ((0.01, True), (5.0, False)):
        price = ["search.latency.source=flops", f"search.latency.target={target}"]
        phase = make_phase(small_config(*price))
        phase.supernet.logits.grad = torch.zeros_like(phase.supernet.logits)
        before = phase.supernet.logits.clone()
        phase.update_logits()
        assert torch.equal(before, phase.supernet.logits) != charged


def test_search_stops_early_once_the_pattern_is_stable(small_config):
    phase = make_phase(small_config("search.stable_share=0.5", "search.stable_steps=5"))
    phase.path_since = [0, 3, 10]
    assert phase.finished(10) is None  # the warm-up of 6 steps does not count
    assert "2 of 3 blocks kept their choice for 5 steps" in phase.finished(11)
    phase.path_since = [0, 9, 10]
    assert phase.finished(11) is None


def test_doubtful_outcomes_are_warned_of(small_config):
    phase = make_phase(small_config())
    with torch.no_grad():
        phase.supernet.logits.copy_(torch.tensor([[0.0, 0, 4], [0, 0, 4], [0, 0.05, 0]]))
    phase.path_since = [0, 100, 0]
    text = " ".join(phase.warnings(100))
    assert "identity has taken over 2 of 3 blocks" in text
    assert "near uniform in block 3" in text
    assert "not settled: block 2 changed" in text


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
    assert load_checkpoint(run.path / BEST)["step"] == 2
    results = evaluate_best(phase, run)
    assert results["best_step"] == 2
    assert results["parameters"] == sum(p.numel() for p in phase.model.parameters())


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_checkpoint(small_config, tmp_path):
    config = small_config("train.steps=20")
    phase = make_retraining(config, ["dense"])
    run = open_run(tmp_path / "run", config, "retrain", False, {"pattern": ["dense"]})
    run.start({})
    step_of = phase.step

    def poisoned(step):
        if step == 8:
            with torch.no_grad():
                phase.model.embedding.weight[0] = math.nan
        return step_of(step)

    phase.step = poisoned
    with pytest.raises(RunError, match="step 8: the training loss is nan; the checkpoint of step 5 is usable"):
        Trainer(phase, run, config.train).fit()
    state = load_checkpoint(run.checkpoint)
    assert state["step"] == 5
    assert all(torch.isfinite(tensor).all() for tensor in state["phase"]["model"].values())


def test_a_gradient_that_is_not_finite_changes_no_weight(small_config):
    phase = make_retraining(small_config(), ["dense"])
    before = phase.model.embedding.weight.clone()
    phase.model.embedding.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match=r"norm is (nan|inf)"):
        phase.step(1)
    assert torch.equal(before, phase.model.embedding.weight)


def test_epochs_count_the_training_stream(small_config):
    phase = make_retraining(small_config("train.epochs=2"), ["dense"])
    tokens = len(phase.corpus.tokens("train"))
    assert phase.total_steps == math.ceil(2 * tokens / 32)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.warmup_steps=24", "search.warmup_steps=24 must be less than the 24 training steps"),
        ("train.batch_size=3000", "too short for train.batch_size=3000"),
        ("search.arch_fraction=0.001", "held-out .search.arch_fraction. stream has"),
        ("model.cutoffs=[5,4000]", "must stay below the vocabulary size"),
    ],
)
def test_what_does_not_fit_the_data_is_named(small_config, override, message):
    with pytest.raises(InputError, match=message):
        make_phase(small_config(override))


def test_an_empty_validation_split_is_named(small_config, memory_corpus):
    with pytest.raises(InputError, match="the valid split has 1 tokens"):
        make_phase(small_config(), memory_corpus(10, np.zeros(5000, dtype=int), np.array([1])))


@pytest.mark.parametrize("more", [[], ["search.sampling=soft", "search.split=shared"]])
def test_resuming_in_the_middle_equals_never_stopping(small_config, tmp_path, more):
    """Dropout, memories, place in the data, both optimizers, schedules, noise, and windows of the log."""
    results = []
    for name, stop_after in (("whole", None), ("stopped", 13)):
        config = small_config("train.checkpoint_every=13", "model.dropout=0.3", *more)
        phase = make_phase(config)
        run = open_run(tmp_path / name, config, "search", False)
        run.start({})
        if stop_after:
            original = phase.step

            def interrupted(step, original=original):
                if step == 17:
                    raise KeyboardInterrupt
                return original(step)

            phase.step = interrupted
            with pytest.raises(KeyboardInterrupt):
                Trainer(phase, run, config.train).fit()
            torch.manual_seed(999)
            phase = make_phase(config)
        Trainer(phase, run, config.train).fit()
        results.append((read_lines(run.path / "metrics.jsonl"), read_lines(run.path / "pi.jsonl"), phase))
    assert results[0][0] == results[1][0]
    assert results[0][1] == results[1][1]
    for a, b in zip(results[0][2].supernet.parameters(), results[1][2].supernet.parameters(), strict=True):
        assert torch.equal(a, b)
