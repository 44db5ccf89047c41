import pytest
import torch

from models.operations.operation import BlockConfig, Segment
from models.relative_attention import sinusoidal_encodings
from nas.gumbel.gumbel_phase import set_mixture, set_path
from tests.making import generator, supernet_of

CONFIG = BlockConfig(d_model=8)
OPERATIONS = ["attention", "dense", "identity"]
VOCAB = 11


def small_supernet(blocks=2):
    torch.manual_seed(0)
    return supernet_of(blocks, OPERATIONS, CONFIG, VOCAB, d_ffn=12).double().eval()


def batch(length=6):
    tokens = torch.randint(VOCAB, (2, length + 1), generator=generator(1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_along(supernet, path, gates=None):
    set_path(supernet, path, gates)
    return supernet(*batch(), None, 4)[0].mean()


@pytest.mark.usefixtures("each_device")
def test_a_mixture_and_its_gradients_equal_the_weighted_sum_of_candidate_outputs():
    block = small_supernet().blocks[0]
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    segment = Segment(sinusoidal_encodings(5, 8, torch.float64), tokens=torch.zeros(2, 5, dtype=torch.int64))
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64, requires_grad=True)
    block.choice = [0, 1, 2], weights
    outputs = [x + candidate(x, candidate.begin(2), segment)[0] for candidate in block.candidates]
    expected, found = (
        sum(weight * output for weight, output in zip(weights, outputs, strict=True)),
        block(x, block.begin(2), segment)[0],
    )
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    inputs = [x, *block.parameters()]
    for a, b in zip(
        *(torch.autograd.grad((y * direction).sum(), inputs, retain_graph=True) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(a, b)
    # The term in x that all candidates share is in the weighted sum of outputs, but in no branch: with weights that add
    # up to 1 it is the same constant in every weight's gradient.
    (slow,) = torch.autograd.grad((expected * direction).sum(), weights)
    (fast,) = torch.autograd.grad((found * direction).sum(), weights)
    torch.testing.assert_close(fast, slow - (x * direction).sum())


def test_a_path_runs_only_its_operations_and_equals_the_fixed_model():
    supernet, ran = small_supernet(), []
    for index, block in enumerate(supernet.blocks):
        for name, candidate in zip(OPERATIONS, block.candidates, strict=True):
            candidate.register_forward_hook(lambda *_, label=(index, name): ran.append(label))
    with_path = loss_along(supernet, [1, 0])
    assert ran == [(0, "dense"), (1, "attention")]
    one_hot = torch.tensor([[0.0, 1, 0], [1, 0, 0]], dtype=torch.float64)
    set_mixture(supernet, one_hot)
    torch.testing.assert_close(supernet(*batch(), None, 4)[0].mean(), with_path)


def test_operations_that_did_not_run_get_no_gradient():
    supernet = small_supernet()
    loss_along(supernet, [1, 2]).backward()
    first, second = (block.candidates for block in supernet.blocks)
    assert all(p.grad is not None for p in first[1].parameters())
    assert all(p.grad is None for p in [*first[0].parameters(), *second[0].parameters(), *second[1].parameters()])


def test_memory_is_kept_with_every_operation():
    supernet = small_supernet()
    set_path(supernet, [2, 1])
    _, memories = supernet(*batch(), None, 4)
    assert [state["memory"].shape for state in memories.blocks] == [(2, 4, 8), (2, 4, 8)]


def test_recomputation_changes_neither_the_mixture_nor_the_gates():
    """The gradients of the mixture weights and gates are bit-identical with and without recomputation."""
    weights = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.6, 0.3]], dtype=torch.float64, requires_grad=True)
    found = []
    for recompute in (False, True):
        supernet = small_supernet()
        supernet.recompute = recompute
        results = []
        for choose in (
            lambda net=supernet: set_mixture(net, weights.softmax(dim=-1)),
            lambda net=supernet: set_path(net, [0, 1], weights.diagonal()),
        ):
            choose()
            loss = supernet(*batch(), None, 4)[0].mean()
            inputs = [weights, *supernet.parameters()]
            results += [loss, *torch.autograd.grad(loss, inputs, allow_unused=True)]
        found.append(results)
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
