"""Compiled operations, the optimizer for GPUs and gradient accumulation, as far as a CPU can show them.

experiments/bench/README.md lists what only a GPU can show.
"""

import pytest
import torch

from nas.training import compile
from nas.training.optimizer import WeightsOptimizer
from nas.training.train_step import BatchRunner
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
            assert optimizer.step().isfinite()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    before = [parameter.clone() for parameter in models[1].parameters()]
    for model, optimizer in zip(models, optimizers, strict=True):
        model.embedding.weight.grad[0, 0] = float("nan")
        assert torch.isnan(optimizer.step())
        for a, b in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, models[1].parameters(), strict=True))
    optimizers[0].load_state_dict(optimizers[1].state_dict())  # a CPU continues what a GPU saved, and back
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[0].lr == optimizers[1].lr


def test_parts_of_a_batch_have_its_gradients(small_config):
    results = []
    for grad_accum_steps in (1, 2):
        config = small_config("model.dropout=0", f"train.grad_accum_steps={grad_accum_steps}")
        phase = make_retraining(config, ["attention", "dense"])
        run = BatchRunner(phase.model, config.train, phase.context)
        for _ in range(3):  # so that the memories are full
            _, phase.stream.memories = run(phase.stream.next())
        nll, memories = run(phase.stream.next(), torch.Tensor.backward)
        results.append([nll, *memories.blocks[:1], *(p.grad for p in phase.model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
