import pytest
import torch

from models.operations import sparse
from models.operations.operation import BlockConfig, Segment
from models.transformer_xl import GridPositions, build_pattern
from tests.making import BLOCKS, generator, sized

CONFIG = BlockConfig(d_model=16)
VOCAB = 29


def model_of(pattern, config=CONFIG, **output):
    torch.manual_seed(3)
    model = build_pattern(sized(pattern), config, VOCAB, **output).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def stream(length, batch=2):
    tokens = torch.randint(VOCAB, (batch, length + 1), generator=generator(5))
    return tokens[:, :-1], tokens[:, 1:]


ALL, SPARSE = [*BLOCKS.values()], ["sparse_strided 5", "sparse_fixed 5"]
STREAMS = {
    "attention": (["attention"], {}, sparse.DENSE_UP_TO),
    "pre": (ALL, {}, sparse.DENSE_UP_TO),
    "post": (ALL, {"norm": "post"}, sparse.DENSE_UP_TO),
    "grid": (ALL, {"relative": False}, sparse.DENSE_UP_TO),
    "groups": ([*SPARSE, "dense", *SPARSE, "window 5"], {}, 0),
}


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize(("pattern", "options", "border"), STREAMS.values(), ids=STREAMS)
def test_segments_with_memory_equal_one_long_segment(pattern, options, border, monkeypatch):
    """With a memory of all previous positions, dividing a stream into segments changes no loss at any depth."""
    monkeypatch.setattr(sparse, "DENSE_UP_TO", border)
    grid = [] if options.get("relative", True) else [2, 3, 2]
    model = model_of(pattern, BlockConfig(16, **options), grid=grid)
    tokens, targets = stream(30)
    whole, _ = model(tokens, targets, None, 30)
    parts, memories = [], None
    for part in (slice(0, 5), slice(5, 7), slice(7, 8), slice(8, 20), slice(20, 30)):
        nll, memories = model(tokens[:, part], targets[:, part], memories, 30)
        parts.append(nll)
        assert memories.offset == part.stop
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)
    _, memories = model(tokens[:, :20], targets[:, :20], None, 2)
    assert not torch.allclose(model(tokens[:, 20:], targets[:, 20:], memories, 2)[0], whole[:, 20:])  # it forgets


def test_blocks_keep_a_memory_of_what_they_read():
    model = model_of(["dense", "attention", "identity", "window 3", "conv"])
    _, memories = model(*stream(6), None, 4)
    assert [state and state["memory"].shape[1] for state in memories.blocks] == [{}, 4, {}, 3, 3]
    _, memories = model(*stream(6), memories, 0)
    assert memories.blocks == [{}] * 5


def test_tied_embeddings_share_one_table():
    tied = model_of(["dense"], cutoffs=[5, 11], tie_embeddings=True)
    untied = model_of(["dense"], cutoffs=[5, 11], tie_embeddings=False)
    assert tied.head.weight is tied.embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == VOCAB * 16


def test_embeddings_start_at_a_size_that_keeps_activations():
    model = build_pattern(sized(["dense"], d_model=64), BlockConfig(64), 500)
    assert model.embedding.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)


@pytest.mark.parametrize("activation", ["relu_squared", "relu", "gelu"])
def test_recomputation_changes_no_value_and_keeps_less(activation, monkeypatch):
    """Losses, memories and gradients over two segments with dropout are bit-identical."""
    monkeypatch.setattr(sparse, "DENSE_UP_TO", 0)
    config, results, kept = BlockConfig(16, dropout=0.3, activation=activation), [], []
    tokens, targets = stream(20)
    for recompute in (False, True):
        model = model_of(ALL, config, recompute=recompute).train()
        torch.manual_seed(1)
        saved, loss, memories = [], 0.0, None
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            for start in (0, 10):
                window = slice(start, start + 10)
                nll, memories = model(tokens[:, window], targets[:, window], memories, 7)
                loss = loss + nll.sum()
        results.append([loss, *memories.tensors(), *torch.autograd.grad(loss, list(model.parameters()))])
        kept.append(sum(saved))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert kept[1] < kept[0] / 2


def test_the_depth_scaled_initialisation_keeps_the_residual_stream_small():
    blocks, models = sized(ALL * 20), []
    for scaled in (False, True):
        torch.manual_seed(3)
        models.append(build_pattern(blocks, BlockConfig(16, activation="gelu"), VOCAB, depth_scaled=scaled).double())
    plain, depth_scaled = models
    for one, other in zip(plain.blocks, depth_scaled.blocks, strict=True):
        before, after = dict(one.named_parameters()), dict(other.named_parameters())
        for name in before:
            last = name in ("operation.attention.output.weight", "operation.output.weight")
            torch.testing.assert_close(after[name], before[name] * len(blocks) ** -0.5 if last else before[name])
    tokens, targets = stream(20)
    loss = depth_scaled(tokens, targets, None, 0)[0].mean()
    gradients = torch.autograd.grad(loss, list(depth_scaled.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    stream_rms = []
    for model in models:
        with torch.no_grad():
            x = torch.randn(2, 20, 16, dtype=torch.float64)
            for block in model.blocks:
                x, _ = block(x, block.begin(2), Segment(model.encodings(20), tokens=tokens))
        stream_rms.append(x.square().mean().sqrt().item())
    assert stream_rms[1] < 2 < 4 < stream_rms[0]


def test_grid_positions_sum_row_column_and_channel():
    torch.manual_seed(0)
    rows, columns, channels = 3, 4, 2
    grid = GridPositions(rows, columns, channels, 16).double()
    for table in grid.tables:
        torch.nn.init.normal_(table)
    row, column, channel = grid.tables
    results = grid(0, 60)
    for place in range(60):
        pixel = row[place // 8 % 3] + column[place // 2 % 4] + channel[place % 2]
        torch.testing.assert_close(results[place], pixel * (16 / 3) ** 0.5)
    assert torch.equal(grid(7, 11), results[7:18])


def test_relative_positions_and_a_grid_cannot_be_combined():
    for relative, grid in ((True, [2, 3, 2]), (False, [])):
        with pytest.raises(ValueError, match=f"relative={relative} with grid"):
            model_of(["dense"], BlockConfig(16, relative=relative), grid=grid)


def test_a_grid_model_has_positions_only_in_its_embeddings():
    model = model_of(ALL, BlockConfig(16, relative=False), grid=[2, 3, 2])
    assert not any("position" in name for name, _ in model.blocks.named_parameters())
    for table in model.grid.tables:
        assert table.std().item() == pytest.approx(16**-0.5, rel=0.5)  # drawn like the token embeddings
    same = torch.zeros(1, 24, dtype=torch.long)
    nll, _ = model(same, same, None, 0)
    assert not torch.allclose(nll[0, 1], nll[0, 2]) and nll.shape == (1, 24)


@pytest.mark.parametrize("name", ["attention", "sparse_strided 4", "conv", "dense"])
def test_dropout_acts_on_embeddings_branches_and_the_last_layer_in_training_only(name):
    torch.manual_seed(0)
    model = build_pattern(sized([name], d_model=8), BlockConfig(8, dropout=0.5), 20)
    dropped = []
    for module in (model, model.blocks[0].operation):
        module.dropout.register_forward_hook(lambda _, inputs, output: dropped.append(not torch.equal(*inputs, output)))
    tokens = torch.randint(20, (2, 16))
    for training in (True, False):
        model.train(training)(tokens, tokens, None, 16)
        assert dropped == [training] * (4 if name == "dense" else 3)
        dropped.clear()
