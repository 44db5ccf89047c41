"""Search and retraining on a GPU, and their continuation from a saved state. Skipped without a GPU."""

import copy

import pytest
import torch

from tests.conftest import NO_GPU
from tests.making import make_retraining, make_search

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]
pytestmark += [pytest.mark.filterwarnings("ignore")]  # the compiler warns about attributes that it reads
STAGES = {
    "weights": [],
    "hard": ["search.method=gumbel", "search.sampling=hard", "search.warmup_steps=6"],
    "soft": ["search.method=gumbel", "search.split=shared", "search.warmup_steps=8", "model.cutoffs=[5,20]"],
    "retrain": ["model.cutoffs=[5,20]"],
    "retrain_in_parts": ["train.grad_accum_steps=2"],
}
PATTERN = ["attention", "dense", "attention"]


def make(stage, config):
    return make_retraining(config, PATTERN) if stage.startswith("retrain") else make_search(config)


def is_replayed(phase) -> bool:
    """Whether a CUDA graph runs the steps. A hard search has none, because its operations change."""
    return bool(phase.train_weights.replayed.graphs)


def losses(phase, steps):
    return [float(nll) for nll in (phase.step(step)[0] for step in steps) if nll is not None]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gpu_has_the_losses_of_a_cpu(stage, small_config):
    """In fp32, with and without compilation, a GPU gives the losses and the evaluation of a CPU,
    except for rounding.
    """
    options = [*STAGES[stage], "model.dropout=0", "train.precision=fp32", "train.memory=12"]
    expected = make(stage, small_config(*options))
    right, metrics = losses(expected, range(1, 25)), None
    for compile in ("never", "always"):
        phase = make(stage, small_config(*options, "train.device=cuda", f"train.compile={compile}"))
        assert losses(phase, range(1, 25)) == pytest.approx(right, abs=2e-3)
        assert is_replayed(phase) == (phase.config.search.sampling != "hard" or stage.startswith("retrain"))
        if stage.startswith("retrain"):
            assert phase.stream.memories.blocks[0].is_cuda
        else:
            metrics = phase.evaluate(None, 24), expected.evaluate(None, 24)
            assert metrics[0]["nll_per_token"] == pytest.approx(metrics[1]["nll_per_token"], abs=2e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_training_on_a_gpu_continues_from_a_saved_state(stage, small_config):
    options = [*STAGES[stage], "model.dropout=0", "train.precision=fp32", "train.device=cuda"]
    phase, again = (make(stage, small_config(*options)) for _ in range(2))
    losses(phase, range(1, 13))
    again.load_state_dict(copy.deepcopy(phase.state_dict()))  # a deep copy, as from a file
    assert losses(again, range(13, 21)) == pytest.approx(losses(phase, range(13, 21)), abs=1e-3)
    assert is_replayed(again) == is_replayed(phase)


def test_a_loss_that_is_not_finite_changes_no_weight(small_config):
    phase = make("retrain", small_config("train.device=cuda", "train.compile=never"))
    phase.step(1)
    before = [parameter.clone() for parameter in phase.model.parameters()]
    phase.model.embedding.weight.register_hook(lambda gradient: gradient * float("inf"))
    nll, _ = phase.step(2)
    assert torch.isnan(nll)
    assert all(torch.equal(a, b) for a, b in zip(before, phase.model.parameters(), strict=True))


def test_replayed_steps_draw_new_dropout_masks(small_config):
    phase = make("retrain", small_config("model.dropout=0.5", "train.lr=1e-12", "train.device=cuda"))
    phase.model.train()
    batch = phase.stream.next()
    assert len({float(phase.train_weights(step, batch)[0]) for step in range(1, 13)}) == 12
    assert is_replayed(phase)


def test_losses_in_bf16_are_close_to_those_in_fp32(small_config):
    options = ["model.dropout=0", "train.device=cuda"]
    exact, low = (make("retrain", small_config(*options, f"train.precision={p}")) for p in ("fp32", "bf16"))
    assert losses(low, range(1, 25)) == pytest.approx(losses(exact, range(1, 25)), abs=0.05)
