"""What operations and patterns cost: floating-point operations, and milliseconds measured on this device.

`python -m nas.latency CONFIG.yaml` prints the table that a search with search.latency.source=measured uses.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.operations import OPERATIONS
from models.softmax import AdaptiveSoftmax
from models.transformer_xl import TransformerXL, build_pattern
from nas.assembly import backbone_options, evaluation_lengths, model_sizes, settle_cutoffs
from nas.config import Config, load_config
from nas.costs import FLOPS, MILLISECONDS, CostTable, read_costs
from nas.cutoffs import cluster_table
from nas.data import Corpus
from nas.device import machine_of, set_up
from nas.errors import InputError, run_command
from nas.pattern import SPARSE, interleaved
from nas.prepare import prepare
from nas.record import processor
from nas.timing import timed_rounds
from nas.trainer import WeightsOptimizer

ROUNDS, SECONDS = 20, 3.0  # at least so many rounds, and for so long
MIXTURES = 6  # models of mixed operations to which costs are fitted, beside those of one


def costed_shape(config: Config) -> tuple[int, int, int]:
    """(batch, segment, memory) at which costs are counted and timed: evaluation's, or training's."""
    if config.search.latency.timing == "training":
        return config.train.batch_size, config.train.segment, config.train.memory
    return config.evaluate.batch_size, *evaluation_lengths(config)


# What tables from before a size was an option were measured with.
SIZES_BEFORE = {"relative": True, "grid": [], "recompute": False}


def sizes_of(config: Config, vocab_size: int, operations: list[str]) -> dict:
    """The sizes that costs of some operations depend on."""
    batch, segment, memory = costed_shape(config)
    model = asdict(model_sizes(config)) | backbone_options(config, vocab_size)
    unused = ["deep"]
    if config.search.latency.timing == "inference":
        unused += ["dropout", "recompute"]
    if not set(SPARSE) & set(operations):
        unused += ["stride", "summary", "factorization"]
    model = {key: value for key, value in model.items() if key not in unused}
    return {"batch_size": batch, "segment": segment, "memory": memory, "vocab_size": vocab_size, **model}


def conditions(config: Config, vocab_size: int, operations: list[str]) -> dict:
    """All that measured costs of some operations depend on: what is timed, this device, and the sizes."""
    machine = machine_of(config.train)
    return {
        "timing": config.search.latency.timing,
        "processor": machine.name if machine.is_gpu else processor(),
        "threads": machine.threads,
        "precision": "float32" if machine.precision == "fp32" else machine.precision,
        "torch": str(torch.__version__),
        **sizes_of(config, vocab_size, operations),
    }


def count_flops(config: Config, counts: np.ndarray) -> CostTable:
    """FLOPs per token of a forward pass. They follow from the sizes and are the same on every machine; a multiply-add
    counts as two. counts [V]: how often the training text has each token, for an adaptive output layer."""
    sizes = model_sizes(config)
    with torch.device("meta"):  # its shapes alone are needed
        head = build_pattern([], sizes, len(counts), **backbone_options(config, len(counts))).head
    shares = [share for _, share in cluster_table(counts, config.model.cutoffs)]
    rest = head.flops(shares) if isinstance(head, AdaptiveSoftmax) else head.flops()
    blocks = {name: float(cls.flops(sizes, *costed_shape(config))) for name, cls in OPERATIONS.items()}
    return CostTable(FLOPS, float(rest), blocks, sizes_of(config, len(counts), list(OPERATIONS)))


class SegmentWork:
    """One segment through a model whose memories are full: a forward pass, or a training step; operations run as they
    are, neither compiled nor replayed by CUDA graphs.

    tokens [B, L + 1]. Called again and again, with the same tokens and memories; returns when the device has finished.
    """

    def __init__(self, model: TransformerXL, tokens: Tensor, config: Config):
        self.machine = machine_of(config.train)
        self.model, self.memory_length = model.to(self.machine.device), costed_shape(config)[2]
        tokens = tokens.to(self.machine.device)
        self.inputs = tokens[:, :-1], tokens[:, 1:]
        self.optimizer = None
        if config.search.latency.timing == "training":
            self.optimizer = WeightsOptimizer(model, config.train, total_steps=1, on_gpu=self.machine.is_gpu)
            self.optimizer.set_lr(step=1)
        self.memories = None
        self.model.eval()
        for _ in range(-(-self.memory_length // self.inputs[0].shape[1])):
            with torch.no_grad():
                _, self.memories = self.forward()

    def forward(self):
        with self.machine.autocast():
            return self.model(*self.inputs, self.memories, self.memory_length)

    def __call__(self) -> None:
        self.model.train(self.optimizer is not None)
        if self.optimizer is None:
            with torch.no_grad():
                self.forward()
        else:
            self.optimizer.clear()
            nll, _ = self.forward()
            nll.mean().backward()
            self.optimizer.apply()
        self.machine.synchronise()


def segment_works(models: list[tuple[list[str], Config]], counts: np.ndarray) -> dict[int, SegmentWork]:
    """For each pattern under its configuration a model with fresh weights, at work. Configurations differ in their
    model's sizes alone."""
    shared = models[0][1]
    batch, segment, _ = costed_shape(shared)
    # An adaptive output layer costs what its tokens cost, so they are as frequent as in the training text.
    frequencies, generator = torch.from_numpy(counts).double(), torch.Generator().manual_seed(0)
    tokens = frequencies.multinomial(batch * (segment + 1), replacement=True, generator=generator).view(batch, -1)
    options = backbone_options(shared, len(counts))
    built = [build_pattern(pattern, model_sizes(config), len(counts), **options) for pattern, config in models]
    return {index: SegmentWork(model, tokens, shared) for index, model in enumerate(built)}


