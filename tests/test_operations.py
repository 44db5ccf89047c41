import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.attention import Positions, sinusoidal_encodings
from models.operations import OPERATIONS, BlockConfig
from nas.core.pattern import ATTENDING, SPARSE
from nas.core.pattern import OPERATIONS as NAMES
from nas.costs.flops import operation_flops


def test_core_pattern_and_models_have_the_same_operation_names():
    assert tuple(OPERATIONS) == NAMES
    config = BlockConfig(8, 2, 12)
    built = {name: cls(config) for name, cls in OPERATIONS.items()}
    assert tuple(name for name in NAMES if built[name].reach != 0) == ATTENDING
    assert tuple(name for name in ATTENDING[:-1] if len(built[name].key_sets(config)) == 2) == SPARSE


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("memory", [0, 6])
def test_flops_are_those_of_the_formulas(memory, relative):
    config, batch, segment, keys = BlockConfig(16, 4, 40, relative=relative), 3, 8, 8 + memory
    square = 2 * 16**2
    scores = (3 if relative else 2) * 2 * 16 * segment * keys
    projections = square * (2 * segment + 2 * keys) + (square * keys / batch if relative else 0)
    found = {name: operation_flops(name, config, batch, segment, memory) for name in ("attention", "dense", "identity")}
    expected = {"attention": (scores + projections) / segment, "dense": 2 * 2 * 16 * 40, "identity": 0}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("name", ["sparse_strided", "sparse_fixed", "window"])
@pytest.mark.parametrize(("segment", "memory"), [(16, 16), (400, 0), (300, 100), (15, 600)])
def test_flops_of_shapes_are_those_of_a_real_pass(name, segment, memory, relative):
    config = BlockConfig(16, 4, 40, relative=relative, stride=16, window=20)
    operation = OPERATIONS[name](config)
    past = torch.randn(2, memory, 16) if memory else None
    positions = Positions(sinusoidal_encodings(memory + segment, 16) if relative else None, memory)
    with FlopCounterMode(display=False) as counter:
        operation(torch.randn(2, segment, 16), past, positions)
    expected = operation_flops(name, config, 2, segment, memory) * 2 * segment
    assert counter.get_total_flops() == pytest.approx(expected)


def test_sparse_attention_needs_fewer_flops_the_longer_the_stream():
    """Its scores grow with n * sqrt(n), so their share of all n * n scores falls with n."""
    for name in ("sparse_strided", "sparse_fixed", "window"):
        ratios = []
        for n in (32, 64):
            config = BlockConfig(16, 4, 40, stride=n, window=n)
            full, sparse = (operation_flops(kind, config, 1, n * n, 0) for kind in ("attention", name))
            ratios.append(sparse / full)
        assert ratios[1] < 0.62 * ratios[0] < 0.2


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_branch_is_what_the_block_adds(norm, activation):
    torch.manual_seed(0)
    config = BlockConfig(d_model=8, heads=2, d_ffn=12, norm=norm, activation=activation)
    dense = OPERATIONS["dense"](config).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def network(inputs):
        return dense.contract(getattr(torch.nn.functional, activation)(dense.expand(inputs)))

    expected = x + network(dense.norm(x)) if norm == "pre" else dense.norm(x + network(x))
    torch.testing.assert_close(x + dense(x, None, None), expected)


def test_heads_must_divide_d_model():
    with pytest.raises(ValueError, match="heads=3 must divide d_model=8"):
        BlockConfig(8, 3, 12)


def test_identity_adds_nothing():
    x = torch.randn(2, 3, 8)
    assert torch.equal(x + OPERATIONS["identity"](BlockConfig(8, 2, 12))(x, None, None), x)
