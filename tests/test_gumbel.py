"""The paper's method: samples, the SuperNet, whose turn it is, the temperature, the latency term, and the state."""

import itertools
import math
import re
import subprocess
from collections import Counter

import numpy as np
import pytest
import torch

from models.operations.operation import BlockConfig, Segment
from models.relative_attention import sinusoidal_encodings
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.pattern import interleaved, read_pattern
from nas.gumbel.gumbel_phase import gumbel, gumbel_like, set_choices, straight_through
from tests.making import generator, make_search, supernet_of
from tests.processes import ROOT
from tests.reference import expected_loss

LOGITS = torch.tensor([[0.3, -0.4, 0.1], [1.2, 0.0, -0.7]], dtype=torch.float64)


def test_noise_is_finite_at_the_ends_and_over_many_draws_of_float64():
    eps = torch.finfo(torch.float64).eps
    # 10^8 draws come no closer to the ends than about 1e-8. These values are much closer, up to the ends.
    ends = [0.0, 5e-324, 1e-308, 1e-300, 1e-17, 1e-9, 1e-8, 1 - 1e-8, 1 - 1e-9, 1 - eps, 1 - eps / 2, 1.0]
    noise = gumbel(torch.tensor(ends, dtype=torch.float64))
    assert torch.isfinite(noise).all()
    assert (noise.diff() >= 0).all()
    many = gumbel_like(torch.empty(2_000_000, 3), generator(0))
    assert torch.isfinite(many).all()
    assert many.mean().item() == pytest.approx(0.5772, abs=5e-3)  # Euler's constant
    assert many.var().item() == pytest.approx(math.pi**2 / 6, rel=1e-2)


def test_frequencies_of_hard_samples_follow_pi():
    draws, source = 5_000, generator(1)
    paths = (straight_through(LOGITS, gumbel_like(LOGITS, source), 1.0)[0] for _ in range(draws))
    counts = Counter(tuple(itertools.chain(*path)) for path in paths)
    first, second = (draws**0.5 * LOGITS.softmax(dim=-1)).tolist()
    expected = {(i, j): first[i] * second[j] for i in range(3) for j in range(3)}
    chi_square = sum((counts[path] - count) ** 2 / count for path, count in expected.items())
    assert chi_square < 26.1  # 99.9% of a chi-square of 8 degrees of freedom


CONFIG = BlockConfig(d_model=8)
OPERATIONS = ["attention", "dense", "identity"]
VOCAB = 11


def small_supernet(blocks=2):
    torch.manual_seed(0)
    return supernet_of(blocks, OPERATIONS, CONFIG, VOCAB, d_ffn=12).double().eval()


