"""Compiled operations, the optimizer for GPUs and gradient accumulation, tested on a CPU.

experiments/bench/README.md lists the checks that need a GPU.
"""

import contextlib
import dataclasses

import pytest
import torch

from models.operations.registry import OPERATIONS
from nas.training import device
from nas.training.train_step import Batch, BatchRunner, ReplayedStep, TrainStep
from tests.making import make_retraining, make_search


def losses(phase, steps=12):
    return [nll for nll in (phase.step(step)[0] for step in range(1, steps + 1)) if nll is not None]


@pytest.fixture
def traced(monkeypatch):
    """Use only the front end of torch.compile, because it needs no C++ compiler."""
    monkeypatch.setattr(device, "BACKEND", "aot_eager")
    torch._dynamo.reset()


ALL = f"search.operations=[{','.join(OPERATIONS)},dense 4x]"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[ALL], ["search.method=gumbel", "search.split=shared"]], ids=["weights", "soft"])
def test_a_search_has_the_same_losses_with_compiled_operations(options, small_config, traced, capsys):
    """Each kind of operation is compiled once for all blocks and paths, and once more for passes without gradients."""
    options = [*options, "model.dropout=0"]
    plain = losses(make_search(small_config(*options)))
    torch._dynamo.utils.counters.clear()
    found = losses(make_search(small_config(*options, "train.compile=always")))
    torch.testing.assert_close(torch.stack(found), torch.stack(plain), rtol=1e-5, atol=1e-6)
    kinds = len(OPERATIONS) if ALL in options else 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3 * kinds
    assert "compiled Attention, Dense" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [["attention", "dense"], ["linear", "linear"]], ids=str)
def test_steps_with_cut_segments_are_compiled_too(blocks, small_config, traced):
    options = ["model.dropout=0", "train.steps=12", "train.short_share=0.5"]
    plain = losses(make_retraining(small_config(*options), blocks))
    torch._dynamo.utils.counters.clear()
    phase = make_retraining(small_config(*options, "train.compile=always"), blocks)
    begun, kinds = torch._dynamo.utils.counters["stats"]["unique_graphs"], len(set(blocks))  # of whole segments
    graphs, found = [], []
    for step in range(1, 13):
        found.append(phase.step(step)[0])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.testing.assert_close(torch.stack(found), torch.stack(plain), rtol=1e-5, atol=1e-6)
    assert begun >= 2 * kinds  # with gradients and without
    assert graphs[:6] == [begun + kinds] * 6  # each kind at the first of the steps with cut segments
    assert graphs[-1] <= begun + 2 * kinds


def test_an_operation_that_does_not_compile_runs_uncompiled(small_config, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no compiler here\nand many lines more")

    plain = losses(make_retraining(small_config(), ["attention", "dense"]))
    monkeypatch.setattr(device, "try_operation", fail)
    found = losses(make_retraining(small_config("train.compile=always"), ["attention", "dense"]))
    assert torch.equal(torch.stack(found), torch.stack(plain))
    assert "NOTICE: train.compile is off: RuntimeError: no compiler here\n" in capsys.readouterr().out


def test_gradient_accumulation_does_not_change_gradients(small_config):
    results = []
    for grad_accum_steps in (1, 2):
        config = small_config("model.dropout=0", f"train.grad_accum_steps={grad_accum_steps}")
        phase = make_retraining(config, ["attention", "dense"])
        run = BatchRunner(phase.model, config.train, phase.runtime)
        for _ in range(3):  # so that the memories are full
            _, phase.stream.memories = run(phase.stream.next())
        nll, memories = run(phase.stream.next(), torch.Tensor.backward)
        results.append([nll, *memories.blocks[:1], *(p.grad for p in phase.model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_skipped_update_on_a_gpu_makes_the_nll_nan(small_config):
    """The step of a GPU, run on the CPU: the weights stay, and the trainer learns of it from the nll."""
    config = small_config()
    phase = make_retraining(config, ["attention", "dense"])
    runtime = dataclasses.replace(phase.runtime)
    object.__setattr__(runtime, "device", FakeGPU())
    train = TrainStep(phase.model, config.train, 10, runtime)
    nll, _ = train(1, phase.stream.next())
    assert nll.isfinite()
    before = phase.model.embedding.weight.clone()
    phase.model.embedding.weight.register_hook(lambda gradient: gradient * float("inf"))
    nll, _ = train(2, phase.stream.next())
    assert nll.isnan() and torch.equal(before, phase.model.embedding.weight)


class FakeGPU:
    """The type of a GPU, without one."""

    type = "cuda"


class ImitatedGraph:
    """What a CUDA graph does: it runs the step on the same tensors again, and writes its results over the last ones."""

    def __init__(self, step, inputs):
        self.step, self.inputs, self.nll = step, inputs, torch.zeros(())

    def replay(self):
        nll, memories = self.step(self.inputs)
        self.nll.copy_(nll)
        for own, new in zip(self.inputs.tensors()[2:], memories.tensors() if memories else (), strict=False):
            own.copy_(new)


@pytest.mark.parametrize(
    ("first", "options", "graphs"),
    [
        ("attention", ["train.memory=12"], 1),
        ("window 4", ["model.ngram_rows=[13]"], 1),
        ("attention", ["train.short_share=0.5"], 2),
        ("sparse_fixed 8", [], 1),
        ("sparse_fixed 16", [], 0),  # segments of 8 tokens begin in another column than their predecessors
    ],
    ids=str,
)
def test_replayed_steps_have_the_losses_of_steps(first, options, graphs, small_config, monkeypatch):
    """The memories are empty at first, and fill."""
    blocks, steps = [first, "dense", "linear"], 40
    options = [f"train.steps={steps}", "model.dropout=0", "train.segment=8", "train.batch_size=32", *options]
    expected, captured = losses(make_retraining(small_config(*options), blocks), steps), []

    def capture(self, batch):
        memories = batch.memories and batch.memories.map(torch.clone)
        captured.append(ImitatedGraph(self.step, Batch(batch.tokens.clone(), batch.targets.clone(), None, memories)))
        return captured[-1], captured[-1].inputs, captured[-1].nll

    monkeypatch.setattr(ReplayedStep, "capture", capture)
    phase = make_retraining(small_config(*options), blocks)
    phase.train_weights.replayed.possible = True
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    assert losses(phase, steps) == expected
    assert len(captured) == graphs
