import pytest
import torch

from models.relative_attention import (
    attend,
    causal_mask,
    plain_attend,
    relative_shift,
    shifted_view,
    sinusoidal_encodings,
)
from tests import reference
from tests.making import generator


def random_inputs(memory, length=5, batch=2, heads=3, width=4, requires_grad=False):
    """query, key_value, position, u, v"""
    source = generator(memory)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=source).requires_grad_(requires_grad)

    keys = memory + length
    return (
        draw(heads, batch, length, width),
        draw(2, heads, batch, keys, width),
        draw(heads, keys, width),
        draw(heads, width),
        draw(heads, width),
    )


def fast_attention(query, key_value, *others):
    mask = causal_mask(query.shape[-2], key_value.shape[-2], torch.float64)
    return attend(query, key_value, *others, mask)[0]


def slow_attention(query, key_value, *others):
    query, key, value = (x.transpose(0, 1) for x in (query, *key_value))
    return reference.relative_attention(query, key, value, *others).transpose(0, 1)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 6), (4, 4), (5, 8), (3, 20)])
def test_relative_shift_equals_the_double_loop(length, keys, step):
    scores = torch.randn(2, 3, length, keys, dtype=torch.float64)
    defined, expected = reference.relative_shift(scores, step)
    for shifted in (relative_shift(scores, step), shifted_view(scores, step) if step <= keys else expected):
        torch.testing.assert_close(shifted * defined, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("memory", [0, 1, 4, 9])
def test_attention_equals_the_double_loop_in_values_and_gradients(memory, relative):
    inputs = random_inputs(memory, requires_grad=True)[: 5 if relative else 2]
    others, weights, results = () if relative else (None, None, None), torch.randn_like(inputs[0]), []
    for function in (fast_attention, slow_attention):
        output = function(*inputs, *others)
        results.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_encodings_are_in_descending_order_of_distance():
    table = sinusoidal_encodings(5, 6, torch.float64)
    assert table.shape == (5, 6)
    torch.testing.assert_close(table[-1], torch.tensor([0.0, 0, 0, 1, 1, 1], dtype=torch.float64))
    distance, frequency = 4, 10000 ** (-2 / 6)
    assert table[0, 1].item() == pytest.approx(torch.tensor(distance * frequency).sin().item(), abs=1e-7)
    assert table[0, 4].item() == pytest.approx(torch.tensor(distance * frequency).cos().item(), abs=1e-7)
    # A longer table ends with the shorter one, so one table serves every length.
    torch.testing.assert_close(sinusoidal_encodings(9, 6, torch.float64)[-5:], table, rtol=0, atol=0)


def test_log_sum_exps_join_disjoint_sets_of_keys():
    """Attention to two halves of the keys, weighed by log-sum-exps, equals attention to all keys in all gradients."""
    query, key_value, position, *biases = random_inputs(3, requires_grad=True)
    mask = causal_mask(5, 8, torch.float64)
    odd = torch.arange(8) % 2 == 1
    results = []
    for masks in ([mask], [mask.masked_fill(~chosen, -1e30) for chosen in (odd, ~odd)]):
        parts = [attend(query, key_value, position, *biases, part, with_lse=True) for part in masks]
        mixed, lse = map(torch.stack, zip(*parts, strict=True))
        mixed, total = (mixed * lse.softmax(dim=0)).sum(dim=0), lse.logsumexp(dim=0)
        inputs = [query, key_value, position, *biases]
        gradients = torch.autograd.grad(mixed.square().sum() + total.sin().sum(), inputs)
        results.append([mixed, total, *gradients])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("each_device")
def test_fused_attention_equals_its_definition():
    """Compares output, log-sum-exp and gradients in float64, also with a shift by several columns, or no positions."""
    torch.manual_seed(0)
    for step, length, keys, terms in ((1, 5, 9, 5), (2, 3, 8, 5), (1, 5, 9, 2)):
        shapes = [(2, 3, length, 4), (2, 2, 3, keys, 4), (2, keys, 4), (2, 4), (2, 4)][:terms]
        others = [None] * (5 - terms)
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        last = torch.arange(keys) - (keys - 1 - step * (length - 1 - torch.arange(length)[:, None]))
        mask = torch.where(last > 0, -1e30, 0.0).double()  # keys in the query's future
        results = []
        for function in (attend, plain_attend):
            mixed, lse = function(*inputs, *others, mask, step, True)
            results.append([mixed, lse, *torch.autograd.grad((mixed.sin().sum() + lse.cos().sum()), inputs)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
