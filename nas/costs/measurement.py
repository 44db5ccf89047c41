"""Latency of operations and patterns, measured on this device, and its conditions."""

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from models.graph import export_graph, open_graph
from models.stream import Decoder, StreamModel
from models.transformer_xl import TransformerXL
from nas.core.config import NETWORK, STEP_COSTS, Config, flatten, marked
from nas.core.errors import CannotSearch, check_onnx
from nas.core.pattern import describe_sizes, interleaved
from nas.core.run_folder import processor
from nas.costs.cost_table import MILLISECONDS, CostTable
from nas.costs.flops import batch_shape
from nas.data.corpus import Corpus, bytes_per_token
from nas.training.build import build_fixed
from nas.training.device import Runtime
from nas.training.optimizer import WeightsOptimizer

ROUNDS, SECONDS = 20, 3.0  # the lowest number of rounds, and the seconds for which they continue
WARM_UP = 3  # unmeasured rounds
ATTEMPTS = 3  # measurements of a table before its values are refused
TIMED_BLOCKS = 8  # of the networks that give the time of a block
# Options that only the sizes of operations depend on, which are conditions themselves
OF_OPERATIONS = "model.heads", "model.d_ffn"

Sizes = tuple[int, int]  # vocabulary and width


def work_conditions(config: Config) -> dict:
    """What is timed, and what runs it."""
    latency = config.search.latency
    return {"timing": latency.timing, "engine": "ONNX Runtime" if latency.source == "onnx" else "PyTorch"}


def device_conditions(config: Config, runtime: Runtime) -> dict:
    """The work and the device. Raises InputError if the runtime is not installed."""
    own = work_conditions(config) | {"threads": runtime.threads}
    if config.search.latency.source == "onnx":  # it runs on the CPU
        check_onnx()
        return own | {"processor": processor(), "precision": "fp32", "onnxruntime": version("onnxruntime")}
    device = runtime.name if runtime.is_gpu else processor()
    return own | {"processor": device, "precision": runtime.precision, "torch": str(torch.__version__)}


def size_conditions(config: Config, corpus: Corpus, operations: list[str]) -> dict:
    """The text, the options of the model and the mixture, and the sizes of these operations. config: without auto."""
    marks = [NETWORK, STEP_COSTS] if config.search.latency.timing == "training" else [NETWORK]
    values, text = flatten(asdict(config)), corpus.meta["splits"]["train"]
    return {
        **shape_conditions(config),
        "vocab_size": corpus.vocab_size,
        **{key.split(".")[1]: values[key] for key in marked(*marks) if key not in OF_OPERATIONS},
        **{name: describe_sizes(name, config.shape) for name in operations},
        "mixture": asdict(config.beside),
        "train_sha256": text.get("sha256"),
        "train_tokens": text["tokens"],
    }


def shape_conditions(config: Config) -> dict[str, int]:
    return dict(zip(("batch_size", "segment", "memory"), batch_shape(config), strict=True))


