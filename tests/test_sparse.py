from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.operations import sparse
from models.operations.operation import BlockConfig, Segment
from models.relative_attention import sinusoidal_encodings
from tests import reference
from tests.making import operation_of

KINDS = ("strided", "fixed", "window")
SHAPES = [  # stride or window, segment, memory, positions of the stream before the segment
    (4, 8, 8, 8),
    (5, 8, 0, 0),
    (7, 7, 5, 5),
    (6, 6, 8, 21),
    (3, 7, 4, 9),
    (5, 3, 11, 22),
    (8, 5, 0, 0),
    (6, 1, 9, 10),
    (1, 5, 3, 3),
]


def sparse_operation(kind, stride, relative=True, heads=2, sizes=""):
    name = "window" if kind == "window" else f"sparse_{kind}"
    return operation_of(f"{name} {stride} heads={heads} {sizes}", BlockConfig(8, relative=relative)).double()


def attention_of(*arguments, **options):
    """A sparse attention module whose parameters make every term of the scores contribute."""
    torch.manual_seed(0)
    attention = sparse_operation(*arguments, **options).attention
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return attention


def context_of(attention, length, memory, start, batch=2):
    d_model = attention.output.in_features
    context = torch.randn(batch, memory + length, d_model, dtype=torch.float64, requires_grad=True)
    longer = memory + length + 5  # the table is longer, as if another block had a longer memory
    encodings = sinusoidal_encodings(longer, d_model, torch.float64) if attention.position is not None else None
    return context, length, Segment(encodings, start)


def values_and_gradients(output, context, attention):
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), [context, *attention.parameters()])]


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("variant", ["relative", "plain", "key heads and summary"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_and_dense_mask_equal_the_double_loop(kind, shape, variant, monkeypatch):
    """The variants are the default sizes with and without relative positions, and other sizes."""
    stride, segment, memory, start = shape
    options = {"relative": variant != "plain"}
    if variant == "key heads and summary":
        options |= {"heads": 4, "sizes": "key_heads=2" + f" summary={min(2, stride)}" * (kind == "fixed")}
    attention = attention_of(kind, stride, **options)
    context, *others = context_of(attention, segment, memory, start)
    slow = reference.attention(SimpleNamespace(attention=attention), context, segment, start, kind)
    expected = values_and_gradients(slow, context, attention)
    for dense in (True, False):
        monkeypatch.setattr(sparse, "uses_dense_mask", lambda *_, dense=dense: dense)
        results = values_and_gradients(attention(context, *others), context, attention)
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_many_keys_use_groups_and_few_a_dense_mask(monkeypatch):
    """A window of few queries uses a dense mask of any length, because its keys are few."""
    monkeypatch.setattr(sparse, "DENSE_UP_TO", 12)
    calls = []
    for kind in KINDS:
        attention = attention_of(kind, 4)
        monkeypatch.setattr(attention, "blocked", lambda *_, kind=kind: calls.append(kind))
        for segment, memory in ((8, 4), (8, 5), (4, 9)):
            attention(*context_of(attention, segment, memory, 4))
    assert calls == ["strided", "strided", "fixed", "fixed"]
    monkeypatch.setattr(sparse, "DENSE_UP_TO", 11)
    attention(*context_of(attention, 8, 4, 4))
    assert calls[4:] == ["window"]


class LargestTensor(TorchDispatchMode):
    """Records the number of entries of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_as_large_as_all_scores(kind):
    sparse.group_masks.cache_clear()
    segment, memory, heads = 512, 512, 2
    attention = attention_of(kind, 32, heads=heads)
    inputs = context_of(attention, segment, memory, memory, batch=1)
    with LargestTensor() as largest:
        attention(*inputs).sum().backward()
    assert 0 < largest.entries <= segment * (segment + memory) * heads / 5


@pytest.mark.parametrize("kind", KINDS[:2])
def test_two_blocks_reach_every_earlier_position_and_no_later_one(kind, monkeypatch):
    monkeypatch.setattr(sparse, "DENSE_UP_TO", 0)
    torch.manual_seed(0)
    length, blocks = 22, [sparse_operation(kind, 5) for _ in range(2)]
    x = torch.randn(1, length, 8, dtype=torch.float64, requires_grad=True)
    segment, y = Segment(sinusoidal_encodings(length, 8, torch.float64)), x
    for block in blocks:
        y = y + block(y, block.begin(1), segment)[0]
    for i in range(length):
        (gradient,) = torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)
        touched = gradient[0].abs().sum(dim=-1) > 0
        assert touched.tolist() == [True] * (i + 1) + [False] * (length - i - 1)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_stay_finite_and_correct(kind, monkeypatch):
    attention = attention_of(kind, 4)
    with torch.no_grad():
        attention.query.weight *= 1e4
    context, length, segment = context_of(attention, 16, 8, 8)
    exact = attention(context, length, segment)
    single = attention.float()
    for border in (0, sparse.DENSE_UP_TO):
        monkeypatch.setattr(sparse, "DENSE_UP_TO", border)
        result = single(context.detach().float(), length, segment._replace(encodings=segment.encodings.float()))
        torch.testing.assert_close(result.double(), exact, rtol=1e-2, atol=1e-2)
