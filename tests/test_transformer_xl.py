import pytest
import torch

from models.operations import Sizes
from models.transformer_xl import build_pattern, extend_memory

SIZES = Sizes(d_model=16, heads=2, d_ffn=24)
VOCAB = 29


def model_of(pattern, sizes=SIZES, **output):
    torch.manual_seed(3)
    model = build_pattern(pattern, sizes, VOCAB, **output).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def stream(length, batch=2):
    tokens = torch.randint(VOCAB, (batch, length + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("pattern", [["attention"], ["attention", "dense", "identity", "attention", "attention"]])
def test_two_segments_with_memory_equal_one_long_segment(pattern, norm):
    """With a memory as long as all that came before, cutting a stream changes nothing at any depth."""
    model = model_of(pattern, Sizes(16, 2, 24, norm=norm))
    tokens, targets = stream(12)
    whole, _ = model(tokens, targets, None, 0)
    first, memories = model(tokens[:, :5], targets[:, :5], None, 12)
    second, memories = model(tokens[:, 5:7], targets[:, 5:7], memories, 12)
    third, _ = model(tokens[:, 7:], targets[:, 7:], memories, 12)
    torch.testing.assert_close(torch.cat([first, second, third], dim=1), whole, rtol=0, atol=1e-10)


def test_a_shorter_memory_forgets():
    model = model_of(["attention"])
    tokens, targets = stream(12)
    whole, _ = model(tokens, targets, None, 0)
    _, memories = model(tokens[:, :6], targets[:, :6], None, 2)
    second, _ = model(tokens[:, 6:], targets[:, 6:], memories, 2)
    assert not torch.allclose(second, whole[:, 6:])


def test_only_blocks_that_look_back_keep_a_memory_and_it_carries_no_gradient():
    model = model_of(["dense", "attention", "identity", "attention"])
    _, memories = model(*stream(6), None, 4)
    assert [memory is not None for memory in memories.blocks] == [False, True, False, True]
    assert all(
        memory.shape == (2, 4, 16) and not memory.requires_grad for memory in memories.blocks if memory is not None
    )


def test_memory_holds_the_last_inputs():
    x = torch.arange(10.0).view(1, 10, 1)
    memory = extend_memory(None, x[:, :3], 5)
    assert memory.flatten().tolist() == [0, 1, 2]
    memory = extend_memory(memory, x[:, 3:6], 5)
    assert memory.flatten().tolist() == [1, 2, 3, 4, 5]
    assert extend_memory(memory, x[:, 6:], 2).flatten().tolist() == [8, 9]
    assert extend_memory(memory, x, 0) is None


def test_tied_embeddings_are_one_table():
    tied = model_of(["dense"], cutoffs=[5, 11], tie_embeddings=True)
    untied = model_of(["dense"], cutoffs=[5, 11], tie_embeddings=False)
    assert tied.head.weight is tied.embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == VOCAB * 16


def test_weights_start_at_a_size_that_keeps_activations():
    torch.manual_seed(0)
    model = build_pattern(["attention", "dense"], Sizes(64, 4, 256), 500)
    assert model.embedding.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert model.blocks[1].operation.contract.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert model.blocks[0].operation.attention.content_bias.abs().max().item() == 0


class PlainEmbedding(torch.nn.Module):
    """What models.transformer_xl.Embedding does, left to autograd."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, tokens):
        return torch.nn.functional.embedding(tokens, self.weight) * self.weight.shape[1] ** 0.5, self.weight


@pytest.mark.parametrize("cutoffs", [[], [5, 11]])
@pytest.mark.parametrize(("tied", "division"), [(True, 1), (False, 1), (False, 2)])
def test_all_gradients_equal_those_with_a_plain_embedding(tied, division, cutoffs):
    """Over two segments, with tokens that repeat; tied, the table's gradients of both ends meet."""
    torch.manual_seed(0)
    model = model_of(["attention", "dense"], cutoffs=cutoffs, tie_embeddings=tied, division=division)
    tokens = torch.randint(23, (2, 9))
    tokens[:, 3] = tokens[:, 2]
    weights = torch.rand(2, 4, dtype=torch.float64)
    found = []
    for embedding in (model.embedding, PlainEmbedding(model.embedding.weight)):
        model.embedding, memories, loss = embedding, None, 0.0
        for start in (0, 4):
            window = tokens[:, start : start + 5]
            nll, memories = model(window[:, :-1], window[:, 1:], memories, 4)
            loss = loss + (nll * weights).sum()
        parameters = dict(model.named_parameters())
        found.append([loss, *torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)])
    assert (
        dict(zip(parameters, found[0][1:], strict=True)).get("head.weight", loss) is not None
    )  # untied, it has its own
    for name, a, b in zip(["loss", *parameters], *found, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, msg=name)
