import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models import sparse
from models.attention import Positions, join_heads, sinusoidal_encodings, split_heads
from models.operations import OPERATIONS, BlockConfig
from models.transformer_xl import build_pattern
from tests import reference

KINDS = ("strided", "fixed")
SHAPES = [  # stride, summary, segment, memory, positions of the stream before the segment
    (4, 1, 8, 8, 8),
    (4, 2, 8, 0, 0),
    (4, 3, 7, 0, 0),
    (4, 2, 7, 5, 5),
    (4, 2, 6, 8, 21),
    (3, 3, 7, 4, 9),
    (5, 2, 3, 11, 22),
    (8, 2, 5, 0, 0),
    (6, 1, 1, 9, 10),
    (1, 1, 5, 3, 3),
]


def attention_of(kind, stride, summary=1, factorization="merged", relative=True, d_model=8, heads=4):
    """A sparse attention module whose parameters make every term of the scores contribute."""
    torch.manual_seed(0)
    config = BlockConfig(
        d_model, heads, 1, stride=stride, summary=summary, factorization=factorization, relative=relative
    )
    attention = OPERATIONS[f"sparse_{kind}"](config).attention.double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return attention


def context_of(attention, segment, memory, start, batch=2):
    d_model = attention.output.in_features
    context = torch.randn(batch, memory + segment, d_model, dtype=torch.float64, requires_grad=True)
    longer = memory + segment + 5  # the table is longer, as if another block had a longer memory
    encodings = sinusoidal_encodings(longer, d_model, torch.float64) if attention.position is not None else None
    return context, segment, Positions(encodings, start)


def slow(attention, kind, summary, context, segment, positions):
    """Attention to the reference's key sets, one score at a time."""
    heads, keys, stride = attention.heads, context.shape[1], attention.stride
    first = positions.start + segment - keys  # place of the first key in the stream
    half = heads // 2

    def sees(head, query, key):
        near, far = reference.sparse_sets(kind, stride, summary, first + query)
        return first + key in (near | far if attention.merged else near if head < half else far)

    (query,) = split_heads(attention.query(context[:, -segment:]), heads)
    key, value = split_heads(attention.key_value(context), heads, 2)
    position = attention.project_positions(positions, slice(-keys, None))
    mixed = reference.relative_attention(
        *(x.transpose(0, 1) for x in (query, key, value)),
        position,
        attention.content_bias,
        attention.position_bias,
        sees,
    )
    return attention.output(join_heads(mixed.transpose(0, 1)))


