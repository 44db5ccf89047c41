"""The operations against references, and the costs of operations against formulas."""

import inspect

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.operations import OPERATIONS, BlockConfig
from models.relative_attention import Positions, sinusoidal_encodings
from nas.core.blocks import OPERATIONS as CATALOGUE
from tests import reference
from tests.making import flops_of, operation_of


def test_the_catalogue_describes_the_classes():
    """Their names, the arguments of their constructors, and whether they attend."""
    assert list(OPERATIONS) == list(CATALOGUE)
    letters = [kind.letter for kind in CATALOGUE.values()]
    for name, kind in CATALOGUE.items():
        required = [
            key
            for key, one in inspect.signature(OPERATIONS[name]).parameters.items()
            if one.default is inspect.Parameter.empty
        ]
        assert required == ["config", *kind.sizes]
        own = [size.letter for size in kind.sizes.values()]
        assert len({*own}) == len(own) and "" not in own[1:]  # the main size comes first
        assert not {*own} & {*letters}  # so a short form without spaces is unambiguous
        built = operation_of(name, BlockConfig(16))
        assert kind.attends == hasattr(built, "attention")
    assert len({*letters}) == len(letters) and all(len(letter) == 1 for letter in letters)


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("memory", [0, 6])
def test_flops_are_those_of_the_formulas(memory, relative):
    batch, segment, keys = 3, 8, 8 + memory
    square = 2 * 16**2
    scores = (3 if relative else 2) * 2 * 16 * segment * keys
    own, positions = 2 * square * segment, square * keys / batch if relative else 0
    expected = {
        "attention": (scores + own + 2 * square * keys + positions) / segment,
        "attention key_heads=1": (scores + own + 2 * square * keys / 4 + positions) / segment,
        "conv": (3 * square * (segment + min(3, memory)) + square * segment) / segment,
        "dense": 2 * 2 * 16 * 40,
        "identity": 0,
    }
    assert {name: flops_of(name, batch, segment, memory, relative) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("name", ["sparse_strided 16", "sparse_fixed 16 key_heads=2", "window 20", "conv"])
@pytest.mark.parametrize(("segment", "memory"), [(16, 16), (400, 0), (300, 100), (15, 600)])
def test_flops_of_shapes_are_those_of_a_real_pass(name, segment, memory, relative):
    operation = operation_of(name, BlockConfig(16, relative=relative), heads=4)
    past = torch.randn(2, memory, 16) if memory else None
    positions = Positions(sinusoidal_encodings(memory + segment, 16) if relative else None, memory)
    with FlopCounterMode(display=False) as counter:
        operation(torch.randn(2, segment, 16), past, positions)
    expected = flops_of(name, 2, segment, memory, relative) * 2 * segment
    assert counter.get_total_flops() == pytest.approx(expected)


def test_sparse_attention_needs_fewer_flops_the_longer_the_stream():
    """Its scores grow with n * sqrt(n), so their share of all n * n scores falls with n."""
    for name in ("sparse_strided", "sparse_fixed", "window"):
        ratios = [flops_of(f"{name} {n}", 1, n * n, 0) / flops_of("attention", 1, n * n, 0) for n in (32, 64)]
        assert ratios[1] < 0.62 * ratios[0] < 0.2


def values_and_gradients(output, inputs):
    """The output and the gradients of a sum with fixed weights; zeros for inputs without an effect."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    gradients = torch.autograd.grad((output * weights).sum(), inputs, allow_unused=True, materialize_grads=True)
    return [output, *gradients]


def assert_close(one, two):
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("memory", [0, 2, 7])
@pytest.mark.parametrize("kernel", [1, 3, 4])
def test_a_short_convolution_equals_the_double_loop_and_its_state_replaces_the_memory(kernel, memory, norm):
    torch.manual_seed(0)
    conv, length = operation_of(f"conv {kernel}", BlockConfig(8, norm=norm)).double(), 5
    x, past = (torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (length, memory))
    stream = torch.cat([past, x], dim=1)
    inputs = [x, past, *conv.parameters()]
    result = values_and_gradients(conv(x, past if memory else None, None), inputs)
    branch = reference.short_convolution(conv, stream if norm == "post" else conv.norm(stream), length)
    expected = conv.norm(x + branch) - x if norm == "post" else branch
    assert_close(result, values_and_gradients(expected, inputs))
    results, state = [], None
    for piece in stream.split([memory, 1, 1, 3], dim=1):
        if piece.shape[1]:
            found, state = conv.step(piece, state)
            results.append(found)
            assert state.shape == (2, kernel - 1, 8) and not state.requires_grad
    assert_close([torch.cat(results, dim=1)[:, memory:]], result[:1])


ACTIVATIONS = {
    "relu_squared": lambda x: torch.clamp(x, min=0) ** 2,
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_branch_is_what_the_block_adds(norm, activation):
    torch.manual_seed(0)
    dense = operation_of("dense", BlockConfig(8, norm=norm, activation=activation)).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def network(inputs):
        return dense.output(ACTIVATIONS[activation](dense.expand(inputs)))

    expected = x + network(dense.norm(x)) if norm == "pre" else dense.norm(x + network(x))
    torch.testing.assert_close(x + dense(x, None, None), expected)


def test_identity_adds_nothing():
    x = torch.randn(2, 3, 8)
    assert torch.equal(x + operation_of("identity", BlockConfig(8))(x, None, None), x)