class SegmentWork:
    """One segment through a model with full memories: a forward pass, or a training step.

    Each call repeats it, uncompiled, with the same tokens [B, L + 1], and returns when the device has finished.
    """

    def __init__(self, model: TransformerXL, tokens: Tensor, config: Config, runtime: Runtime):
        self.runtime, self.model = runtime, model.to(runtime.device).eval()
        tokens, (_, segment, self.memory_length) = tokens.to(runtime.device), batch_shape(config)
        self.inputs, self.memories, self.optimizer = (tokens[:, :-1], tokens[:, 1:]), None, None
        for _ in range(-(-self.memory_length // segment)):
            _, self.memories = self.forward()
        if config.search.latency.timing == "training":
            self.optimizer = WeightsOptimizer(model, config.train, 1, runtime.muon_bf16)
            self.optimizer.set_lr(step=1)
            model.train()

    def forward(self):
        with self.runtime.autocast(), torch.set_grad_enabled(self.optimizer is not None):
            return self.model(*self.inputs, self.memories, self.memory_length)

    def __call__(self) -> None:
        nll, _ = self.forward()
        if self.optimizer:
            nll.mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.runtime.synchronize()


class TokenWork:
    """The next token of one stream whose memories are full, as in generation, without sampling."""

    def __init__(self, model: TransformerXL, tokens: Tensor, config: Config, runtime: Runtime):
        _, length, memory = batch_shape(config)
        self.decoder, self.runtime = Decoder(model.to(runtime.device), length + memory), runtime
        self.token = tokens[:, :1].to(runtime.device)
        for _ in range(length + memory):
            self()

    def __call__(self) -> None:
        with self.runtime.autocast():
            self.decoder.read(self.token)
        self.runtime.synchronize()


def graph_work(model: TransformerXL, tokens: Tensor, config: Config, runtime: Runtime) -> Callable:
    """As TokenWork, in ONNX Runtime. Each call reads the same token after the same memories."""
    check_onnx()
    _, length, memory = batch_shape(config)
    network = StreamModel(model.eval(), length + memory)
    with torch.no_grad(), TemporaryDirectory() as folder:
        state = network.start(1)
        if memory:
            _, _, state = network(tokens[:, :1].expand(-1, memory), state)
        export_graph(network, file := Path(folder) / "model.onnx")
        session = open_graph(file, runtime.threads)
    inputs = {name: value.numpy() for name, value in {"tokens": tokens[:, :1], **state}.items()}
    return partial(session.run, None, inputs)


def new_work(pattern: list[str], config: Config, counts: np.ndarray, runtime: Runtime) -> Callable[[], object]:
    """The work of a pattern with new weights: a SegmentWork, TokenWork or graph_work(). counts [V]: as in Corpus."""
    (batch, segment, _), latency = batch_shape(config), config.search.latency
    # Tokens have the frequencies of the training text, because the cost of an adaptive output layer depends on them.
    frequencies, generator = torch.from_numpy(counts).double(), torch.Generator().manual_seed(0)
    tokens = frequencies.multinomial(batch * (segment + 1), replacement=True, generator=generator).view(batch, -1)
    work = TokenWork if latency.timing == "generation" else SegmentWork
    work = graph_work if latency.source == "onnx" else work
    return work(build_fixed(pattern, config, len(counts)), tokens, config, runtime)


def work_of(config: Config) -> str:
    """What is timed, as text."""
    latency = config.search.latency
    return latency.timing + " in ONNX Runtime" * (latency.source == "onnx")


def timed_rounds(functions: dict[Hashable, Callable], rounds: int, seconds: float = 0.0) -> dict[Hashable, np.ndarray]:
    """Seconds that each function takes in each round [R], after WARM_UP unmeasured rounds.

    A round calls each function once, in a new random order, so a drift of the clock speed affects all equally. Rounds
    continue for `seconds`, but their number is at least `rounds` and at most ten times that.
    """
    times, items = {name: [] for name in functions}, list(functions.items())
    generator, start, done = np.random.default_rng(0), time.perf_counter(), -WARM_UP
    while done < rounds or (done < 10 * rounds and time.perf_counter() - start < seconds):
        for index in generator.permutation(len(items)):
            name, function = items[index]
            called = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - called)
        done += 1
    return {name: np.array(taken[WARM_UP:]) for name, taken in times.items()}


def text_times(
    networks: dict[Hashable, tuple[list[str], Config, Corpus]], runtime: Runtime, rounds: int, seconds: float = 0.0
) -> dict[Hashable, dict]:
    """{name: {"ms_per_1000_bytes", "quartiles_ms", "ratio"}}: times for a text, and their ratio to the first network's.

    All are timed in the same rounds. A time is the lower quartile, because other programs make rounds only slower.
    networks: the blocks, the configuration without auto, and the text of each. Restores the random state.
    """
    works, kilobytes = {}, {}
    with runtime.fork_rng():
        for name, (blocks, config, corpus) in networks.items():
            works[name] = new_work(blocks, config, corpus.counts(), runtime)
            kilobytes[name] = math.prod(batch_shape(config)[:2]) * bytes_per_token(corpus) / 1000
        times, found = timed_rounds(works, rounds, seconds), {}
    for name, taken in times.items():
        low, high = np.quantile(1e3 * taken / kilobytes[name], [0.25, 0.75]).tolist()
        found[name] = {"ms_per_1000_bytes": low, "quartiles_ms": [low, high]}
    first = found[next(iter(networks))]["ms_per_1000_bytes"]
    return {name: one | {"ratio": one["ms_per_1000_bytes"] / first} for name, one in found.items()}


def measure_pattern(pattern: list[str], config: Config, corpus: Corpus, runtime: Runtime, predicted: dict) -> dict:
    """The measured latency of a pattern, in the form of the files, merged with the predicted one, or with {}."""
    networks = {name: (name, config, corpus) for name in (tuple(interleaved(len(pattern))), tuple(pattern))}
    measured = text_times(networks, runtime, ROUNDS, SECONDS)[tuple(pattern)]
    measured["ratio_to_interleaved"] = measured.pop("ratio")
    conditions = {"timing": work_of(config), **shape_conditions(config), "threads": runtime.threads}
    return measured | predicted | conditions


def measure_tables(
    configs: dict[Sizes, Config], counts: dict[int, np.ndarray], runtime: Runtime
) -> dict[Sizes, CostTable]:
    """Milliseconds of embedding and output layer, and of each operation, for a batch of segments with full memories.

    Whole models are timed, because an operation alone would find other data in the caches. Blocks are measured once for
    each width. configs: without auto. counts [V]: of each token in the training text. Raises InputError, which names
    the cost, if one is unusable ATTEMPTS times. Restores the random state.
    """
    config = next(iter(configs.values()))
    print(f"measuring {len(configs)} pairs of vocabulary and width: {work_of(config)}", flush=True)
    one_of, works = {width: (size, width) for size, width in sorted(configs, reverse=True)}, {}
    names = [name for name in dict.fromkeys([*config.search.operations, *interleaved(2)]) if name != "identity"]
    with runtime.fork_rng():
        for number, (sizes, shaped) in enumerate(configs.items(), start=1):
            for name in ("none", *(names if sizes in one_of.values() else ())):
                pattern = [] if name == "none" else [name] * TIMED_BLOCKS
                works[sizes, name] = new_work(pattern, shaped, counts[sizes[0]], runtime)
            if config.search.latency.source == "onnx":  # an export takes seconds
                print(f"[{number}/{len(configs)}] {sizes[0]} pieces, width {sizes[1]}: exported", flush=True)
        for attempt in range(1, ATTEMPTS + 1):
            times = timed_rounds(works, ROUNDS, SECONDS)
            tables = {sizes: table_of(times, sizes, one_of[sizes[1]], names) for sizes in configs}
            if not (reason := unusable_cost(tables)):
                return tables
            if attempt < ATTEMPTS:
                print(f"NOTICE: {reason}; measuring again", flush=True)
    section = {"training": "train", "inference": "evaluate"}.get(config.search.latency.timing)  # generation has one row
    larger = f", or give a larger {section}.batch_size," if section else ""
    raise CannotSearch(
        f"latencies vary too much, {ATTEMPTS} times: {reason}; nothing is lost: stop other programs{larger} and repeat "
        "the command; or count FLOPs instead: search.latency.source=flops"
    )


def table_of(times: dict, sizes: Sizes, own: Sizes, names: list[str]) -> CostTable:
    """Medians and quartiles in ms. times: seconds of each work in each round [R]. own: sizes of the timed blocks."""
    none = times[own, "none"]
    rounds = {"overhead": times[sizes, "none"]}
    rounds |= {name: (times[own, name] - none) / TIMED_BLOCKS for name in names}
    rounds["identity"] = np.zeros(len(none))
    blocks, quartiles = {}, {}
    for name, taken in rounds.items():
        low, blocks[name], high = np.maximum(0.0, np.quantile(1e3 * taken, [0.25, 0.5, 0.75])).tolist()
        quartiles[name] = [low, high]
    return CostTable(MILLISECONDS, blocks.pop("overhead"), blocks, quartiles)


def unusable_cost(tables: dict[Sizes, CostTable]) -> str:
    """The first cost, but of identity, that is not larger than its interquartile range, as text; "" if none."""
    for (size, width), table in tables.items():
        for name, cost in {"overhead": table.overhead, **table.blocks}.items():
            low, high = table.quartiles[name]
            if name != "identity" and high - low >= cost:
                where = f"{name} of {size} pieces, width {width}"
                return f"{where} has a median of {cost:.4f} ms and quartiles of {low:.4f} and {high:.4f} ms"
    return ""