def values_and_gradients(output, context, attention):
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), [context, *attention.parameters()])]


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("factorization", sparse.FACTORIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_and_dense_mask_equal_the_double_loop(kind, shape, factorization, relative):
    stride, summary, segment, memory, start = shape
    attention = attention_of(kind, stride, summary, factorization, relative)
    inputs = context_of(attention, segment, memory, start)
    expected = values_and_gradients(slow(attention, kind, summary, *inputs), inputs[0], attention)
    for compute in (attention.blocked, attention.masked):
        results = values_and_gradients(compute(*inputs), inputs[0], attention)
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("relative", [True, False], ids=["relative", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_window_attention_equals_the_double_loop(shape, relative, monkeypatch):
    window, _, segment, memory, start = shape
    torch.manual_seed(0)
    attention = OPERATIONS["window"](BlockConfig(8, 4, 1, window=window, relative=relative)).attention.double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    inputs = context_of(attention, segment, memory, start)
    expected = values_and_gradients(slow(attention, "window", 0, *inputs), inputs[0], attention)
    for dense in (True, False):
        monkeypatch.setattr(sparse, "uses_dense_mask", lambda *_, dense=dense: dense)
        results = values_and_gradients(attention(*inputs), inputs[0], attention)
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_many_keys_use_groups_and_few_a_dense_mask(kind, monkeypatch):
    attention, calls = attention_of(kind, 4), []
    for name in ("blocked", "masked"):
        original = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *inputs, name=name, f=original: calls.append(name) or f(*inputs))
    results = []
    for border in (12, 11):
        monkeypatch.setattr(sparse, "DENSE_UP_TO", border)
        inputs = context_of(attention, 8, 4, 4)
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(attention(torch.randn(2, 12, 8, dtype=torch.float64), *inputs[1:]))
    assert calls == ["masked", "blocked"]
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


class LargestTensor(TorchDispatchMode):
    """Records the number of entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("factorization", sparse.FACTORIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_as_large_as_all_scores(kind, factorization):
    sparse.group_masks.cache_clear()
    segment, memory, heads = 512, 512, 2
    attention = attention_of(kind, 32, 1, factorization, heads=heads)
    inputs = context_of(attention, segment, memory, memory, batch=1)
    with LargestTensor() as largest:
        attention(*inputs).sum().backward()
    assert 0 < largest.entries <= segment * (segment + memory) * heads / 5


@pytest.mark.parametrize("factorization", sparse.FACTORIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_blocks_reach_every_earlier_position_and_no_later_one(kind, factorization, monkeypatch):
    monkeypatch.setattr(sparse, "DENSE_UP_TO", 0)
    torch.manual_seed(0)
    length, config = 22, BlockConfig(8, 2, 1, stride=5, summary=1, factorization=factorization)
    blocks = [OPERATIONS[f"sparse_{kind}"](config).double() for _ in range(2)]
    x = torch.randn(1, length, 8, dtype=torch.float64, requires_grad=True)
    positions, y = Positions(sinusoidal_encodings(length, 8, torch.float64)), x
    for block in blocks:
        y = y + block(y, None, positions)
    for i in range(length):
        (gradient,) = torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)
        touched = gradient[0].abs().sum(dim=-1) > 0
        assert touched.tolist() == [True] * (i + 1) + [False] * (length - i - 1)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("border", [0, sparse.DENSE_UP_TO])
@pytest.mark.parametrize(("kind", "factorization"), list(itertools.product(KINDS, sparse.FACTORIZATIONS)))
def test_division_into_segments_does_not_change_results(kind, factorization, border, monkeypatch):
    monkeypatch.setattr(sparse, "DENSE_UP_TO", border)
    torch.manual_seed(0)
    config = BlockConfig(8, 2, 12, stride=4, summary=1, factorization=factorization)
    model = build_pattern([f"sparse_{kind}", "dense", f"sparse_{kind}"], config, 11).double()
    tokens, targets = torch.randint(11, (2, 2, 30))
    uncut, _ = model(tokens, targets, None, 30)
    pieces, memories = [], None
    for start, end in itertools.pairwise([0, 7, 8, 14, 23, 30]):
        nll, memories = model(tokens[:, start:end], targets[:, start:end], memories, 30)
        pieces.append(nll)
        assert memories.offset == end
    torch.testing.assert_close(torch.cat(pieces, dim=1), uncut, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_stay_finite_and_correct(kind):
    attention = attention_of(kind, 4)
    with torch.no_grad():
        attention.query.weight *= 1e4
    context, *others = context_of(attention, 16, 8, 8)
    exact = attention.masked(context, *others)
    single = attention.float()
    encodings = others[1].encodings.float()
    for compute in (single.blocked, single.masked):
        result = compute(context.detach().float(), others[0], Positions(encodings, others[1].start))
        torch.testing.assert_close(result.double(), exact, rtol=1e-2, atol=1e-2)


def test_invalid_options_are_reported():
    with pytest.raises(ValueError, match="stride=0 must be at least 1"):
        attention_of("strided", 0)
    with pytest.raises(ValueError, match="summary=5 must be from 1 to stride=4"):
        attention_of("fixed", 4, 5)
    with pytest.raises(ValueError, match="heads=3 must be even"):
        attention_of("strided", 4, factorization="heads", d_model=6, heads=3)
    with pytest.raises(ValueError, match="factorization='both' must be one of merged, heads"):
        attention_of("strided", 4, factorization="both")
