"""The gated delta rule in chunks against its recurrence, in float64."""

import pytest
import torch

from models.delta import gated_delta
from tests import reference


def inputs_of(length, batch=2, heads=3, key_width=4, value_width=5, decay=1.0):
    generator = torch.Generator().manual_seed(length)

    def draw(*shape):
        return torch.randn(batch, heads, *shape, dtype=torch.float64, generator=generator)

    query, key, value = draw(length, key_width), draw(length, key_width), draw(length, value_width)
    key = torch.nn.functional.normalize(key, dim=-1)
    log_decay, rate = -decay * draw(length).exp(), draw(length).sigmoid()
    inputs = [query, key, value, log_decay, rate, draw(key_width, value_width)]
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
@pytest.mark.parametrize("length", [1, 4, 7, 16, 21])
def test_chunks_equal_the_recurrence_in_values_and_gradients(length, chunk):
    results = []
    for function in (reference.gated_delta, lambda *inputs: gated_delta(*inputs, chunk=chunk)):
        inputs = inputs_of(length)
        output, state = function(*inputs)
        loss = (output * torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)).sum()
        gradients = torch.autograd.grad(loss + state.square().sum(), inputs)
        results.append([output, state, *gradients])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_stream_in_segments_equals_the_whole_stream():
    query, key, value, log_decay, rate, _ = inputs_of(23)
    whole, last = gated_delta(query, key, value, log_decay, rate, chunk=4)
    state, outputs = None, []
    for part in (slice(0, 9), slice(9, 10), slice(10, 23)):
        pieces = (x[:, :, part] for x in (query, key, value, log_decay, rate))
        output, state = gated_delta(*pieces, state, chunk=4)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_no_output_depends_on_a_later_position():
    inputs = inputs_of(12)
    output, _ = gated_delta(*inputs, chunk=4)
    gradients = torch.autograd.grad(output[:, :, 6].sum(), inputs[:5])
    assert all((gradient[:, :, 7:] == 0).all() and (gradient[:, :, :7] != 0).any() for gradient in gradients)


def test_strong_decay_forgets_and_stays_finite():
    query, key, value, log_decay, rate, state = inputs_of(40)
    output, last = gated_delta(query, key, value, torch.full_like(log_decay, -1e4), rate, state, chunk=16)
    expected = rate[..., None] * (query * key).sum(dim=-1, keepdim=True) * value  # only the position itself
    torch.testing.assert_close(output, expected)
    assert last.isfinite().all()


def test_a_repeated_key_replaces_its_value():
    key = torch.nn.functional.normalize(torch.randn(1, 1, 1, 4, dtype=torch.float64), dim=-1).expand(1, 1, 3, 4)
    value = torch.randn(1, 1, 3, 5, dtype=torch.float64)
    none, full = torch.zeros(1, 1, 3, dtype=torch.float64), torch.ones(1, 1, 3, dtype=torch.float64)
    output, _ = gated_delta(key, key, value, none, full, chunk=2)
    torch.testing.assert_close(output, value)
