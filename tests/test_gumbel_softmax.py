import math
from collections import Counter

import pytest
import torch

from nas.gumbel import gumbel_phase as sampling

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
    paths = (sampling.straight_through(LOGITS, sampling.gumbel_like(LOGITS, source), 1.0)[0] for _ in range(draws))
    counts = Counter(map(tuple, paths))
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
