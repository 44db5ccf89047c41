"""learn_pi(): what it evaluates, what it returns, and its exact continuation."""

from itertools import product

import numpy as np
import pytest
import torch

from nas.core.errors import RunError
from nas.costs.budget import patterns_within
from nas.costs.flops import count_flops
from nas.search import learn_pi as module
from nas.search.history import pi_warnings
from nas.search.learn_pi import best_fraction, learn_pi, leave_one_out_weights, score_gradient
from nas.search.sampling import PathsWithinBudget
from nas.training.evaluation import total_nll
from tests.making import assert_same_state, generator, make_weights, one_hot
from tests.test_sampling import assert_unbiased


@pytest.fixture
def weights(small_config):
    """weights(*overrides) -> the initial weights of a SuperNet, and its FLOPs"""

    def make(*overrides):
        made = make_weights(small_config("search.logits_steps=6", *overrides))
        return made, count_flops(made.config, made.corpus.counts())

    return make


def test_the_weights_stay_and_each_seed_begins_with_uniform_pi(weights):
    made, costs = weights("search.logits_seeds=3", "model.dropout=0.5")
    before, seen = [p.clone() for p in made.supernet.parameters()], []
    hook = made.supernet.backbone.register_forward_pre_hook(lambda model, inputs: seen.append((inputs, model.training)))
    learned = learn_pi(made, costs, None)
    hook.remove()
    assert all(map(torch.equal, before, made.supernet.parameters()))
    assert not any(training for _, training in seen)  # without dropout
    assert learned.logits.shape == (3, 3, 3) and len(learned.history) == 19 and len(learned.evaluated) == 18
    assert [line["step"] for line in learned.history] == list(range(19))
    assert [line["logits_seed"] for line in learned.history[1:]] == [1] * 6 + [2] * 6 + [3] * 6
    np.testing.assert_allclose(learned.history[0]["pi"], 1 / 3)
    for seed in range(3):  # one step of Adam moves each logit by at most its learning rate
        first = np.log(learned.history[1 + 6 * seed]["pi"])
        assert np.ptp(first, axis=1).max() <= 0.1 + 1e-6
        np.testing.assert_array_equal(learned.history[6 + 6 * seed]["pi"], learned.pi[seed])
    assert np.abs(learned.pi[0] - learned.pi[1]).max() > 1e-4


def test_all_paths_of_a_step_read_the_same_heldout_batch_with_the_memories_of_the_first(weights):
    made, costs = weights()
    inputs, outputs = [], []
    made.supernet.backbone.register_forward_pre_hook(lambda model, given: inputs.append(given))
    made.supernet.backbone.register_forward_hook(lambda model, given, out: outputs.append(out))
    learned = learn_pi(made, costs, None)
    text, at, memories = made.corpus.tokens("train"), 0, None
    heldout = text[round(0.8 * len(text)) :]
    width = len(heldout) // 4
    for step, line in enumerate(learned.evaluated):
        distinct = list(dict.fromkeys(line["paths"]))
        for index, path in enumerate(distinct):
            (tokens, _, given, length), (nll, _) = inputs[at + index], outputs[at + index]
            assert given is memories and length == 8
            np.testing.assert_array_equal(tokens[:, 0], [heldout[row * width + 8 * step] for row in range(4)])
            assert line["nll"][line["paths"].index(path)] == pytest.approx(nll.mean().item())
        memories, at = outputs[at][1], at + len(distinct)
    assert at == len(inputs)


def test_paths_within_a_budget_and_the_probabilities_of_drawing_them(weights):
    made, costs = weights("search.paths=8")
    learned = learn_pi(made, costs, 0.6)
    names = made.supernet.operations
    ratios = [costs.ratio([names[i] for i in path]) for line in learned.evaluated for path in line["paths"]]
    assert len(ratios) == 6 * 8 and max(ratios) <= 0.6 + 1e-9
    pi, within = np.array(learned.history[-1]["pi"]), np.array(learned.history[-1]["pi_within_budget"])
    expected, total, cost = np.zeros((3, 3)), 0.0, 0.0
    for path in product(range(3), repeat=3):
        ratio = costs.ratio([names[i] for i in path])
        if ratio <= 0.6:
            probability = pi[range(3), path].prod()
            expected[range(3), path] += probability
            total, cost = total + probability, cost + probability * ratio
    np.testing.assert_allclose(within, expected / total, atol=1e-9)
    assert 0 < total < 1 and learned.history[-1]["expected_cost_ratio"] == pytest.approx(cost / total)
    assert learned.history[-1]["expected_latency_ms"] is None


