"""Small cases of step_costs.py, measured on this machine's CPU: `python experiments/bench/scaling_check.py`.

Regime: 6 blocks of width 64 (FLOPs, saved bytes), 64 to 512 (peak memory) and 128 (network), random words, one thread.

- FLOPs: one forward and backward pass under PyTorch's counter, against three forward passes.
- saved: what autograd saves, each storage once, and the blocks' inputs that become the next memories; bf16 by autocast.
- peak: growth of the process's highest resident memory, over rows (activations and memories) and over the width
  (weights, gradients, moments). Temporary values of the backward pass are not predicted.
- sent: growth of the loopback's counter between runs of 15 and 45 steps under torchrun, for each step and rank.

The loopback may carry other traffic as well. A network namespace of its own prevents that:
`unshare -rn sh -c 'ip link set lo up; python experiments/bench/scaling_check.py'`. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from scaling import format_table  # noqa: E402
from step_costs import BF16, FP32, MODES, StepCosts  # noqa: E402

SMALL = {"blocks": 6, "d_model": 64, "heads": 4, "d_ffn": 256}


def small_config(memory: int = 32, rows: int = 4, **sizes):
    from nas.core.config import Config, ModelOptions, TrainOptions
    from nas.core.config_loading import resolve_defaults

    config = Config(model=ModelOptions(**{"cutoffs": [300, 1000], **SMALL, **sizes}))
    config.train = TrainOptions(
        batch_size=rows, segment=32, memory=memory, optimizer="adamw", short_share=0.0, device="cpu"
    )
    config.search.paths = 4
    config.search.latency.timing = "training"
    resolve_defaults(config)
    return config


class SmallStep:
    """Steps that train the weights on random words, with full memories, on the CPU."""

    def __init__(self, mode: str, config, value: int = FP32, vocab_size: int = 3000):
        import torch

        from nas.core.pattern import interleaved
        from nas.search.supernet import build_supernet
        from nas.training.build import build_fixed
        from nas.training.optimizer import WeightsOptimizer

        torch.manual_seed(0)
        corpus, train = SimpleNamespace(vocab_size=vocab_size), config.train
        self.memory = train.memory
        tokens = torch.randint(vocab_size, (train.batch_size, train.segment + 1))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        counts = torch.bincount(self.targets.flatten(), minlength=vocab_size).numpy()
        self.costs = StepCosts(config, counts, value)
        if mode == "retrain":
            self.model = build_fixed(interleaved(config.model.blocks), config, corpus.vocab_size)
            self.weights = self.model
        else:
            self.model = build_supernet(config, corpus)
            self.weights = self.model.backbone
        if mode == "soft":
            self.model.set_mixture(self.model.pi().requires_grad_())
        elif mode == "hard":
            self.set_balanced_path(0)
        self.optimizer = WeightsOptimizer(self.weights, train, 1)
        with torch.no_grad():
            _, self.memories = self.model(self.inputs, self.targets, None, self.memory)

    def set_balanced_path(self, shift: int) -> None:
        """One of three paths that contain each operation equally often. In each block the three paths differ."""
        names, blocks = self.model.operations, len(self.model.backbone.blocks)
        self.model.set_path([(block + shift) % len(names) for block in range(blocks)])

    def forward(self):
        """The mean nll. Stores the next memories as `next_memories`."""
        nll, self.next_memories = self.model(self.inputs, self.targets, self.memories, self.memory)
        return nll.mean()

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.set_lr(1)
        self.optimizer.step()
        self.memories, self.next_memories = self.next_memories, None


def count_step_flops(mode: str) -> tuple[float, float]:
    """(predicted, counted) FLOPs per token of a forward and backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    step = SmallStep(mode, small_config())
    with FlopCounterMode(display=False) as counter:
        step.forward().backward()
    return 3 * step.costs.forward_flops(mode), counter.get_total_flops() / step.inputs.numel()


def count_saved(mode: str, value: int = FP32, dropout: float = 0.0) -> tuple[float, float]:
    """(predicted, counted) bytes that a forward pass saves; value: bytes of a product's result."""
    import torch

    config = small_config(dropout=dropout)
    step, saved = SmallStep(mode, config, value), {}

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # a reference, so no address is reused
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=value == BF16, cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), autocast:
        step.forward()
    for memory in step.next_memories.blocks:
        if memory is not None:
            save(memory)
    for parameter in step.model.parameters():
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    return step.costs.activations(mode, config.train.batch_size), sum(map(len, saved.values()))


# --- peak memory


def measure_peak(mode: str, rows: int, d_model: int) -> dict:
    """Predicted and measured bytes at the peak of a step, in this process."""
    from nas.costs.benchmark import peak_memory_mb

    step = SmallStep(mode, small_config(rows=rows, d_model=d_model, d_ffn=4 * d_model, cutoffs=[]))
    for shift in range(3):  # allocates the moments
        if mode == "hard":
            step.set_balanced_path(shift)
        step.update()
    step.optimizer.zero_grad()
    predicted = step.costs.memory(mode, rows, ranks=1)
    return {"predicted": predicted, "measured": 1024**2 * peak_memory_mb(step.update)}