def batch(length=6):
    tokens = torch.randint(VOCAB, (2, length + 1), generator=generator(1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_along(supernet, path, gates=None):
    set_choices(supernet, [[index] for index in path], gates)
    return supernet(*batch(), None, 4)[0].mean()


@pytest.mark.usefixtures("each_device")
def test_a_mixture_and_its_gradients_equal_the_weighted_sum_of_candidate_outputs():
    block = small_supernet().blocks[0]
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    segment = Segment(sinusoidal_encodings(5, 8, torch.float64), tokens=torch.zeros(2, 5, dtype=torch.int64))
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64, requires_grad=True)
    block.choice = [0, 1, 2], weights
    outputs = [x + candidate(x, candidate.begin(2), segment)[0] for candidate in block.candidates]
    expected = sum(weight * output for weight, output in zip(weights, outputs, strict=True))
    found, _ = block(x, block.begin(2), segment)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    inputs = [x, *block.parameters()]
    own, slow = (torch.autograd.grad((y * direction).sum(), inputs, retain_graph=True) for y in (found, expected))
    torch.testing.assert_close(own, slow)
    # The term in x that all candidates share is in the weighted sum of outputs, but in no branch: with weights that add
    # up to 1 it is the same constant in every weight's gradient.
    (slow,) = torch.autograd.grad((expected * direction).sum(), weights)
    (fast,) = torch.autograd.grad((found * direction).sum(), weights)
    torch.testing.assert_close(fast, slow - (x * direction).sum())


def test_a_path_runs_only_its_operations_and_equals_the_fixed_model():
    supernet, ran = small_supernet(), []
    for index, block in enumerate(supernet.blocks):
        for name, candidate in zip(OPERATIONS, block.candidates, strict=True):
            candidate.register_forward_hook(lambda *_, label=(index, name): ran.append(label))
    with_path = loss_along(supernet, [1, 0])
    assert ran == [(0, "dense"), (1, "attention")]
    with_path.backward()  # operations that did not run get no gradient
    for index, block in enumerate(supernet.blocks):
        for name, candidate in zip(OPERATIONS, block.candidates, strict=True):
            assert all((p.grad is not None) == ((index, name) in ran) for p in candidate.parameters())
    one_hot = torch.tensor([[0.0, 1, 0], [1, 0, 0]], dtype=torch.float64)
    set_choices(supernet, [[0, 1, 2]] * 2, one_hot)
    torch.testing.assert_close(supernet(*batch(), None, 4)[0].mean(), with_path)


def test_memory_is_kept_with_every_operation():
    supernet = small_supernet()
    set_choices(supernet, [[2], [1]])
    _, memories = supernet(*batch(), None, 4)
    assert [state["memory"].shape for state in memories.blocks] == [(2, 4, 8), (2, 4, 8)]


def test_recomputation_changes_neither_the_mixture_nor_the_gates():
    """The gradients of the mixture weights and gates are bit-identical with and without recomputation."""
    weights = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.6, 0.3]], dtype=torch.float64, requires_grad=True)
    found = []
    for recompute in (False, True):
        supernet = small_supernet()
        supernet.recompute = recompute
        results = []
        for choose in (
            lambda net=supernet: set_choices(net, [[0, 1, 2]] * 2, weights.softmax(dim=-1)),
            lambda net=supernet: set_choices(net, [[0], [1]], weights.diagonal()[:, None]),
        ):
            choose()
            loss = supernet(*batch(), None, 4)[0].mean()
            inputs = [weights, *supernet.parameters()]
            results += [loss, *torch.autograd.grad(loss, inputs, allow_unused=True)]
        found.append(results)
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


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
    np.testing.assert_array_equal(phase.stream.loader.stream, tokens[:border])
    np.testing.assert_array_equal(phase.heldout_stream.loader.stream, tokens[border:])
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
    """The derivative of weight i by logit j is w_i * ([i = j] - w_j) / temperature, and that of a gate the same.

    A gate is 1, and belongs to the likeliest operation.
    """
    phase = gumbel_phase(*kind)
    logits = phase.logits
    logits.values.data = torch.tensor([[0.3, -0.4, 0.1], [1.2, 0.0, -0.7], [0.5, 0.4, 0.2]])
    logits.generator.manual_seed(3)
    noise = gumbel_like(logits.values, logits.generator)
    logits.generator.manual_seed(3)
    sample = logits.sample(temperature, learn=True)
    assert torch.equal(sample, logits.gates) and logits.gates.requires_grad
    weights = ((logits.values.detach() + noise) / temperature).softmax(dim=-1)
    path, gates = weights.argmax(dim=-1).tolist(), sample.flatten()
    logits.set_gates()
    assert not kind or [block.choice[0] for block in phase.supernet.blocks] == [[one] for one in path]
    torch.testing.assert_close(gates, torch.ones(3) if kind else weights.flatten())
    for place, gate in enumerate(gates):
        block, chosen = (place, path[place]) if kind else divmod(place, 3)
        (gradient,) = torch.autograd.grad(gate, logits.values, retain_graph=True)
        expected = torch.zeros(3, 3)
        expected[block] = weights[block, chosen] * (torch.eye(3)[chosen] - weights[block]) / temperature
        torch.testing.assert_close(gradient, expected)


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
    for block, row in zip(phase.supernet.blocks, whole, strict=True):
        block.choice = block.choice[0], row
    nll, _ = phase.supernet(batch.tokens, batch.targets, None, 8)
    (exact,) = torch.autograd.grad(nll.mean(), logits.values)
    torch.testing.assert_close(taken[0], exact)


def test_the_latency_term_has_the_exact_gradient_of_the_expected_cost_above_the_target(gumbel_phase):
    """The reference enumerates all 27 paths and averages their costs, relative to the interleaved pattern."""
    phase = gumbel_phase("search.latency.source=flops", "search.latency.weight=2", "search.latency.target=0.5")
    own, names = phase.logits, phase.options.operations
    own.values.data = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    logits = own.values.detach().double().requires_grad_()
    ratio = expected_loss(logits, lambda path: torch.tensor(phase.costs.ratio([names[i] for i in path])))
    term = own.latency_term()
    assert ratio > 0.5 and term.item() == pytest.approx(2 * (ratio.item() - 0.5), rel=1e-5)
    (slow,), (fast,) = torch.autograd.grad(2 * ratio, logits), torch.autograd.grad(term, own.values)
    torch.testing.assert_close(slow.float(), fast)
    taken = []
    own.optimizer.step = lambda: taken.append(own.values.grad.clone())
    own.update(own.sample(1.0, learn=True))  # without a gradient at the gates, the term alone
    torch.testing.assert_close(taken[0], fast)
    own.target = 2.0
    assert own.latency_term() == 0


def test_evaluation_follows_the_argmax_path_without_noise(gumbel_phase):
    phase = gumbel_phase()
    phase.logits.values.data[:, 1] += 1
    assert phase.evaluate(None, 0) == phase.evaluate(None, 0)
    assert [block.choice for block in phase.supernet.blocks] == [([1], None)] * 3
    assert phase.note() == "likeliest pattern ddd"


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


def test_make_paper_runs_the_four_stages_with_the_method_of_the_paper():
    shown = subprocess.run(["make", "-n", "paper"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"python (\w+)\.py", shown) == ["retrain", "search", "derive", "animate", "retrain"]
    folder = ROOT / "experiments" / "paper"
    config = load_config(folder / "paper.yaml", [])
    assert (config.search.method, config.search.sampling, config.data.source) == ("gumbel", "soft", "pydoc")
    assert config.search.operations == ["attention", "dense", "identity"]
    assert read_pattern(folder / "interleaved.yaml")["blocks"] == interleaved(config.model.blocks)
    assert config.search.warmup_steps == config.train.steps // 4
