"""The paper's method: whose turn it is, the temperature, the samples, the latency term, and the state."""

import itertools

import numpy as np
import pytest
import torch

from nas.core.errors import InputError
from tests.making import assert_same_state, make_search
from tests.reference import expected_loss

GUMBEL = ["search.method=gumbel", "search.warmup_steps=6"]
KINDS = pytest.mark.parametrize("kind", [[], ["search.sampling=hard"]])
TWO = "search.operations=[attention,dense]"  # because a straight-through gate of identity has no gradient


@pytest.fixture
def gumbel_phase(small_config):
    return lambda *overrides: make_search(small_config(*GUMBEL, *overrides))


@KINDS
def test_weights_and_logits_train_in_turn_on_texts_of_their_own(gumbel_phase, kind):
    phase = gumbel_phase("search.warmup_steps=2", "search.arch_fraction=0.25", TWO, *kind)
    tokens, memories = phase.corpus.tokens("train"), {True: None, False: None}
    border, seen = round(0.75 * len(tokens)), []
    assert phase.stream.loader.rows.size <= border
    held = phase.heldout_stream.loader.rows.flatten()
    np.testing.assert_array_equal(held, tokens[border : border + held.size])
    phase.supernet.register_forward_pre_hook(lambda model, given: seen.append((given, model.training)))
    for step in range(1, 13):
        weights, logits = [p.clone() for p in phase.supernet.parameters()], phase.logits.clone()
        learn = step > 2 and step % 4 == 0
        nll, count = phase.step(step)
        ((_, _, given, length), training) = seen.pop()
        assert not seen and training != learn and given is memories[learn] and (length, count) == (8, 32)
        stream = phase.heldout_stream if learn else phase.stream
        memories[learn] = stream.memories
        moved = any(not torch.equal(a, b) for a, b in zip(weights, phase.supernet.parameters(), strict=True))
        assert moved != learn and (nll is None) == learn and torch.equal(logits, phase.logits) != learn
    assert phase.heldout_nll > 0


@KINDS
def test_shared_batches_train_both_after_the_warm_up(gumbel_phase, kind):
    phase = gumbel_phase("search.split=shared", "search.warmup_steps=2", *kind)
    for step in range(1, 6):
        weights, logits = phase.supernet.embedding.weight.clone(), phase.logits.clone()
        phase.step(step)
        assert not torch.equal(weights, phase.supernet.embedding.weight)
        assert torch.equal(logits, phase.logits) == (step <= 2)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.25, 0.3, 0.5])
def test_the_logits_get_their_share_of_the_steps(gumbel_phase, fraction):
    phase = gumbel_phase("search.warmup_steps=0", f"search.arch_fraction={fraction}", "train.steps=1000")
    assert sum(map(phase.logits_learn, range(1, 1001))) == pytest.approx(1000 * fraction, abs=1)


def test_temperature_starts_after_the_warm_up_and_ends_exactly(gumbel_phase):
    phase = gumbel_phase("search.temperature.start=2.0", "search.temperature.end=0.3")
    assert [phase.temperature_at(step) for step in (1, 6)] == [2.0, 2.0]
    values = [phase.temperature_at(step) for step in range(6, 25)]
    assert values[-1] == 0.3 and values[9] == pytest.approx((2.0 * 0.3) ** 0.5)
    assert all(high > low for high, low in itertools.pairwise(values))


@KINDS
def test_samples_follow_pi_and_the_temperature(gumbel_phase, kind):
    phase, gradients = gumbel_phase(*kind), []
    phase.logits.data[:, 0] = 20.0
    for _ in range(100):
        phase.sample(learn=False)
        phase.set_gates()
        for block in phase.supernet.blocks:
            chosen, weights = block.choice
            assert chosen[int(weights.argmax())] == 0 and not weights.requires_grad
    phase.logits.data = torch.tensor([[0.7, 0.2, 0.1]] * 3).log()
    counts = torch.zeros(3, 3)
    for _ in range(400):
        phase.sample(learn=False)
        phase.set_gates()
        for count, block in zip(counts, phase.supernet.blocks, strict=True):
            chosen, weights = block.choice
            count[chosen[int(weights.argmax())]] += 1
    torch.testing.assert_close(counts / 400, phase.logits.exp(), rtol=0, atol=0.1)
    phase.logits.data.zero_()
    for phase.temperature in (5.0, 0.05):
        phase.generator.manual_seed(3)
        sample = phase.sample(learn=True)
        assert torch.equal(sample, phase.gates) and phase.gates.requires_grad
        (gradient,) = torch.autograd.grad(sample.flatten()[0], phase.logits)
        gradients.append(gradient.abs().max())
    assert gradients[0] != gradients[1]


