"""Muon against a slow reference in float64."""

import numpy as np
import pytest
import torch

from nas.training.optimizer import Muon, orthogonalise
from tests.making import make_retraining, make_search

LR, MOMENTUM, DECAY = 0.1, 0.9, 0.2


def polynomial(values: np.ndarray) -> np.ndarray:
    """Five iterations of the polynomial of Jordan et al., on singular values."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def slow_orthogonalise(matrix: np.ndarray) -> np.ndarray:
    """The iterations as a function of the singular values."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return left * polynomial(values / np.linalg.norm(matrix)) @ right


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_orthogonalise_acts_on_the_singular_values_of_each_matrix(shape):
    matrices = np.random.default_rng(0).normal(size=(3, *shape))
    expected = np.stack(list(map(slow_orthogonalise, matrices)))
    np.testing.assert_allclose(orthogonalise(torch.from_numpy(matrices)).numpy(), expected, atol=1e-12)


def test_singular_values_end_near_one_and_a_matrix_of_zeros_stays_zero():
    matrix = torch.randn(1, 40, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix)[0])
    assert values.min() > 0.65 and values.max() < 1.21
    assert not orthogonalise(torch.zeros(2, 3, 4)).any()


def test_steps_equal_the_reference():
    source = np.random.default_rng(1)
    shapes = [(4, 4), (8, 4), (4, 8), (4, 4)]
    weights = [source.normal(size=shape) for shape in shapes]
    matrices = [torch.nn.Parameter(torch.from_numpy(weight.copy())) for weight in weights]
    optimizer, momenta = Muon(matrices, LR, MOMENTUM, DECAY), [np.zeros(shape) for shape in shapes]
    for step in range(4):
        for index, matrix in enumerate(matrices):
            if index == 3 and step == 1:  # not sampled: it keeps its value and its momentum
                matrix.grad = None
                continue
            gradient = source.normal(size=shapes[index])
            matrix.grad = torch.from_numpy(2 * gradient)
            momenta[index] = MOMENTUM * momenta[index] + (1 - MOMENTUM) * gradient
            direction = slow_orthogonalise((1 - MOMENTUM) * gradient + MOMENTUM * momenta[index])
            scale = max(1, shapes[index][0] / shapes[index][1]) ** 0.5
            weights[index] = (1 - LR * DECAY) * weights[index] - LR * scale * direction
        optimizer.step(scale=torch.tensor(2.0), finite=torch.tensor(True))
    for matrix, weight in zip(matrices, weights, strict=True):
        np.testing.assert_allclose(matrix.detach().numpy(), weight, atol=1e-12)


def test_a_step_that_is_not_finite_keeps_the_matrices():
    matrices = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    optimizer = Muon(matrices, LR, MOMENTUM, DECAY)
    for number in (1.0, float("nan"), 1.0):
        before = matrices[0].detach().clone()
        matrices[0].grad, matrices[1].grad = torch.full((3, 3), number), torch.ones(3, 3)
        optimizer.step(scale=torch.tensor(1.0), finite=torch.tensor(number == 1.0))
        assert matrices[0].isfinite().all() and torch.equal(before, matrices[0]) == (number != 1.0)


def test_muon_trains_the_matrices_of_blocks_and_adamw_the_rest(small_config):
    phase = make_retraining(small_config("train.optimizer=muon", "model.ngram_rows=[5]"), ["attention", "dense"])
    optimizer, names = phase.train_weights.optimizer, {p: name for name, p in phase.model.named_parameters()}
    orthogonal = {names[p] for group in optimizer.muon.param_groups for p in group["params"]}
    others = {names[p] for group in optimizer.adam.param_groups for p in group["params"]}
    assert orthogonal and orthogonal.isdisjoint(others) and orthogonal | others == set(names.values())
    assert all(name.startswith("blocks.") and phase.model.get_parameter(name).ndim == 2 for name in orthogonal)
    assert "embedding.weight" in others


def test_only_sampled_matrices_of_a_supernet_move(small_config):
    phase = make_search(small_config("train.optimizer=muon", "search.sampling=hard"))  # step 1 trains the weights
    before = {name: p.detach().clone() for name, p in phase.supernet.named_parameters()}
    phase.step(1)
    moved = {name for name, p in phase.supernet.named_parameters() if not torch.equal(before[name], p)}
    with_gradient = {name for name, p in phase.supernet.named_parameters() if p.grad is not None}
    assert moved and moved <= with_gradient < set(before)
