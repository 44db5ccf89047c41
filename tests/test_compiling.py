"""What makes steps faster on a GPU, as far as a CPU can show that it changes nothing: see experiments/bench/README.md
for what only a GPU can."""

import pytest
import torch

from models import softmax
from nas.training import compile
from nas.training.compile import CapturedStep, graph_operations, has_fixed_shapes, is_same_everywhere
from nas.training.device import device_context
from nas.training.optimizer import WeightsOptimizer
from nas.training.train_step import run_batch
from tests.making import make_retraining, make_search


def losses(phase, steps=12):
    return [nll for nll in (phase.step(step)[0] for step in range(1, steps + 1)) if nll is not None]


@pytest.fixture
def traced(monkeypatch):
    """The compiler's front end alone, which is what the operations' code has to suit; it needs no C++ compiler."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    torch._dynamo.reset()


OPERATIONS = "search.operations=[attention,sparse_strided,sparse_fixed,dense,identity]"


@pytest.mark.parametrize(
    "options", [[OPERATIONS], ["search.sampling=soft", "search.split=shared"]], ids=["hard", "soft"]
)
def test_compiled_operations_search_as_those_that_are_not(options, small_config, traced, capsys):
    """Whatever paths are sampled, an operation is compiled once, for all blocks, and for forward alone once more."""
    options = [*options, "model.dropout=0", "search.warmup_steps=6"]
    plain = losses(make_search(small_config(*options)))
    torch._dynamo.utils.counters.clear()
    found = losses(make_search(small_config(*options, "train.compile=always")))
    torch.testing.assert_close(torch.stack(found), torch.stack(plain), rtol=1e-5, atol=1e-6)
    kinds = 4 if OPERATIONS in options else 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3 * kinds
    assert "compiled Attention, Dense" in capsys.readouterr().out


def test_what_does_not_compile_runs_as_it_is(small_config, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no compiler here\nand many lines more")

    plain = losses(make_retraining(small_config(), ["attention", "dense"]))
    monkeypatch.setattr(compile, "try_operation", fail)
    found = losses(make_retraining(small_config("train.compile=always"), ["attention", "dense"]))
    assert torch.equal(torch.stack(found), torch.stack(plain))
    assert "NOTICE: train.compile is off: RuntimeError: no compiler here\n" in capsys.readouterr().out


def pretend_streams(monkeypatch):
    monkeypatch.setattr(compile, "side_stream", object)
    monkeypatch.setattr(compile, "warm_up", lambda work, inputs, side: work(*inputs))


def pretend_capture(work, inputs):
    """As a CUDA graph: what is replayed reads its inputs from fixed places, and writes its outputs into others."""
    places, outputs = [None if x is None else x.clone() for x in inputs], []

    def replay():
        results = work(*places)
        if not outputs:
            outputs.extend(None if x is None else x.clone() for x in results)
        for place, x in zip(outputs, results, strict=True):
            if place is not None:
                place.copy_(x)

    captured.append(replay)
    return replay, places, Later(outputs)


class Later(list):
    """The outputs, which are there once something has been replayed."""

    def __init__(self, outputs):
        self.outputs = outputs

    def __iter__(self):
        return iter(self.outputs)


captured = []


@pytest.mark.parametrize("stage", ["retrain", "soft", "soft, held-out"])
def test_a_captured_step_trains_as_one_that_is_not(stage, small_config, monkeypatch):
    """With the capture itself pretended: what is copied where, when it is captured, and what is left to the stream."""
    monkeypatch.setattr(compile, "capture", pretend_capture)
    pretend_streams(monkeypatch)
    captured.clear()
    options = ["model.dropout=0", "search.warmup_steps=10", "train.steps=24", "train.memory=12"]
    if stage != "retrain":
        options += ["search.sampling=soft", f"search.split={'shared' if stage == 'soft' else 'heldout'}"]

    def make():
        if stage == "retrain":
            return make_retraining(small_config(*options), ["attention", "dense", "attention"])
        return make_search(small_config(*options))

    plain, phase = make(), make()
    phase.weights.captured = CapturedStep(phase.weights.update_flat)
    # The first two segments of a pass, whose memories are not full, are not replayed.
    assert torch.equal(torch.stack(losses(phase, 24)), torch.stack(losses(plain, 24)))
    assert len(captured) == (2 if stage == "soft" else 1)  # weights alone, and with the logits
    for a, b in zip(phase.stream.memories.blocks, plain.stream.memories.blocks, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_sample_and_its_gradient_stay_where_they_are(small_config):
    """For a graph writes where they were when it was captured, whatever has run without it since."""
    for options in (["search.split=shared"], []):
        phase = make_search(small_config("search.sampling=soft", "search.warmup_steps=2", *options))
        places = phase.leaf.data_ptr(), phase.leaf.grad.data_ptr()
        largest = []
        for step in range(1, 12):
            phase.step(step)
            assert (phase.leaf.data_ptr(), phase.leaf.grad.data_ptr()) == places
            largest.append(phase.leaf.grad.abs().max())
        assert max(largest) > 0 and largest[0] == 0


def test_a_step_that_cannot_be_captured_runs_as_it_is(small_config, monkeypatch, capsys):
    def fail(work, inputs):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(compile, "capture", fail)
    pretend_streams(monkeypatch)
    plain, phase = (make_retraining(small_config("model.dropout=0"), ["attention", "dense"]) for _ in range(2))
    phase.weights.captured = CapturedStep(phase.weights.update_flat)
    assert torch.equal(torch.stack(losses(phase)), torch.stack(losses(plain)))
    said = "NOTICE: no CUDA graph of the step: RuntimeError: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().out.count(said) == 1


def pretend_both_passes(module, tensors):
    shapes = [tensor.shape for tensor in tensors]

    def replay(*inputs):
        assert [x.shape for x in inputs] == shapes and module.operation.training and torch.is_grad_enabled()
        replayed["learning"] += 1
        return module.run(*inputs, *[None] * (2 - len(inputs)), module.positions)

    return replay


def pretend_forward(module, tensors):
    places, output = [x.detach().clone() for x in tensors], module(*tensors).detach().clone()

    def replay():
        assert not module.operation.training and not torch.is_grad_enabled()
        replayed["scoring"] += 1
        output.copy_(module(*places))

    return replay, places, output


replayed = {}


def test_operations_with_graphs_search_as_those_without(small_config, monkeypatch):
    """With the capture itself pretended: graphs are replayed in training with full memories, and to score paths."""
    replayed.update(learning=0, scoring=0)
    monkeypatch.setattr(compile, "graph_both_passes", pretend_both_passes)
    monkeypatch.setattr(compile, "capture", pretend_forward)
    options = ["model.dropout=0", "search.warmup_steps=0", "train.memory=12", "train.steps=30"]
    plain, phase = make_search(small_config(*options)), make_search(small_config(*options))
    graph_operations(phase.supernet.backbone, phase.config, phase.context, rows=4)
    assert torch.equal(torch.stack(losses(phase, 30)), torch.stack(losses(plain, 30)))
    assert torch.equal(phase.supernet.logits, plain.supernet.logits)
    blocks_that_run = 24 * 3 * 2 / 3  # of 24 steps of the weights, where identity is one of three
    assert 0.5 * blocks_that_run < replayed["learning"] < blocks_that_run and replayed["scoring"] > 10
    before = dict(replayed)
    assert phase.evaluate(None, 0)["nll"] == plain.evaluate(None, 0)["nll"] and replayed == before
    assert phase.supernet.state_dict().keys() == plain.supernet.state_dict().keys()


def test_operations_that_cannot_be_captured_run_as_they_are(small_config, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(compile, "graph_both_passes", pretend_both_passes)
    monkeypatch.setattr(compile, "capture", fail)
    phase, plain = (make_search(small_config("model.dropout=0")) for _ in range(2))
    graph_operations(phase.supernet.backbone, phase.config, phase.context, rows=4)
    assert all(module.training for module in phase.supernet.modules())
    assert torch.equal(torch.stack(losses(phase, 6)), torch.stack(losses(plain, 6)))
    assert "NOTICE: no CUDA graphs of operations: RuntimeError: CUDA error" in capsys.readouterr().out


def test_large_vocabularies_are_not_captured_where_tails_are_picked(small_config):
    model = make_retraining(small_config("model.cutoffs=[5,20]"), ["dense"]).model
    words = model.head.cluster_bounds[-1]
    assert has_fixed_shapes(model, softmax.STATIC_LOGITS // words)
    assert not has_fixed_shapes(model, softmax.STATIC_LOGITS // words + 1)
    assert has_fixed_shapes(make_retraining(small_config(), ["dense"]).model, 10**9)


def test_a_sample_of_before_is_forgotten(small_config):
    """Else the node that adds up its gradient lives on, on the stream of the GPU where it was made."""
    phase, nodes = make_search(small_config("search.sampling=soft", "search.split=shared", "search.warmup_steps=0")), []
    for step in (1, 2, 3):
        phase.step(step)
        row = phase.supernet.backbone.blocks[0].choice[1]
        node = row.grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, step=step: nodes.append(step))
        del row, node
    assert nodes == []  # a node that lived on would have called in the next step


def test_what_depends_on_the_place_is_not_captured(small_config):
    for operation, same in (("attention", True), ("sparse_strided", False), ("sparse_fixed", False)):
        assert is_same_everywhere(make_retraining(small_config(), [operation, "dense"]).model) == same


def test_the_optimizer_for_gpus_steps_as_the_one_for_cpus(small_config):
    """Clipping by the fused kernel's own scale; and an update that is not finite is left out."""
    config = small_config("train.clip=0.05")
    models = [make_retraining(config, ["attention", "dense"]).model for _ in range(2)]
    optimizers = [WeightsOptimizer(model, config.train, 20, on_gpu) for model, on_gpu in zip(models, (False, True))]
    for step in range(1, 21):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * (1e-4 if step % 2 else 1.0)
            optimizer.set_lr(step)
            assert optimizer.apply() == 0.0
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    before = [parameter.clone() for parameter in models[1].parameters()]
    models[1].embedding.weight.grad[0, 0] = float("nan")
    assert torch.isnan(optimizers[1].apply())
    assert all(torch.equal(a, b) for a, b in zip(before, models[1].parameters(), strict=True))
    optimizers[0].load_state_dict(optimizers[1].state_dict())  # what a GPU saved goes on on a CPU, and back
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[0].lr == optimizers[1].lr and isinstance(
        optimizers[0].state_dict()["param_groups"][0]["lr"], float
    )
    assert isinstance(optimizers[1].adam.param_groups[0]["lr"], torch.Tensor)


def test_parts_of_a_batch_have_its_gradients(small_config):
    config = small_config("model.dropout=0", "train.grad_accum_steps=2")
    found = []
    for grad_accum_steps in (1, 2):
        config.train.grad_accum_steps = grad_accum_steps
        phase = make_retraining(config, ["attention", "dense"])
        for _ in range(3):  # with memories, then
            nll, phase.stream.memories = run_batch(
                phase.model, phase.stream.next(), config, device_context(config.train)
            )
        phase.model.zero_grad()
        batch = phase.stream.next()
        nll, memories = run_batch(phase.model, batch, config, device_context(config.train), torch.Tensor.backward)
        found.append([nll, *memories.blocks[:1], *(p.grad for p in phase.model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
