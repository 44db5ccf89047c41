"""bf16 products under autocast. Errors relative to float64 are as small as those of plain code in bf16."""

import pytest
import torch
from torch.nn import functional as F

from models import softmax
from models.operations.operation import BlockConfig, Segment
from models.relative_attention import attend, cast_inputs, causal_mask, plain_attend, sinusoidal_encodings
from models.softmax import AdaptiveSoftmax, FullSoftmax
from models.transformer_xl import build_pattern
from nas.gumbel.gumbel_phase import StochasticBlock
from tests.making import BLOCKS, sized

pytestmark = pytest.mark.usefixtures("each_device")


def errors(inputs, exact, fast, slow) -> list[tuple[float, float]]:
    """Relative errors of fast() and slow() in bf16 against exact() in float64.

    Returns a pair for the output and for the gradient of each input. exact() gets the inputs in float64; the others
    get them in float32 under autocast.
    """

    def run(function, dtype, low):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        with torch.autocast(leaves[0].device.type, torch.bfloat16, enabled=low):
            output = function(*leaves)
        torch.manual_seed(1)
        direction = torch.randn(output.shape, dtype=torch.float64)
        return [output.detach().double(), *torch.autograd.grad((output.double() * direction).sum(), leaves)]

    def relative_errors(results):
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True)]

    expected = run(exact, torch.float64, False)
    return list(zip(*(relative_errors(run(function, torch.float32, True)) for function in (fast, slow)), strict=True))


def assert_as_good(pairs, factor=1.5) -> None:
    for number, (fast, slow) in enumerate(pairs):
        assert 1e-4 < fast < factor * slow, (number, fast, slow)  # float32 would be below 1e-4


@pytest.mark.parametrize("relative", [True, False])
def test_attention(relative):
    torch.manual_seed(0)
    heads, batch, length, memory, width = 2, 3, 48, 32, 16
    keys = memory + length
    shapes = [(heads, batch, length, width), (2, heads, batch, keys, width)]
    shapes += [(heads, keys, width), (heads, width), (heads, width)] if relative else []
    inputs = [torch.randn(shape) for shape in shapes]

    def fast(query, key_value, position=None, u=None, v=None):
        mask = causal_mask(length, keys, query.dtype, query.device)
        return attend(query, key_value, position, u, v, mask)[0]

    def slow(query, key_value, position=None, u=None, v=None):
        mask = causal_mask(length, keys, query.dtype, query.device)
        others = cast_inputs(position, u, v) if relative else [None] * 3
        return plain_attend(*cast_inputs(query, key_value), *others, *cast_inputs(mask), 1, False)[0]

    assert_as_good(errors(inputs, fast, fast, slow))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cutoffs", [[], [5, 20]])
def test_output_layers(cutoffs, static, monkeypatch):
    """The nll is computed in float32, so it is as good as cross entropy over bf16 logits."""
    monkeypatch.setattr(softmax, "is_static", lambda targets, vocab_size: static)
    torch.manual_seed(0)
    layer = AdaptiveSoftmax(16, 50, cutoffs) if cutoffs else FullSoftmax(16, 50)
    names = [name for name, _ in layer.named_parameters()]
    inputs = [torch.randn(64, 16), *(torch.randn(parameter.shape) for parameter in layer.parameters())]
    inputs[1 + names.index("bias")] *= 10  # rounded to bf16, such a bias would dominate the error
    targets = torch.randint(50, (64,))

    def fast(hidden, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (hidden, targets))

    def slow(hidden, *parameters):
        values = dict(zip(names, parameters, strict=True))
        if not cutoffs:
            logits = F.linear(hidden, values["weight"]).float() + values["bias"]
            return F.cross_entropy(logits, targets, reduction="none")
        named = {f"layer.{name}": value for name, value in values.items()}
        probability = torch.func.functional_call(Probabilities(layer), named, (hidden,))
        return -probability.gather(1, targets[:, None]).squeeze(1)

    assert_as_good(errors(inputs, fast, fast, slow))


class Probabilities(torch.nn.Module):
    """Log-probabilities of all tokens, from log_probabilities() of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        return self.layer.log_probabilities(hidden).float()


@pytest.mark.parametrize("name", BLOCKS.values(), ids=BLOCKS)
def test_a_model_in_bf16_has_the_loss_of_one_in_float32(name):
    torch.manual_seed(0)
    blocks = sized([name, "attention"], d_model=32, d_ffn=64)
    model = build_pattern(blocks, BlockConfig(32), 40, cutoffs=[10], tie_embeddings=True)
    tokens = torch.randint(40, (2, 49))
    nll, memories = model(tokens[:, :-1], tokens[:, 1:], None, 16)
    with torch.autocast(nll.device.type, torch.bfloat16):
        low, kept = model(tokens[:, :-1], tokens[:, 1:], None, 16)
    assert low.dtype == torch.float32 and all(x.dtype == torch.float32 for x in kept.tensors())
    assert low.mean().item() == pytest.approx(nll.mean().item(), rel=1e-3) and not torch.equal(low, nll)
    low.mean().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert [x.shape for x in memories.tensors()] == [x.shape for x in kept.tensors()]


def test_mixture_weights_have_gradients_in_float32():
    block = StochasticBlock(sized(["dense", "identity"], d_model=8), BlockConfig(8))
    branch, direction = torch.randn(2, 5, 8).bfloat16(), torch.randn(2, 5, 8)
    block.candidates[0].forward = lambda *_: (branch, {})
    weights, x = torch.tensor([0.3, 0.7], requires_grad=True), torch.zeros(2, 5, 8)
    block.choice = [0, 1], weights
    (gradient,) = torch.autograd.grad(
        (block(x, block.begin(2), Segment(None, tokens=x[:, :, 0].long()))[0] * direction).sum(), weights
    )
    assert gradient[0].item() == pytest.approx((direction.double() * branch.double()).sum().item(), rel=1e-5)
    assert gradient[1].item() == 0.0


def test_encodings_are_not_cached_while_the_compiler_traces():
    assert sinusoidal_encodings(4, 6) is sinusoidal_encodings(4, 6)
    traced = torch.compile(lambda x: x + sinusoidal_encodings(4, 6, device=x.device), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(torch.zeros(4, 6)), sinusoidal_encodings(4, 6))