def segment_times(models: list[tuple[list[str], Config]], counts: np.ndarray, rounds: int) -> list[np.ndarray]:
    """Seconds of each pattern in each round [R]. What is trained afterwards does not change by it: neither weights nor
    dropout, of which a timed training step draws too."""
    with machine_of(models[0][1].train).own_random_numbers():
        return list(timed_rounds(segment_works(models, counts), rounds, SECONDS).values())


def fitted_patterns(operations: list[str], blocks: int) -> list[list[str]]:
    """The models to which costs are fitted: without blocks, of each operation alone, and mixtures in which all have as
    equal shares as the blocks allow; what is over falls to other operations in each."""
    source = np.random.default_rng(0)
    shares = [np.resize(source.permutation(operations), blocks) for _ in range(MIXTURES)]
    mixtures = [source.permutation(share).tolist() for share in shares]
    return [[], *([name] * blocks for name in operations), *mixtures]


def measure_costs(config: Config, counts: np.ndarray) -> CostTable:
    """Milliseconds of each operation in a block, and of the rest, for a segment with full memories.

    Timed in rounds are whole models of config.model.blocks blocks (fitted_patterns), so that an operation is measured
    where it will run, with the memory traffic of a model around it: among others of its kind an operation finds other
    things in the caches than in a mixture, by some percent, and timed by itself it would find still others. Each round
    gives costs whose sums fit its times best (least squares of relative errors); of these, median and quartiles.
    """
    names = list(dict.fromkeys([*config.search.operations, *interleaved(2)]))
    patterns = fitted_patterns(names, config.model.blocks)
    (batch, segment, memory), timing = costed_shape(config), config.search.latency.timing
    print(
        f"measuring {', '.join(names)} ({timing}, {batch} x {segment} tokens with {memory} of memory): {len(patterns)} "
        f"models of {config.model.blocks} blocks, each {ROUNDS} times or more",
        flush=True,
    )
    times = np.array(segment_times([(pattern, config) for pattern in patterns], counts, ROUNDS))  # [P, R]
    parts = np.array([[1, *(pattern.count(name) for name in names)] for pattern in patterns])
    fits = [np.linalg.lstsq(parts / taken[:, None], np.ones(len(parts)), rcond=None)[0] for taken in 1e3 * times.T]
    low, middle, high = np.maximum(0.0, np.quantile(fits, [0.25, 0.5, 0.75], axis=0))
    rest, *blocks = map(float, middle)
    quartiles = {name: [float(a), float(b)] for name, a, b in zip(["rest", *names], low, high, strict=True)}
    blocks = dict(zip(names, blocks, strict=True))
    return CostTable(MILLISECONDS, rest, blocks, conditions(config, len(counts), names), quartiles)


