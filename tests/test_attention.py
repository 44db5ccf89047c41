import pytest
import torch

from models.attention import RelativeAttention, relative_attention, relative_shift, sinusoids
from tests import reference


def random_inputs(memory, length=5, batch=2, heads=3, width=4, requires_grad=False):
    generator = torch.Generator().manual_seed(memory)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(requires_grad)

    keys, model = memory + length, heads * width
    return (
        draw(batch, length, model),
        draw(batch, keys, 2 * model),
        draw(keys, model),
        draw(heads, width),
        draw(heads, width),
    )


def slow_attention(query, key_value, position, content_bias, position_bias):
    """The reference, with heads taken from the columns that relative_attention documents as theirs."""
    width = content_bias.shape[1]

    def by_head(x, width):
        return torch.stack(x.split(width, dim=-1), dim=-3)

    key, value = by_head(key_value, 2 * width).split(width, dim=-1)
    mixed = reference.relative_attention(
        by_head(query, width), key, value, by_head(position, width), content_bias, position_bias
    )
    return torch.cat(list(mixed.unbind(dim=1)), dim=-1)


@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 6), (4, 4), (5, 8), (3, 20)])
def test_relative_shift_equals_the_double_loop(length, keys):
    scores = torch.randn(2, 3, length, keys, dtype=torch.float64)
    past = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
    shifted = relative_shift(scores)
    torch.testing.assert_close(shifted * past, reference.relative_shift(scores) * past, rtol=0, atol=0)


@pytest.mark.parametrize("memory", [0, 1, 3, 9])
def test_attention_equals_the_double_loop(memory):
    inputs = random_inputs(memory)
    torch.testing.assert_close(relative_attention(*inputs), slow_attention(*inputs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("memory", [0, 1, 4, 9])
def test_attention_gradients_equal_the_double_loop(memory):
    inputs = random_inputs(memory, requires_grad=True)
    weights = torch.randn_like(inputs[0])
    fast = torch.autograd.grad((relative_attention(*inputs) * weights).sum(), inputs)
    slow = torch.autograd.grad((slow_attention(*inputs) * weights).sum(), inputs)
    for name, a, b in zip(("query", "key_value", "position", "u", "v"), fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)


def test_sinusoids_stand_in_descending_distance():
    table = sinusoids(5, 6, torch.float64)
    assert table.shape == (5, 6)
    torch.testing.assert_close(table[-1], torch.tensor([0.0, 0, 0, 1, 1, 1], dtype=torch.float64))
    distance, frequency = 4, 10000 ** (-2 / 6)
    assert table[0, 1].item() == pytest.approx(torch.tensor(distance * frequency).sin().item(), abs=1e-7)
    assert table[0, 4].item() == pytest.approx(torch.tensor(distance * frequency).cos().item(), abs=1e-7)
    # A longer table ends in the shorter one, so that one table serves every length.
    torch.testing.assert_close(sinusoids(9, 6, torch.float64)[-5:], table, rtol=0, atol=0)


@pytest.mark.parametrize("memory", [0, 3])
def test_causality_by_gradients_in_both_directions(memory):
    """Each output depends on all of the memory, on all positions up to its own, and on none after it."""
    torch.manual_seed(0)
    module, length = RelativeAttention(8, 2).double(), 5
    torch.nn.init.normal_(module.content_bias)
    torch.nn.init.normal_(module.position_bias)
    context = torch.randn(1, memory + length, 8, dtype=torch.float64, requires_grad=True)
    output = module(context, length, sinusoids(memory + length, 8, torch.float64))
    for i in range(length):
        (gradient,) = torch.autograd.grad(output[0, i].sum(), context, retain_graph=True)
        touched = gradient[0].abs().sum(dim=-1) > 0
        assert touched.tolist() == [True] * (memory + i + 1) + [False] * (length - i - 1)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads=3 must divide d_model=8"):
        RelativeAttention(8, 3)
