import itertools
import math
from collections import Counter

import pytest
import torch

from nas.search import learn_pi, sampling
from tests import reference

LOGITS = torch.tensor([[0.3, -0.4, 0.1], [1.2, 0.0, -0.7]], dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_noise_is_finite_at_the_ends_and_over_many_draws():
    eps = torch.finfo(torch.float64).eps
    # 10^8 draws come no closer to the ends than about 1e-8. These values are much closer, up to the ends.
    ends = [0.0, 5e-324, 1e-308, 1e-300, 1e-17, 1e-9, 1e-8, 1 - 1e-8, 1 - 1e-9, 1 - eps, 1 - eps / 2, 1.0]
    noise = sampling.gumbel(torch.tensor(ends, dtype=torch.float64))
    assert torch.isfinite(noise).all()
    assert (noise.diff() >= 0).all()
    many = sampling.gumbel_like(torch.empty(2_000_000, 3), generator())
    assert torch.isfinite(many).all()
    assert many.mean().item() == pytest.approx(0.5772, abs=5e-3)  # Euler's constant
    assert many.var().item() == pytest.approx(math.pi**2 / 6, rel=1e-2)


def test_noise_needs_float64():
    with pytest.raises(ValueError, match="float64"):
        sampling.gumbel(torch.rand(3))


def test_soft_sample_gradients():
    noise = sampling.gumbel_like(LOGITS, generator())
    for temperature in (0.1, 1.0, 5.0):
        assert torch.autograd.gradcheck(
            lambda logits, t=temperature: sampling.relax(logits, noise, t), LOGITS.clone().requires_grad_()
        )


def test_frequencies_of_hard_samples_follow_pi():
    draws, source = 20_000, generator(1)
    counts = Counter(tuple(sampling.sample_path(LOGITS, source)) for _ in range(draws))
    pi = LOGITS.softmax(dim=-1)
    chi_square = 0.0
    for first in range(3):
        for second in range(3):
            expected = draws * (pi[0, first] * pi[1, second]).item()
            chi_square += (counts[(first, second)] - expected) ** 2 / expected
    assert chi_square < 26.1  # 99.9% of a chi-square of 8 degrees of freedom


def test_straight_through_gradient_is_the_closed_form():
    """d gate_b / d logits = w_i (1[i = j] - w_j) / temperature for the chosen i, and the gate's value is 1."""
    logits, temperature = LOGITS.clone().requires_grad_(), 0.7
    noise = sampling.gumbel_like(logits, generator(2))
    path, gates = sampling.straight_through(logits, noise, temperature)
    weights = sampling.relax(logits, noise, temperature).detach()
    assert path == (logits + noise).argmax(dim=-1).tolist()
    for block, (choice, gate) in enumerate(zip(path, gates, strict=True)):
        assert gate.item() == 1.0
        (gradient,) = torch.autograd.grad(gate, logits, retain_graph=True)
        chosen = weights[block, choice]
        expected = torch.zeros_like(logits)
        expected[block] = chosen * (torch.nn.functional.one_hot(torch.tensor(choice), 3) - weights[block]) / temperature
        torch.testing.assert_close(gradient, expected)


def test_leave_one_out_equals_its_definition():
    paths, losses = [[0, 1], [2, 2], [0, 0]], [1.0, 4.0, 2.5]
    total = torch.zeros_like(LOGITS)
    for k, path in enumerate(paths):
        logits = LOGITS.clone().requires_grad_()
        (score,) = torch.autograd.grad(reference.log_probability(logits, path), logits)
        others = [loss for j, loss in enumerate(losses) if j != k]
        total += (losses[k] - sum(others) / len(others)) * score / len(paths)
    torch.testing.assert_close(leave_one_out(LOGITS, paths, losses), total)


def leave_one_out(logits, paths, losses):
    weights = learn_pi.leave_one_out_weights(torch.tensor(losses, dtype=torch.float64))
    return learn_pi.score_gradient(paths, weights, logits.shape[1])


def test_leave_one_out_needs_two_paths():
    with pytest.raises(ValueError, match="at least 2"):
        learn_pi.leave_one_out_weights(torch.tensor([1.0]))


def assert_unbiased(draws, exact):
    """The mean of the draws [D, N, O] is within 4 standard errors of the exact gradient."""
    draws = torch.stack(draws)
    deviation = (draws.mean(dim=0) - exact) / (draws.std(dim=0) / len(draws) ** 0.5)
    assert deviation.abs().max().item() < 4


def test_leave_one_out_is_unbiased_for_arbitrary_costs_of_paths():
    costs = torch.randn(3, 3, dtype=torch.float64, generator=generator(5))
    logits = LOGITS.clone().requires_grad_()
    (exact,) = torch.autograd.grad(reference.expected_loss(logits, lambda path: costs[path[0], path[1]]), logits)
    source, draws = generator(6), []
    for _ in range(4000):
        paths = [sampling.sample_path(LOGITS, source) for _ in range(4)]
        draws.append(leave_one_out(LOGITS, paths, [costs[a, b].item() for a, b in paths]))
    assert_unbiased(draws, exact)


def mean_of_the_best(logits, costs, fraction):
    """The mean loss of the best `fraction` of the paths under pi; differentiable, by enumeration.

    It is q + E[min(loss - q, 0)] / fraction, where q is the quantile (Rockafellar and Uryasev 2000).
    """
    log_pi = logits.log_softmax(dim=-1)
    probabilities = (log_pi[0][:, None] + log_pi[1][None, :]).exp().flatten()  # of the 9 paths
    order = costs.flatten().argsort()
    reached = int((probabilities[order].cumsum(0) < fraction).sum())
    quantile = costs.flatten()[order[reached]]
    return quantile + (probabilities * (costs.flatten() - quantile).clamp_max(0)).sum() / fraction


@pytest.mark.parametrize("fraction", [0.28, 0.6])
def test_risk_seeking_follows_the_mean_of_the_best_losses(fraction):
    """With many paths the estimate is that of the exact gradient, enumerated over all paths."""
    costs, source = torch.randn(3, 3, dtype=torch.float64, generator=generator(5)), generator(6)
    logits = LOGITS.clone().requires_grad_()
    (exact,) = torch.autograd.grad(mean_of_the_best(logits, costs, fraction), logits)
    distribution, draws = sampling.PathDistribution(), []
    for _ in range(20):
        paths = distribution.sample(LOGITS, 2000, source)
        losses = torch.stack([costs[path] for path in paths])
        weights = learn_pi.risk_seeking_weights(losses, fraction)
        draws.append(learn_pi.score_gradient(paths, weights, 3))
    assert_unbiased(draws, exact)
    assert exact.abs().max() > 0.05


def test_risk_seeking_weighs_the_best_paths_by_their_distance_to_the_quantile():
    weights = learn_pi.risk_seeking_weights(torch.tensor([5.0, 1.0, 2.0, 4.0, 9.0], dtype=torch.float64), 0.5)
    clipped = torch.tensor([4.0, 1.0, 2.0, 4.0, 4.0], dtype=torch.float64)  # the quantile is 4
    torch.testing.assert_close(weights, (clipped - 3.0) / 4 / 0.5)
    assert not learn_pi.risk_seeking_weights(torch.full((4,), 2.0), 0.25).any()


def test_the_share_of_best_paths_grows_with_the_progress():
    shares = [learn_pi.best_fraction(0.2, progress) for progress in (0.0, 0.35, 0.7, 1.0)]
    assert shares == pytest.approx([0.2, 0.6, 1.0, 1.0])


def test_temperature_falls_exponentially_from_start_to_exactly_end():
    values = [sampling.temperature_at(step / 40, 1.7, 0.1) for step in range(-1, 41)]
    assert values[:2] == [1.7, 1.7] and values[-1] == 0.1
    assert values[21] == pytest.approx((1.7 * 0.1) ** 0.5)
    assert all(high > low for high, low in itertools.pairwise(values[1:]))


def test_fair_paths_visit_operations_equally_often():
    seen, source = set(), generator(0)
    for _ in range(300):
        paths = sampling.fair_paths(3, 3, source)
        assert all(sorted(block) == [0, 1, 2] for block in zip(*paths, strict=True))
        seen |= set(map(tuple, paths))
    assert len(seen) == 27  # the order of each block is drawn by itself
