import pytest
import torch

from models import softmax
from models.softmax import AdaptiveSoftmax, FullSoftmax
from tests import reference


def random_layer(cutoffs, div_value=1, tied=False, vocab=23, d_model=8):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.empty(vocab, d_model)) if tied else None
    layer = AdaptiveSoftmax(d_model, vocab, cutoffs, div_value, weight).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


CASES = [([5], 1, False), ([3, 11], 1, True), ([3, 11], 1, False), ([1, 2, 22], 1, False), ([4, 9], 2, False)]


@pytest.fixture(params=[False, True], ids=["picked", "static"])
def either_way(request, monkeypatch):
    """Compute tails only for their own tokens, or for all tokens as on a GPU."""
    monkeypatch.setattr(softmax, "is_static", lambda targets, vocab_size: request.param)


@pytest.mark.usefixtures("each_device", "either_way")
@pytest.mark.parametrize(("cutoffs", "div_value", "tied"), CASES)
def test_adaptive_softmax_is_the_distribution_it_factorises_with_its_gradients(cutoffs, div_value, tied):
    layer = random_layer(cutoffs, div_value, tied)
    hidden = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    expected = reference.adaptive_probabilities(hidden, layer)
    torch.testing.assert_close(expected.sum(dim=1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(layer.log_probabilities(hidden).exp(), expected)
    for token in range(23):
        nll = layer(hidden, torch.full((9,), token))
        torch.testing.assert_close(nll, -expected[:, token].log())
    targets = torch.tensor([0, 1, 2, 5, 10, 11, 12, 22, 3])
    wanted = [hidden, *layer.parameters()]
    weights = torch.arange(1.0, 10.0, dtype=torch.float64)  # different for each token, to detect exchanged rows
    fast = torch.autograd.grad((layer(hidden, targets) * weights).sum(), wanted)
    slow = torch.autograd.grad(-(expected[torch.arange(9), targets].log() * weights).sum(), wanted)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("cutoffs", "div_value", "tied"), CASES)
def test_a_tail_without_tokens_has_gradients_of_zeros(cutoffs, div_value, tied):
    """The mean of gradients needs each of them on every rank, also without tokens in a tail."""
    layer = random_layer(cutoffs, div_value, tied)
    layer(torch.randn(4, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    last = layer.tables[-1] if layer.tables is not None else layer.weight
    assert last.grad[-1].abs().max() == 0 and last.isfinite().all()


def test_full_softmax_equals_its_definition():
    layer = FullSoftmax(4, 7).double()
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    hidden, targets = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 6, 2])
    scores = hidden @ layer.weight.T + layer.bias
    expected = (scores.exp() / scores.exp().sum(dim=1, keepdim=True)).log()
    torch.testing.assert_close(layer.log_probabilities(hidden), expected)
    torch.testing.assert_close(layer(hidden, targets), -expected[torch.arange(3), targets])


@pytest.mark.parametrize("cutoffs", [[], [0, 5], [5, 5], [9, 3], [23], [30]])
def test_invalid_cutoffs_are_reported(cutoffs):
    with pytest.raises(ValueError, match="must increase strictly between 0 and the vocabulary size 23"):
        AdaptiveSoftmax(8, 23, cutoffs)


def test_a_tied_layer_has_one_width():
    with pytest.raises(ValueError, match="div_value=2 must be 1"):
        AdaptiveSoftmax(8, 23, [5], div_value=2, weight=torch.nn.Parameter(torch.empty(23, 8)))


def test_flops_follow_the_mass_of_the_clusters():
    layer = random_layer([3, 11])
    head, first, second = 2 * 8 * (3 + 2), 2 * 8 * 8, 2 * 8 * 12
    assert layer.flops([1.0, 0.0, 0.0]) == head
    assert layer.flops([0.5, 0.25, 0.25]) == pytest.approx(head + 0.25 * first + 0.25 * second)


@pytest.mark.parametrize("layer", [FullSoftmax(8, 23), AdaptiveSoftmax(8, 23, [5, 12])], ids=["full", "adaptive"])
def test_in_bf16_all_log_probabilities_have_the_digits_of_the_nll(layer):
    """Large biases would lose their last digits in a bf16 sum."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=4)
    hidden = torch.randn(6, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        log_p = layer.log_probabilities(hidden)
        for token in range(23):
            torch.testing.assert_close(log_p[:, token].float(), -layer(hidden, torch.full((6,), token)).float())
