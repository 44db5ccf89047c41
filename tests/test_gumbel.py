"""The paper's method: whose turn it is, the temperature, the samples, the latency term, and the state."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nas.core.errors import InputError
from nas.gumbel.gumbel_phase import gumbel_like
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
        weights, logits = [p.clone() for p in phase.supernet.parameters()], phase.logits.values.clone()
        learn = step > 2 and step % 4 == 0
        nll, count = phase.step(step)
        ((_, _, given, length), training) = seen.pop()
        assert not seen and training != learn and given is memories[learn] and (length, count) == (8, 32)
        stream = phase.heldout_stream if learn else phase.stream
        memories[learn] = stream.memories
        moved = any(not torch.equal(a, b) for a, b in zip(weights, phase.supernet.parameters(), strict=True))
        assert moved != learn and (nll is None) == learn and torch.equal(logits, phase.logits.values) == (not learn)
    assert phase.heldout_nll > 0


@KINDS
def test_shared_batches_train_both_after_the_warm_up(gumbel_phase, kind):
    phase = gumbel_phase("search.split=shared", "search.warmup_steps=2", *kind)
    for step in range(1, 6):
        weights, logits = phase.supernet.embedding.weight.clone(), phase.logits.values.clone()
        phase.step(step)
        assert not torch.equal(weights, phase.supernet.embedding.weight)
        assert torch.equal(logits, phase.logits.values) == (step <= 2)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.25, 0.3, 0.5])
def test_the_logits_get_their_share_of_the_steps(gumbel_phase, fraction):
    phase = gumbel_phase("search.warmup_steps=0", f"search.arch_fraction={fraction}", "train.steps=1000")
    assert sum(map(phase.schedule.logits_learn, range(1, 1001))) == pytest.approx(1000 * fraction, abs=1)


def test_temperature_starts_after_the_warm_up_and_ends_exactly(gumbel_phase):
    phase = gumbel_phase("search.temperature.start=2.0", "search.temperature.end=0.3")
    assert [phase.schedule.temperature(step) for step in (1, 6)] == [2.0, 2.0]
    values = [phase.schedule.temperature(step) for step in range(6, 25)]
    assert values[-1] == 0.3 and values[9] == pytest.approx((2.0 * 0.3) ** 0.5)
    assert all(high > low for high, low in itertools.pairwise(values))


@KINDS
def test_samples_follow_pi(gumbel_phase, kind):
    """The operation with the highest weight is a draw from pi."""
    phase, counts = gumbel_phase(*kind), torch.zeros(3, 3)
    phase.logits.values.data = torch.tensor([[0.7, 0.2, 0.1]] * 3).log()
    for _ in range(400):
        phase.logits.sample(1.0, learn=False)
        phase.logits.set_gates()
        for count, block in zip(counts, phase.supernet.blocks, strict=True):
            chosen, weights = block.choice
            assert not weights.requires_grad
            count[chosen[int(weights.argmax())]] += 1
    torch.testing.assert_close(counts / 400, phase.logits.values.exp(), rtol=0, atol=0.1)


@KINDS
@pytest.mark.parametrize("temperature", [5.0, 0.05])
def test_a_sample_has_the_gradient_of_the_softmax_at_its_temperature(gumbel_phase, kind, temperature):
    """The derivative of weight i by logit j is w_i * ([i = j] - w_j) / temperature, and that of a gate the same."""
    logits = gumbel_phase(*kind).logits
    logits.generator.manual_seed(3)
    noise = gumbel_like(logits.values, logits.generator)
    logits.generator.manual_seed(3)
    sample = logits.sample(temperature, learn=True)
    assert torch.equal(sample, logits.gates) and logits.gates.requires_grad
    weights = (noise[0] / temperature).softmax(dim=-1)
    chosen = int(weights.argmax()) if kind else 0
    (gradient,) = torch.autograd.grad(sample.flatten()[0], logits.values)
    expected = weights[chosen] * (torch.eye(3)[chosen] - weights) / temperature
    torch.testing.assert_close(gradient, torch.stack([expected, torch.zeros(3), torch.zeros(3)]))


@KINDS
def test_the_gradient_of_the_logits_is_that_of_the_loss_as_a_function_of_them(gumbel_phase, kind):
    """The gradient that the logits take from the gates equals that of a graph from the logits to the loss."""
    phase, taken = gumbel_phase(TWO, "model.dropout=0", *kind), []
    logits, batch = phase.logits, phase.heldout_stream.next()
    state = logits.generator.get_state()
    sample = logits.sample(1.0, learn=True)
    phase.heldout_once(batch)
    logits.optimizer.step = lambda: taken.append(logits.values.grad.clone())
    logits.update(sample)
    logits.generator.set_state(state)
    whole = logits.sample(1.0, learn=True)
    for block, row in zip(phase.supernet.blocks, whole.split(1) if whole.ndim == 1 else whole, strict=True):
        block.choice = block.choice[0], row
    nll, _ = phase.supernet(batch.tokens, batch.targets, None, 8)
    (exact,) = torch.autograd.grad(nll.mean(), logits.values)
    torch.testing.assert_close(taken[0], exact)


def test_the_latency_term_has_the_exact_gradient_of_the_expected_cost_above_the_target(gumbel_phase):
    """The reference enumerates all 27 paths and averages their costs, relative to the interleaved pattern."""
    phase = gumbel_phase("search.latency.source=flops", "search.latency.weight=2", "search.latency.target=0.5")
    own, term = phase.logits, phase.logits.latency
    own.values.data = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    names, logits = term.operations, own.values.detach().double().requires_grad_()
    ratio = expected_loss(logits, lambda path: torch.tensor(phase.costs.ratio([names[i] for i in path])))
    assert ratio > 0.5 and term(own.values).item() == pytest.approx(2 * (ratio.item() - 0.5), rel=1e-5)
    (slow,), (fast,) = torch.autograd.grad(2 * ratio, logits), torch.autograd.grad(term(own.values), own.values)
    torch.testing.assert_close(slow.float(), fast)
    assert replace(term, target=2.0)(own.values) == 0
    taken = []
    own.optimizer.step = lambda: taken.append(own.values.grad.clone())
    own.update(own.sample(1.0, learn=True))  # without a gradient at the gates, the term alone
    torch.testing.assert_close(taken[0], fast)


def test_evaluation_follows_the_argmax_path_without_noise(gumbel_phase):
    phase = gumbel_phase()
    phase.logits.values.data[:, 1] += 1
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
    logits = gumbel_phase().logits
    sample, before = logits.sample(1.0, learn=True), logits.values.clone()
    logits.gates.grad.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="gradient of the logits"):
        logits.update(sample)
    assert torch.equal(before, logits.values)
