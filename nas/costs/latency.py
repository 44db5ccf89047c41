"""nas.costs.latency."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.transformer_xl import TransformerXL, build_pattern
from nas.core.config import Config
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.pattern import interleaved
from nas.core.provenance import processor
from nas.costs.benchmark import timed_rounds
from nas.costs.flops import SIZES_BEFORE, costed_shape, sizes_of
from nas.costs.table import MILLISECONDS, CostTable, read_costs
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.training.build import backbone_options, block_config
from nas.training.device import device_context, set_up_device
from nas.training.optimizer import WeightsOptimizer

ROUNDS, SECONDS = 20, 3.0  # at least so many rounds, and for so long


MIXTURES = 6  # models of mixed operations to which costs are fitted, beside those of one


def conditions(config: Config, vocab_size: int, operations: list[str]) -> dict:
    """All that measured costs of some operations depend on: what is timed, this device, and the sizes."""
    context = device_context(config.train)
    return {
        "timing": config.search.latency.timing,
        "processor": context.name if context.is_gpu else processor(),
        "threads": context.threads,
        "precision": "float32" if context.precision == "fp32" else context.precision,
        "torch": str(torch.__version__),
        **sizes_of(config, vocab_size, operations),
    }


class SegmentWork:
    """One segment through a model whose memories are full: a forward pass, or a training step; operations run as they
    are, neither compiled nor replayed by CUDA graphs.

    tokens [B, L + 1]. Called again and again, with the same tokens and memories; returns when the device has finished.
    """

    def __init__(self, model: TransformerXL, tokens: Tensor, config: Config):
        self.context = device_context(config.train)
        self.model, self.memory_length = model.to(self.context.device), costed_shape(config)[2]
        tokens = tokens.to(self.context.device)
        self.inputs = tokens[:, :-1], tokens[:, 1:]
        self.optimizer = None
        if config.search.latency.timing == "training":
            self.optimizer = WeightsOptimizer(model, config.train, total_steps=1, on_gpu=self.context.is_gpu)
            self.optimizer.set_lr(step=1)
        self.memories = None
        self.model.eval()
        for _ in range(-(-self.memory_length // self.inputs[0].shape[1])):
            with torch.no_grad():
                _, self.memories = self.forward()

    def forward(self):
        with self.context.autocast():
            return self.model(*self.inputs, self.memories, self.memory_length)

    def __call__(self) -> None:
        self.model.train(self.optimizer is not None)
        if self.optimizer is None:
            with torch.no_grad():
                self.forward()
        else:
            self.optimizer.zero_grad()
            nll, _ = self.forward()
            nll.mean().backward()
            self.optimizer.step()
        self.context.synchronize()


def segment_works(models: list[tuple[list[str], Config]], counts: np.ndarray) -> dict[int, SegmentWork]:
    """For each pattern under its configuration a model with fresh weights, at work. Configurations differ in their
    model's sizes alone."""
    shared = models[0][1]
    batch, segment, _ = costed_shape(shared)
    # An adaptive output layer costs what its tokens cost, so they are as frequent as in the training text.
    frequencies, generator = torch.from_numpy(counts).double(), torch.Generator().manual_seed(0)
    tokens = frequencies.multinomial(batch * (segment + 1), replacement=True, generator=generator).view(batch, -1)
    options = backbone_options(shared, len(counts))
    built = [build_pattern(pattern, block_config(config), len(counts), **options) for pattern, config in models]
    return {index: SegmentWork(model, tokens, shared) for index, model in enumerate(built)}


def segment_times(models: list[tuple[list[str], Config]], counts: np.ndarray, rounds: int) -> list[np.ndarray]:
    """Seconds of each pattern in each round [R]. What is trained afterwards does not change by it: neither weights nor
    dropout, of which a timed training step draws too."""
    with device_context(models[0][1].train).fork_rng():
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
    quartiles = {name: [float(a), float(b)] for name, a, b in zip(["overhead", *names], low, high, strict=True)}
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
        set_up_device(self.config.seed, self.config.train)
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