def peak_in_subprocess(mode: str, size: tuple[int, int]) -> dict:
    """measure_peak() in a process whose C library returns freed memory at once, so that only used memory counts."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, "--peak-memory", mode, *map(str, size)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def peak_growth(mode: str, kinds: tuple[str, ...], small: tuple[int, int], large: tuple[int, int]):
    """(predicted, measured) growth of the peak between two (rows, width); kinds: the kinds of memory that grow."""
    first, second = (peak_in_subprocess(mode, size) for size in (small, large))
    predicted = sum(second["predicted"][kind] - first["predicted"][kind] for kind in kinds)
    return predicted, second["measured"] - first["measured"]


# --- network


def loopback_bytes() -> int:
    """Bytes sent over the loopback since the machine started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def write_inputs(folder: Path) -> None:
    """A random text, a configuration and a pattern."""
    import yaml

    from nas.core.pattern import interleaved

    source = np.random.default_rng(0)
    for split, lines in {"train": 2000, "valid": 20, "test": 20}.items():
        words = source.integers(2000, size=(lines, 10))
        (folder / f"{split}.txt").write_text("\n".join(" ".join(f"w{word}" for word in line) for line in words) + "\n")
    rarely = {"log_every": 10**6, "evaluate_every": 0, "checkpoint_every": 10**6}
    config = {
        "data": {"source": str(folder), "tokenizer": "words", "cache": str(folder / "cache")},
        "model": SMALL | {"d_model": 128, "d_ffn": 512, "cutoffs": [300, 1000]},
        "train": {"batch_size": 4, "segment": 16, "memory": 16, "threads": 1, "device": "cpu"} | rarely,
        "search": {"schedule": "joint", "estimator": "leave_one_out", "paths": 4, "warmup_steps": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    pattern = {"format": "par-pattern/1", "blocks": interleaved(SMALL["blocks"])}
    (folder / "pattern.yaml").write_text(yaml.safe_dump(pattern))


COMMANDS = {
    "retrain": ["retrain.py", "pattern.yaml", "config.yaml"],
    "soft": ["search.py", "config.yaml", "search.sampling=soft", "search.split=shared"],
    "hard": ["search.py", "config.yaml", "search.optimizer.lr=1e-12"],  # pi stays uniform
}


def bytes_of_run(mode: str, ranks: int, steps: int, folder: Path) -> int:
    """Bytes over the loopback during a run."""
    script, *arguments = COMMANDS[mode]
    arguments = [str(folder / argument) if argument.endswith(".yaml") else argument for argument in arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
    run = folder / f"{mode}-{ranks}-{steps}"
    before = loopback_bytes()
    command = [*launcher, str(ROOT / script), *arguments, "--run", str(run), f"train.steps={steps}"]
    subprocess.run(command, check=True, capture_output=True)
    return loopback_bytes() - before


def measure_sent(mode: str, ranks: int, folder: Path) -> tuple[float, float]:
    """(predicted, measured) bytes that each rank sends in a step. The difference of two runs excludes the start."""
    from nas.core.config_loading import load_config
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare

    config = load_config(folder / "config.yaml", [])
    costs = StepCosts(config, Corpus(prepare(config.data)).counts(), FP32)
    short, long = (bytes_of_run(mode, ranks, steps, folder) for steps in (15, 45))
    return costs.sent(mode, ranks), (long - short) / 30 / ranks


# --- the command


def check_all() -> list[dict]:
    results = []

    def add(what: str, unit: str, predicted: float, measured: float) -> None:
        figures = {"predicted": predicted, "measured": measured, "ratio": measured / predicted}
        results.append({"what": what, "unit": unit, **figures})
        print(f"{what}: {predicted:,.0f} predicted, {measured:,.0f} {unit} measured", file=sys.stderr, flush=True)

    state = ("weights", "gradients", "moments")
    for mode in MODES:
        add(f"FLOPs, {mode}", "FLOPs per token", *count_step_flops(mode))
        for value, name in ((FP32, "fp32"), (BF16, "bf16")):
            add(f"saved, {mode}, {name}", "bytes", *count_saved(mode, value))
        rows = peak_growth(mode, ("activations", "memories"), (64, 64), (256, 64))
        add(f"peak, {mode}, 64 to 256 rows", "bytes", *rows)
        add(f"peak, {mode}, width 256 to 512", "bytes", *peak_growth(mode, state, (1, 256), (1, 512)))
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        for mode in MODES:
            for ranks in (2, 4):
                add(f"sent, {mode}, {ranks} ranks", "bytes a step", *measure_sent(mode, ranks, Path(folder)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak-memory", nargs=3, metavar=("MODE", "ROWS", "WIDTH"), help="measure only this peak")
    options = parser.parse_args()
    if options.peak_memory:
        mode, rows, width = options.peak_memory
        print(json.dumps(measure_peak(mode, int(rows), int(width))))
        return
    results = check_all()
    rows = [
        [row["what"], f"{row['predicted']:,.0f}", f"{row['measured']:,.0f}", f"{row['ratio']:.3f}", row["unit"]]
        for row in results
    ]
    print(format_table("predicted and measured", ["", "predicted", "measured", "ratio", ""], rows))
    print(json.dumps(results))


if __name__ == "__main__":
    from nas.core.errors import run_command

    run_command(main)
