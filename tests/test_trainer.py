import json
import math
from dataclasses import replace

import pytest
import torch

from nas.core.errors import RunError
from nas.core.files import read_jsonl
from nas.core.run_folder import RunFolder
from nas.training.optimizer import lr_ratio
from nas.training.train_step import Batch
from nas.training.trainer import Trainer, load_checkpoint
from tests.golden import GOLDEN
from tests.making import BLOCKS, STAGES, assert_same_state, losses_of, make_retraining, make_search


@pytest.mark.parametrize("stage", STAGES)
def test_golden_losses(stage, small_config):
    """The first 15 losses of each stage; a refactoring keeps them. `python -m tests.golden` records them again."""
    expected = json.loads(GOLDEN.read_text())[stage]
    assert losses_of(stage, small_config(*STAGES[stage])) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("schedule", "half_way", "end"), [("cosine", 0.5, 0.0), ("linear", 0.625, 0.25)])
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule, half_way, end):
    ratios = [lr_ratio(step, 100, 10, schedule) for step in range(1, 101)]
    assert ratios[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert (ratios[54], ratios[-1]) == pytest.approx((half_way, end))
    assert ratios[9:] == sorted(ratios[9:], reverse=True) and lr_ratio(1, 100, 0, schedule) <= 1


def test_the_first_steps_read_short_segments_without_memory(small_config):
    """small_config has batches of 2 rows of 16 tokens."""
    config = small_config("train.steps=4", "train.short_share=0.5")
    train = config.train
    phase, shapes = make_retraining(config, ["attention", "dense"]), []
    phase.model.register_forward_pre_hook(lambda model, inputs: shapes.append((*inputs[0].shape, inputs[2] is None)))
    for step in range(1, 5):
        phase.step(step)
    short = (train.batch_size * 2, train.segment // 2, True)
    assert shapes == [short, short, (train.batch_size, train.segment, True), (train.batch_size, train.segment, False)]


def test_short_segments_are_the_same_text(small_config):
    batch = Batch(torch.arange(24).reshape(2, 12), torch.arange(1, 25).reshape(2, 12), None, None).shorten()
    assert torch.equal(batch.tokens, torch.arange(24).reshape(4, 6)) and torch.equal(batch.targets, batch.tokens + 1)


@pytest.fixture
def start_retraining(small_config, tmp_path):
    """start(*options) -> the phase of a dense block, and its run folder"""

    def start(*options):
        config = small_config(*options)
        run = RunFolder(tmp_path / "run", config, "retrain", {"pattern": ["dense"]})
        run.start(config, {})
        return make_retraining(config, ["dense"]), run

    return start


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_checkpoint(start_retraining):
    phase, run = start_retraining("train.steps=20")
    step_of = phase.step

    def poisoned(step):
        if step == 8:
            with torch.no_grad():
                phase.model.embedding.weight[0] = math.nan
        return step_of(step)

    phase.step = poisoned
    with pytest.raises(RunError, match="step 8: the training loss is nan; the checkpoint of step 5 is usable"):
        Trainer(phase, run).fit()
    state = load_checkpoint(run.checkpoint, "phase")
    assert state["step"] == 5
    assert all(torch.isfinite(tensor).all() for tensor in state["phase"]["model"].values())


def test_a_validation_loss_that_is_not_finite_is_reported(start_retraining, monkeypatch):
    figures = {"perplexity": math.nan, "tokens": 9, "nll_per_token": math.nan}
    monkeypatch.setattr("nas.retraining.phase.evaluate_split", lambda *_: figures)
    with pytest.raises(RunError, match="step 7: the validation loss is nan; the checkpoint of step 5 is usable"):
        Trainer(*start_retraining("train.evaluate_every=7")).fit()


def test_a_loss_on_valid_that_rises_twice_is_reported(start_retraining, monkeypatch, capsys):
    losses = iter([2.0, 1.5, 1.6, 1.7, 1.65, 1.9])
    phase, run = start_retraining("train.evaluate_every=4", "train.steps=24")
    figures = {"perplexity": 1.0, "tokens": 9}
    monkeypatch.setattr(phase, "evaluate", lambda run, step: figures | {"nll_per_token": next(losses)})
    Trainer(phase, run).fit()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert "the loss on valid rises, 1.5000 -> 1.6000 -> 1.7000, so the model overfits; give fewer train.epochs" in line


def test_a_gradient_that_is_not_finite_changes_no_weight(small_config):
    phase = make_retraining(small_config(), ["dense"])
    before = phase.model.embedding.weight.clone()
    phase.model.embedding.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match=r"norm is (nan|inf)"):
        phase.step(1)
    assert torch.equal(before, phase.model.embedding.weight)


HARD = "search.method=gumbel", "search.sampling=hard"


@pytest.mark.parametrize(
    "more",
    [[], ["search.method=gumbel"], [*HARD], [*HARD, "search.split=shared"]],
    ids=["weights", "gumbel", "gumbel, hard", "gumbel, hard, shared"],
)
def test_a_resumed_run_equals_one_that_never_stopped(small_config, tmp_path, more):
    """Covers dropout, memories, place in the data, both optimizers, schedules, noise and the log window."""
    results = []
    for name, stop_after in (("whole", None), ("stopped", 13)):
        config = small_config("train.checkpoint_every=13", "model.dropout=0.3", *more)
        phase = make_search(config)
        run = RunFolder(tmp_path / name, config, "search")
        run.start(config, {})
        if stop_after:
            original = phase.step

            def interrupted(step, original=original):
                if step == 17:
                    raise KeyboardInterrupt
                return original(step)

            phase.step = interrupted
            with pytest.raises(KeyboardInterrupt):
                Trainer(phase, run).fit()
            torch.manual_seed(999)
            phase = make_search(config)
        Trainer(phase, run).fit()
        written = [read_jsonl(run.path / name) for name in ("metrics.jsonl", *(["pi.jsonl"] if more else []))]
        results.append((written, phase.state_dict()))
    assert_same_state(*results)


@pytest.mark.parametrize("stopped_at", [5, 8, 11], ids=["short segments", "whole segments", "averaging"])
def test_a_retraining_resumes_exactly_whatever_its_segments(small_config, stopped_at):
    """The stride divides no segment, so the blocks depend on the positions that the memories have read."""
    options = ["train.steps=12", "train.short_share=0.5", "train.average_share=0.2"]
    options += ["model.dropout=0", "model.ngram_rows=[13,11]", "mixture.cache=[1,2]", "mixture.counts=2"]
    config, blocks = small_config(*options), [*BLOCKS.values()]
    whole, part, again = (make_retraining(config, blocks) for _ in range(3))
    for step in range(1, 13):
        whole.step(step)
        if step <= stopped_at:
            part.step(step)
    again.load_state_dict(part.state_dict())
    for step in range(stopped_at + 1, 13):
        again.step(step)
    assert_same_state(whole.state_dict(), again.state_dict())
    alone = make_retraining(replace(config, train=replace(config.train, residual=False)), blocks)
    assert alone.step(1)[0] == make_retraining(config, blocks).step(1)[0]  # the loss of the network alone is logged
    assert alone.stream.loader.beside is None and whole.stream.loader.beside is not None


def test_only_matrices_decay(small_config):
    phase = make_retraining(small_config("train.weight_decay=0.5"), ["attention", "dense"])
    names = {id(parameter): name for name, parameter in phase.model.named_parameters()}
    decayed, others = phase.train_weights.optimizer.adam.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert all(not names[id(p)].endswith("bias") and p.ndim == 2 for p in decayed["params"])
    assert all(names[id(p)].endswith("bias") or "norm" in names[id(p)] for p in others["params"])
    assert any("content_bias" in names[id(p)] for p in others["params"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_updates_are_those_of_clipped_gradients(small_config, name):
    """The reference clips with PyTorch's function and updates with its plain AdamW."""
    config = small_config("train.clip=0.05", "train.weight_decay=0.1", f"train.optimizer={name}")
    own, reference = (make_retraining(config, ["attention", "dense"]).train_weights.optimizer for _ in range(2))
    reference.adam = torch.optim.AdamW(reference.adam.param_groups, betas=(0.9, config.train.beta2), foreach=False)
    assert own.muon is not None if name == "muon" else own.muon is None
    for step in range(1, 21):
        torch.manual_seed(step)
        for a, b in zip(own.parameters, reference.parameters, strict=True):
            a.grad = torch.randn_like(a) * (1e-4 if step % 2 else 1.0)
            b.grad = a.grad.clone()
        own.set_lr(step)
        reference.set_lr(step)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters, 0.05)
        reference.adam.step()
        if reference.muon:
            reference.muon.step(scale=torch.tensor(1.0), finite=torch.tensor(True))
        torch.testing.assert_close(own.step(), norm)
        for a, b in zip(own.parameters, reference.parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    before = [parameter.detach().clone() for parameter in own.parameters]
    own.parameters[0].grad[0] = float("nan")
    assert torch.isnan(own.step())
    assert all(map(torch.equal, before, own.parameters))