def test_the_estimate_under_a_budget_is_unbiased(weights):
    """The losses are made up, so that the exact gradient can be computed over all paths within the budget."""
    made, costs = weights()
    names, source = made.supernet.operations, generator(2)
    logits = torch.randn(3, 3, generator=generator(1)).double().requires_grad_()
    fitting = [path for path in product(range(3), repeat=3) if costs.ratio([names[i] for i in path]) <= 0.6]
    losses = dict(zip(fitting, torch.randn(len(fitting), generator=generator(3)).double(), strict=True))
    scores = torch.stack([logits.log_softmax(-1)[range(3), path].sum() for path in fitting])
    (exact,) = torch.autograd.grad((scores.softmax(0) * torch.stack([losses[path] for path in fitting])).sum(), logits)
    paths, draws = PathsWithinBudget(patterns_within(0.6, 3, names, costs)), []
    for _ in range(4000):
        drawn = paths.sample(logits, 4, source)
        loss = torch.stack([losses[path] for path in drawn])
        draws.append(score_gradient(drawn, leave_one_out_weights(loss), 3))
    assert_unbiased(draws, exact)


def test_an_interrupted_call_continues_exactly_from_the_recorded_losses(weights):
    made, costs = weights("search.logits_seeds=2")
    whole = learn_pi(made, costs, 0.8)
    ran = []
    made.supernet.register_forward_hook(lambda *_: ran.append(1))
    lines = []
    again = learn_pi(made, costs, 0.8, report=lambda *line: lines.append(line), known=whole.evaluated[:8])
    assert_same_state(again.history, whole.history)
    assert_same_state(again.evaluated, whole.evaluated)
    assert torch.equal(again.logits, whole.logits) and len(lines) == 13
    assert len(ran) == 8 + sum(len(set(line["paths"])) for line in whole.evaluated[8:])
    with pytest.raises(RunError, match=r"step 1 draws other paths than in paths.jsonl"):
        learn_pi(made, costs, 0.8, known=whole.evaluated[1:])


def test_pi_learns_the_best_path_from_the_losses_of_the_best_draws(weights, monkeypatch):
    made, costs = weights("search.logits_steps=80", "search.logits_seeds=2", "search.paths=8")
    fractions, weigh = [], module.risk_seeking_weights

    def record(losses, fraction):
        fractions.append(fraction)
        return weigh(losses, fraction)

    def distance(supernet, run_batch, stream, paths, known):
        return torch.tensor([[i != j for i, j in zip(path, (2, 0, 1), strict=True)] for path in paths]).sum(1).double()

    monkeypatch.setattr(module, "evaluate", distance)
    monkeypatch.setattr(module, "risk_seeking_weights", record)
    pi = learn_pi(made, costs, None).pi
    assert pi[:, range(3), (2, 0, 1)].min() > 0.8
    assert fractions[:80] == fractions[80:] == [best_fraction(0.25, step / 80) for step in range(1, 81)]
    assert fractions[0] < 0.3 and fractions[-1] == 1


def test_a_loss_that_is_not_finite_is_an_error(weights):
    made, costs = weights()
    made.supernet.backbone.final_norm.weight.data.fill_(float("nan"))
    with pytest.raises(RunError, match="the loss of a sampled path is not finite"):
        learn_pi(made, costs, None)


def test_shared_weights_judge_a_path_on_two_parts_of_valid(weights, monkeypatch):
    made, _ = weights()
    text = made.corpus.tokens("valid")
    monkeypatch.setattr("nas.search.shared_weights.PART_TOKENS", 50)
    made.supernet.set_path([0, 2, 1])
    parts = [total_nll(made.supernet, part, 16, 8, 8, 1) for part in (text[:51], text[-51:])]
    expected = np.mean([total / tokens for total, tokens in parts])
    assert made.nll([0, 2, 1]) == pytest.approx(expected, rel=1e-6)
    monkeypatch.undo()
    made.nlls.clear()
    halves = [part.tolist() for part in made.valid_parts()]
    assert halves[0] == text[: len(halves[0])].tolist() and halves[1][-1] in text[-2:]
    assert made.nll([0, 2, 1]) != pytest.approx(expected, rel=1e-6)


def test_a_block_that_changes_in_the_last_tenth_of_the_steps_of_pi_is_reported():
    def line(step, *path):
        return {"step": step, "operations": ["attention", "dense 8x", "identity"], "pi": one_hot(*path)}

    late = [line(4500 + step, 0, 1) for step in range(1, 300)]
    assert pi_warnings([line(0, 0, 0), *late]) == []  # the steps of the weights do not count
    (warning,) = pi_warnings([line(0, 0, 0), *late, line(4800, 1, 0)])
    assert warning == "the pattern has not settled: blocks 1, 2 changed in the last 10% of the steps of pi"