@KINDS
def test_the_gradient_of_the_logits_is_that_of_the_loss_as_a_function_of_them(gumbel_phase, kind):
    """The gradient that update_logits() takes from the gates equals that of a graph from the logits to the loss."""
    phase = gumbel_phase(TWO, "model.dropout=0", *kind)
    batch, state = phase.heldout_stream.next(), phase.generator.get_state()
    sample = phase.sample(learn=True)
    phase.heldout_once(batch)
    taken = []
    phase.optimizer.step = lambda: taken.append(phase.logits.grad.clone())
    phase.update_logits(sample)
    phase.generator.set_state(state)
    whole = phase.sample(learn=True)
    for block, row in zip(phase.supernet.blocks, whole.split(1) if whole.ndim == 1 else whole, strict=True):
        block.choice = block.choice[0], row
    nll, _ = phase.supernet(batch.tokens, batch.targets, None, 8)
    (exact,) = torch.autograd.grad(nll.mean(), phase.logits)
    torch.testing.assert_close(taken[0], exact)


def test_the_latency_term_has_the_exact_gradient_of_the_expected_cost_above_the_target(gumbel_phase):
    """The reference enumerates all 27 paths and averages their costs, relative to the interleaved pattern."""
    phase = gumbel_phase("search.latency.source=flops", "search.latency.weight=2", "search.latency.target=0.5")
    phase.logits.data = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    names, logits = phase.options.operations, phase.logits.detach().double().requires_grad_()
    ratio = expected_loss(logits, lambda path: torch.tensor(phase.costs.ratio([names[i] for i in path])))
    assert ratio > 0.5 and phase.latency_loss().item() == pytest.approx(2 * (ratio.item() - 0.5), rel=1e-5)
    (slow,), (fast,) = torch.autograd.grad(2 * ratio, logits), torch.autograd.grad(phase.latency_loss(), phase.logits)
    torch.testing.assert_close(slow.float(), fast)
    phase.options.latency.target = 2.0
    assert phase.latency_loss() == 0
    phase.options.latency.target = 0.5
    sample, before = phase.sample(learn=True), phase.logits.clone()
    phase.update_logits(sample)
    assert not torch.equal(before, phase.logits)  # the term alone moves the logits


def test_evaluation_follows_the_argmax_path_without_noise(gumbel_phase):
    phase = gumbel_phase()
    phase.logits.data[:, 1] += 1
    assert phase.evaluate(None, 0) == phase.evaluate(None, 0)
    assert [block.choice for block in phase.supernet.blocks] == [([1], None)] * 3
    assert phase.note() == "likeliest pattern ddd"


@KINDS
def test_the_state_is_complete(gumbel_phase, kind):
    more = ["search.warmup_steps=1", "search.arch_fraction=0.5", "model.dropout=0", *kind]
    whole, first, resumed = gumbel_phase(*more), gumbel_phase(*more), gumbel_phase("seed=9", *more)
    for step in range(1, 11):
        whole.step(step)
    for step in range(1, 6):
        first.step(step)
    resumed.load_state_dict(first.state_dict())
    for step in range(6, 11):
        resumed.step(step)
    assert_same_state(resumed.state_dict(), whole.state_dict())


def test_wrong_options_and_gradients_are_refused(gumbel_phase):
    for steps in (20, 24):
        with pytest.raises(InputError, match=f"search.warmup_steps={steps} leaves no step of 24 to train the logits"):
            gumbel_phase(f"search.warmup_steps={steps}")
    phase = gumbel_phase()
    sample = phase.sample(learn=True)
    before = phase.logits.clone()
    phase.gates.grad.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="gradient of the logits"):
        phase.update_logits(sample)
    assert torch.equal(before, phase.logits)
