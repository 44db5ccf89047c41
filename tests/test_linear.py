"""Gated DeltaNet against its recurrence, in float64."""

import re

import pytest
import torch

from models.operations.delta_net import LinearAttention, gated_delta
from models.operations.operation import BlockConfig
from models.transformer_xl import build_pattern
from nas.gumbel.gumbel_phase import set_choices
from nas.training.evaluation import count_memory_blocks
from tests import reference
from tests.making import flops_of, sized, supernet_of

CONFIG = BlockConfig(16)
LINEAR = "linear chunk=4"  # streams of a few positions have several chunks
VOCAB = 29


def inputs_of(length, batch=2, heads=3, key_width=4, value_width=5, decay=1.0):
    generator = torch.Generator().manual_seed(length)

    def draw(*shape):
        return torch.randn(batch, heads, *shape, dtype=torch.float64, generator=generator)

    query, key, value = draw(length, key_width), draw(length, key_width), draw(length, value_width)
    key = torch.nn.functional.normalize(key, dim=-1)
    log_decay, beta = -decay * draw(length).exp(), draw(length).sigmoid()
    inputs = [query, key, value, log_decay, beta, draw(key_width, value_width)]
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
@pytest.mark.parametrize("length", [1, 4, 7, 16, 21])
def test_chunks_equal_the_recurrence_in_values_and_gradients(length, chunk):
    results = []
    for function, more in ((reference.gated_delta, {}), (gated_delta, {"chunk": chunk})):
        inputs = inputs_of(length)
        output, state = function(*inputs[:-1], state=inputs[-1], **more)
        loss = (output * torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)).sum()
        gradients = torch.autograd.grad(loss + state.square().sum(), inputs)
        results.append([output, state, *gradients])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_strong_decay_forgets_and_stays_finite():
    query, key, value, log_decay, beta, state = inputs_of(40)
    output, last = gated_delta(query, key, value, torch.full_like(log_decay, -1e4), beta, 4, state)
    expected = beta[..., None] * (query * key).sum(dim=-1, keepdim=True) * value  # only the position itself
    torch.testing.assert_close(output, expected)
    assert last.isfinite().all()


def test_decays_begin_between_a_thousandth_and_a_tenth():
    attention = LinearAttention(16, 4, chunk=4)
    decays = torch.nn.functional.softplus(attention.gates.bias[:4])
    torch.testing.assert_close(decays, torch.tensor([0.001, 0.00464159, 0.0215443, 0.1]))


def test_a_supernet_reads_the_memory_anew_and_trains_as_the_fixed_pattern_does():
    """With a memory of all previous positions. No gradient reaches what earlier segments wrote to the state."""
    torch.manual_seed(1)
    supernet = supernet_of(3, [LINEAR, "dense"], CONFIG, VOCAB).double()
    set_choices(supernet, [[0], [1], [0]])
    fixed = build_pattern(sized([LINEAR, "dense", LINEAR]), CONFIG, VOCAB).double()
    chosen = [block.candidates[place] for block, place in zip(supernet.blocks, [0, 1, 0], strict=True)]
    assert count_memory_blocks(chosen) == 2  # no state, which would limit evaluation to one row
    assert count_memory_blocks(fixed.blocks) is None

    def name_in_supernet(name):
        return re.sub(r"blocks.(.).operation", lambda found: f"blocks.{found[1]}.candidates.{found[1] == '1':d}", name)

    weights = supernet.state_dict()
    fixed.load_state_dict({name: weights[name_in_supernet(name)] for name in fixed.state_dict()})
    (tokens, targets), results = torch.randint(VOCAB, (2, 2, 25)), []
    for network in (supernet, fixed):
        first, memories = network(tokens[:, :12], targets[:, :12], None, 30)
        second, _ = network(tokens[:, 12:], targets[:, 12:], memories, 30)
        second.sum().backward()
        results.append(torch.cat([first, second], dim=1))
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)
    gradients = {name: parameter.grad for name, parameter in supernet.named_parameters()}
    for name, parameter in fixed.named_parameters():
        torch.testing.assert_close(gradients[name_in_supernet(name)], parameter.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("segment", [8, 10])
def test_flops_are_those_of_the_formula(segment):
    d_model, heads, chunk, taps, filled = 16, 2, 4, 4, -(-segment // 4) * 4
    square, width = 2 * d_model**2, d_model // heads
    projections = 3 * square * (segment + taps - 1)  # of the convolution's inputs too; its sums do not count
    projections += (2 * square + 2 * d_model * 2 * heads) * segment
    products = 2 * d_model * (3 * chunk + 3 * width) + 2 * d_model * chunk  # in chunks; half a product is the solver's
    found = flops_of(LINEAR, 3, segment, 99, heads=heads) * segment
    assert found == pytest.approx(projections + products * filled)
