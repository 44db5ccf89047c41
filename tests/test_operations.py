import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.attention import Positions, sinusoidal_encodings
from models.operations import OPERATIONS, BlockConfig
from nas.core.pattern import ATTENDING, SPARSE
from nas.core.pattern import OPERATIONS as NAMES


def test_core_pattern_and_models_have_the_same_operation_names():
    assert tuple(OPERATIONS) == NAMES
    config = BlockConfig(8, 2, 12)
    built = {name: cls(config) for name, cls in OPERATIONS.items()}
    assert tuple(name for name in NAMES if built[name].reach != 0) == ATTENDING
    assert tuple(name for name in ATTENDING[:-1] if len(built[name].key_sets(config)) == 2) == SPARSE


@pytest.mark.parametrize("name", ["attention", "dense"])
@pytest.mark.parametrize("memory", [0, 6])
def test_flops_equal_those_of_the_matrix_products(name, memory):
    batch, segment = 3, 8
    config = BlockConfig(d_model=16, heads=4, d_ffn=40)
    operation = OPERATIONS[name](config)
    past = torch.randn(batch, memory, 16) if memory else None
    with FlopCounterMode(display=False) as counter:
        operation(torch.randn(batch, segment, 16), past, Positions(sinusoidal_encodings(memory + segment, 16), memory))
    expected = OPERATIONS[name].flops(config, batch, segment, memory) * batch * segment
    assert counter.get_total_flops() == pytest.approx(expected)


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("name", ["sparse_strided", "sparse_fixed", "window"])
@pytest.mark.parametrize(("segment", "memory"), [(16, 16), (128, 128), (400, 0), (300, 100), (256, 256), (15, 600)])
def test_flops_of_sparse_attention_equal_those_of_the_matrix_products(name, segment, memory, relative):
    config = BlockConfig(16, 4, 40, relative=relative, stride=16, window=20)
    operation = OPERATIONS[name](config)
    past = torch.randn(2, memory, 16) if memory else None
    positions = Positions(sinusoidal_encodings(memory + segment, 16) if relative else None, memory)
    with FlopCounterMode(display=False) as counter:
        operation(torch.randn(2, segment, 16), past, positions)
    expected = OPERATIONS[name].flops(config, 2, segment, memory) * 2 * segment
    assert counter.get_total_flops() == pytest.approx(expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_branch_is_what_the_block_adds(norm):
    torch.manual_seed(0)
    config = BlockConfig(d_model=8, heads=2, d_ffn=12, norm=norm)
    dense = OPERATIONS["dense"](config).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def network(inputs):
        return dense.contract(dense.expand(inputs).relu())

    expected = x + network(dense.norm(x)) if norm == "pre" else dense.norm(x + network(x))
    torch.testing.assert_close(x + dense(x, None, None), expected)


def test_identity_adds_nothing():
    x = torch.randn(2, 3, 8)
    assert torch.equal(x + OPERATIONS["identity"](BlockConfig(8, 2, 12))(x, None, None), x)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_dense_block_and_its_gradients_equal_those_of_its_layers(activation, dropout):
    dense = OPERATIONS["dense"](
        BlockConfig(d_model=8, heads=2, d_ffn=12, dropout=dropout, activation=activation)
    ).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 8, dtype=torch.float64)

    def slow(x):
        inner = dense.dropout(dense.activation(dense.expand(dense.norm(x))))
        return dense.dropout(dense.contract(inner))

    results = []
    for network in (lambda x: dense(x, None, None), slow):
        torch.manual_seed(3)
        result = network(x)
        results.append([result, *torch.autograd.grad((result * weights).sum(), [x, *dense.parameters()])])
    for fast, expected in zip(*results, strict=True):
        torch.testing.assert_close(fast, expected)