def measure_models(models: list[tuple[list[str], Config]], counts: np.ndarray, rounds: int = ROUNDS) -> list[dict]:
    """Milliseconds of whole models, patterns under configurations that differ in their model's sizes alone, for a
    segment with full memories, in rounds: median and quartiles for each, and its ratio to the first, which is the
    interleaved pattern."""
    times = segment_times(models, counts, rounds)
    usual = np.median(times[0])
    return [
        {
            "median_ms": float(1e3 * np.median(taken)),
            "quartiles_ms": [float(1e3 * q) for q in np.quantile(taken, [0.25, 0.75])],
            "ratio_to_interleaved": float(np.median(taken) / usual),
        }
        for taken in times
    ]


def changes(before: dict, now: dict) -> str:
    """What differs between the conditions under which costs were measured and those of now; empty where nothing."""
    before = SIZES_BEFORE | before
    return ", ".join(f"{key} {before.get(key)}" for key in now if before.get(key) != now[key])


def current_costs(config: Config, counts: np.ndarray, kept: Path) -> CostTable:
    """The table that a run folder keeps where it holds for these sizes on this device; else one measured now."""
    if kept.exists():
        table = read_costs(kept, config.search.operations)
        was = changes(table.holds_for, conditions(config, len(counts), config.search.operations))
        if not was:
            return table
        print(f"NOTICE: {kept} was measured with {was}; that is no longer so, and latencies are measured anew")
    return measure_costs(config, counts)


def measure_beside(pattern: list[str], config: Config, counts: np.ndarray, predicted: dict) -> dict:
    """A pattern's measured latency as files hold it, beside what was predicted; predicted: as CostTable.predict, or
    empty."""
    _, measured = measure_models([(interleaved(len(pattern)), config), (pattern, config)], counts)
    batch, segment, memory = costed_shape(config)
    return {
        **measured,
        **predicted,
        "timing": config.search.latency.timing,
        "batch_size": batch,
        "segment": segment,
        "memory": memory,
        "threads": torch.get_num_threads(),
    }


class RunLatency:
    """The latencies of a search: its table where that holds on this device, else one measured now; and patterns,
    measured beside their prediction."""

    def __init__(self, run: Path):
        kept = run / "latency.yaml"
        self.config, self.counts = load_config(run / "config.yaml", []), None
        self.known: dict[tuple[str, ...], dict] = {}
        set_up(self.config.seed, self.config.train)
        try:
            self.counts = Corpus(prepare(self.config.data)).counts()
            self.table = current_costs(self.config, self.counts, kept)
        except InputError as error:
            print(f"NOTICE: latencies are those of {kept} and are not measured again: {error}")
            self.table = read_costs(kept, self.config.search.operations)

    def of(self, pattern: list[str]) -> dict:
        """What a pattern file holds: predicted and measured latency, and the conditions under which both hold."""
        key = tuple(pattern)
        if key not in self.known:
            about = self.table.predict(pattern)
            if self.counts is not None:
                about = measure_beside(pattern, self.config, self.counts, about)
            self.known[key] = about | {"holds_for": self.table.holds_for}
        return dict(self.known[key])


def prediction(pattern_file: dict, config: Config, vocab_size: int) -> dict:
    """What a pattern file predicts under the conditions of now; empty where it predicts nothing, or says that it holds
    under others only."""
    latency = pattern_file.get("latency") or {}
    if "predicted_ms" not in latency:
        return {}
    was = changes(latency.get("holds_for") or {}, conditions(config, vocab_size, pattern_file["blocks"]))
    if was:
        print(f"NOTICE: the pattern's latency was predicted for {was}; that is not so here, and is not compared")
        return {}
    return {key: latency[key] for key in ("predicted_ms", "predicted_ratio_to_interleaved")}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nas.latency", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", metavar="FILE.yaml", type=Path, help="also write it, such as RUN_DIR/latency.yaml")
    arguments = parser.parse_intermixed_args()
    if arguments.out and arguments.out.exists():
        raise InputError(f"--out {arguments.out} exists; name another file, or remove it")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config, arguments.overrides)
    machine = set_up(config.seed, config.train)
    corpus = Corpus(prepare(config.data))
    settle_cutoffs(config, corpus)
    table = measure_costs(config, corpus.counts())
    where = machine.name if machine.is_gpu else f"{machine.threads} threads, {processor()}"
    print(f"d_model {config.model.d_model}, {where}")
    print(table.text(config.model.blocks))
    if arguments.out:
        table.write(arguments.out)
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    run_command(main)
