"""What search and retraining cost on many GPUs, on paper: `python experiments/bench/scaling.py`; and how far that is to
be trusted: `--check` measures small cases on this machine's CPU and prints predicted against measured.

Two sizes: the paper's (32 blocks of width 512 on WikiText-103), and one whose blocks have ten times the parameters
(36 blocks of width 1536, d_ffn and heads in proportion). A step reads --rows rows of 192 tokens, with a memory of 192,
divided over the ranks. Words are as frequent as in a text of rank-frequency exponent --zipf.

- retrain: the interleaved pattern. soft: all candidates, weights and logits on one batch (search.split=shared).
  hard: the defaults at uniform pi; four steps of five train the weights along one path, the fifth evaluates K = 4
  paths without gradients. Figures per step are means over such steps.
- FLOPs: matrix products, a multiply-add is two; forward passes as nas.latency.count_flops counts them, training 3 times
  that, a logits step of hard search K times.
- sent: bytes that a rank sends per step. An all-reduce over W ranks by a ring sends 2 (W-1)/W times the fp32 gradients
  there are: of all parameters in retraining and soft search, of the path and the output layer in hard search. Losses
  and the logits' gradients come along.
- late: the share of these bytes that no backward pass can hide. The table's gradient is complete only when the
  backward pass reaches the embedding, at its very end; hard search averages everything after it.
- memory of a rank: weights, gradients and both moments, fp32; activations that are kept for the backward pass; memories
  of the segment before; and what is needed for a moment (`working`): fp32 logits of the largest cluster, or the table's
  gradient beside the buffer from which it is sent. Activations grow with the rows of a rank, or of a part of them
  (train.grad_accum_steps); with model.recompute a block keeps its input alone (`least`: both, a row at a time). Hard search
  is told for the mean path; one of more attention keeps more.
- FSDP: parameters, gradients and moments divided over the ranks; traffic 1.5 times (two gathers and a scatter instead
  of a scatter and a gather), and beside its shard a rank holds the largest unit whole: the table and its gradient.

Times are FLOPs over the GPU's rate and bytes over a link's, which are assumptions and options; latencies of messages
are left out. NVLink's hold within a machine. Between machines a ring enters and leaves each once, and there are as many
rings as a machine has links: `1 link`, or `8 links`, one for each GPU, whose rates add up. efficiency: the share of a
step that computes, if late bytes are waited for, and the others as far as they take longer than the backward pass, two
thirds of the computing.

--check counts the bytes sent over the loopback, where others may send too. In a network namespace of its own nobody
does: `unshare -rn sh -c 'ip link set lo up; python experiments/bench/scaling.py --check'`. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

MODES = ("retrain", "soft", "hard")
RANKS = (1, 2, 8, 64)
VOCABULARY, CUTOFFS = 267_735, [20_000, 40_000, 200_000]
SCALES = {"paper": (32, 512), "tenfold": (36, 1536)}  # blocks, d_model
GPUS = (80e9, 141e9)  # bytes
FP32, BF16 = 4, 2  # bytes of a value


def word_counts(vocab_size: int, exponent: float):
    """How often words occur [V], descending, up to a factor."""
    return np.arange(1.0, vocab_size + 1) ** -exponent


def scale_config(blocks: int, d_model: int, rows: int, dropout: float = 0.1):
    """As experiments/wikitext103 has it: 64 columns a head, d_ffn four times the width."""
    from nas.core.config import Config, ModelOptions, TrainOptions
    from nas.core.config_checks import settle_sparse

    sizes = {"blocks": blocks, "d_model": d_model, "heads": d_model // 64, "d_ffn": 4 * d_model}
    config = Config(model=ModelOptions(**sizes, dropout=dropout, cutoffs=CUTOFFS))
    config.train = TrainOptions(batch_size=rows, segment=192, memory=192)
    config.search.latency.timing = "training"  # costs at the sizes of training
    settle_sparse(config)
    return config


class Bytes(NamedTuple):
    """What is kept for the backward pass: for each row of the batch, and once."""

    per_row: float
    once: float

    def of(self, rows: float) -> float:
        return self.per_row * rows + self.once


class Prediction:
    """What a configuration costs, from its sizes. Segments must be at least as long as the memory: the next memories
    are then views of what the blocks read."""

    def __init__(self, config, counts, value: int = BF16):
        """counts [V]: how often each word occurs; value: bytes of a product's operands and results."""
        from models.cutoffs import cluster_table
        from nas.costs.flops import count_flops
        from nas.training.build import count_parameters

        self.config, self.value, vocab_size = config, value, len(counts)
        self.flops, self.clusters = count_flops(config, counts), cluster_table(counts, config.model.cutoffs)
        self.table = vocab_size * config.model.d_model
        self.overhead = count_parameters([], config, vocab_size)  # the table, the output layer's own, the last norm
        names = config.search.operations
        self.operations = {name: count_parameters([name], config, vocab_size) - self.overhead for name in names}

    # --- sizes and FLOPs

    def runs(self, mode: str) -> dict[str, float]:
        """How many blocks run each operation when the weights train."""
        from nas.core.pattern import interleaved

        blocks = self.config.model.blocks
        if mode == "retrain":
            return {name: interleaved(blocks).count(name) for name in self.operations}
        return dict.fromkeys(self.operations, blocks if mode == "soft" else blocks / len(self.operations))

    def parameters(self, mode: str) -> float:
        """All that are trained, the logits apart."""
        return self.gradients("retrain" if mode == "retrain" else "soft")

    def gradients(self, mode: str) -> float:
        """Entries of the gradients that a step of the weights makes."""
        return self.overhead + sum(count * self.operations[name] for name, count in self.runs(mode).items())

    def forward_flops(self, mode: str) -> float:
        """Per token."""
        return self.flops.overhead + sum(count * self.flops.blocks[name] for name, count in self.runs(mode).items())

    def logits_share(self, mode: str) -> float:
        """Of the steps, those that train no weights."""
        return self.config.search.arch_fraction if mode == "hard" else 0.0

    def step_flops(self, mode: str) -> float:
        """Of all ranks together."""
        share, train = self.logits_share(mode), self.config.train
        passes = (1 - share) * 3 + share * self.config.search.paths
        return passes * self.forward_flops(mode) * train.batch_size * train.segment

    # --- the network

    def reduced(self, mode: str) -> float:
        """Bytes of what is all-reduced per step: gradients, a loss for each batch or path, the logits' gradient."""
        share, logits = self.logits_share(mode), self.config.model.blocks * len(self.operations)
        numbers = (1 - share) * (self.gradients(mode) + 1)
        if mode == "hard":
            numbers += share * (self.config.search.paths + logits)
        elif mode == "soft":
            numbers += logits
        return FP32 * numbers

    def sent(self, mode: str, ranks: int) -> float:
        """Bytes that each rank sends per step."""
        return 2 * (ranks - 1) / ranks * self.reduced(mode)

    def late(self, mode: str) -> float:
        """Share of these bytes that can be sent only after the backward pass."""
        return 1.0 if mode == "hard" else FP32 * self.table / self.reduced(mode)

    # --- memory

    def casts(self, weights: float) -> float:
        """Bytes of the copies of weights in the products' type, each kept until its product's backward pass."""
        return 0 if self.value == FP32 else self.value * weights

    def mask(self) -> float:
        """Bytes per position of what dropout keeps: a byte a value on a GPU, a factor on a CPU."""
        model = self.config.model
        return model.d_model * (1 if self.value == BF16 else FP32) if model.dropout else 0

    def kept_by(self, name: str) -> Bytes:
        """By a block with this operation, beside its input."""
        model, train, value = self.config.model, self.config.train, self.value
        width, queries, keys, statistics = model.d_model, train.segment, train.segment + train.memory, 2 * FP32
        if name == "attention":
            stream = keys * (FP32 * width + statistics)  # memory and segment, as the norm reads them
            products = keys * 3 * width + queries * 5 * width  # normed, k, v; normed, q + u, q + v, mixed, joined
            weights = model.heads * queries * keys
            positions = (1 if value == FP32 else 2) * value * keys * width  # projected; and cast
            copies = self.casts(4 * width**2)  # not of the positions' projection, whose input has no gradient
            return Bytes(stream + value * (products + weights) + queries * self.mask(), copies + positions)
        if name == "dense":
            own = value * (width + model.d_ffn) + statistics + self.mask()
            copies = self.casts(2 * width * model.d_ffn)
            return Bytes(queries * own, copies)  # its inner dropout shows in the inner values themselves
        return Bytes(0, 0)

    def kept_by_output(self) -> Bytes:
        """By embedding, last norm and output layer."""
        width, value = self.config.model.d_model, self.value
        (head, _), *tails = self.clusters
        inside = sum(share for _, share in tails)
        logits = head + len(tails) + sum(size * share for size, share in tails)
        numbers = 8 + 2 * FP32 + FP32 + inside * (8 + FP32)  # tokens, the norm's, sums, places and sums in tails
        hidden = FP32 * width + value * width * (1 + inside) + 2 * self.mask()
        head_copy = value * (head + len(tails)) * width if tails else 0  # joined with the tails' entries
        encodings = FP32 * (self.config.train.segment + self.config.train.memory) * width
        per_token = numbers + hidden + value * logits
        return Bytes(self.config.train.segment * per_token, head_copy + encodings + self.casts(self.table))

    def activations(self, mode: str, rows: float, recompute: bool = False) -> float:
        """Bytes kept for the backward pass, for so many rows read at a time. With recomputation, one block's inner
        values at a time."""
        train, runs = self.config.train, self.runs(mode)
        stream = FP32 * train.segment * self.config.model.d_model * rows * self.config.model.blocks
        branches = self.value * train.segment * self.config.model.d_model * rows if mode == "soft" else 0
        inner = {name: self.kept_by(name).of(rows) + (branches if name != "identity" else 0) for name in runs}
        if recompute:
            blocks = sum(inner.values()) if mode == "soft" else max(inner.values())
        else:
            blocks = sum(count * inner[name] for name, count in runs.items())
        return stream + blocks + self.kept_by_output().of(rows)

    def memories(self, mode: str, rows: float) -> float:
        """Bytes of the segment before, as all blocks that may look back keep it."""
        model, train = self.config.model, self.config.train
        blocks = self.runs("retrain")["attention"] if mode == "retrain" else model.blocks
        return FP32 * blocks * rows * max(train.segment, train.memory) * model.d_model

    def working(self, mode: str, rows: float, ranks: int) -> float:
        """Bytes needed for a moment: fp32 logits of the largest cluster, where products are not fp32; or the table's
        gradient as it is made, and beside the buffer from which DistributedDataParallel sends it."""
        (head, _), *tails = self.clusters  # every token asks the head
        logits = max([head, *(size * share for size, share in tails)]) * rows * self.config.train.segment
        beside = FP32 if ranks > 1 and mode != "hard" else 0
        return max(0 if self.value == FP32 else FP32 * logits, self.casts(self.table) + beside * self.table)

    def memory(self, mode: str, rows: float, ranks: int, recompute: bool = False, parts: int = 1) -> dict[str, float]:
        """Bytes of each kind on a rank that has so many rows and reads them in so many parts; and their total."""
        parameters = self.parameters(mode)
        found = {
            "weights": FP32 * parameters,
            "gradients": FP32 * self.gradients(mode),
            "moments": 2 * FP32 * parameters,
            "activations": self.activations(mode, rows / parts, recompute),
            "memories": self.memories(mode, rows) * (1 if parts == 1 else 2),  # with the next ones of other parts
            "working": self.working(mode, rows / parts, ranks),
        }
        return found | {"total": sum(found.values())}

    def fsdp_memory(self, mode: str, rows: float, ranks: int) -> float:
        """Bytes on a rank under FSDP."""
        whole, state = self.memory(mode, rows, 1), ("weights", "gradients", "moments")
        unit = 2 * FP32 * self.table  # the largest, gathered, with its gradient before it is scattered
        return whole["total"] - sum(whole[key] for key in state) * (1 - 1 / ranks) + unit


# --- tables


def show(title: str, header: list[str], rows: list[list]) -> None:
    """A table: the first column left, the others right."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        )
        print("  ".join([first, *others]).rstrip())


def giga(number: float) -> str:
    return f"{number / 1e9:,.2f}"


def sizes_of(prediction: Prediction) -> dict:
    """Parameters, and forward FLOPs per token."""
    parameters, flops = prediction.parameters, prediction.flops
    operations = {name: count for name, count in prediction.operations.items() if count}
    return {
        **operations,
        "table": prediction.table,
        "blocks": parameters("retrain") - prediction.overhead,
        "whole": parameters("retrain"),
        "supernet": parameters("soft"),
        "flops": {name: flops.blocks[name] for name in operations} | {"overhead": flops.overhead},
        "tails": [share for _, share in prediction.clusters[1:]],
    }


def links_of(options) -> dict[str, float]:
    """Bytes per second, by name."""
    rates = {"NVLink": options.nvlink, "8 links": 8 * options.link, "1 link": options.link}
    return {name: 1e9 * rate for name, rate in rates.items()}


def traffic_of(prediction: Prediction, mode: str, options) -> dict:
    """FLOPs and bytes per step, and their times."""
    train, rate = prediction.config.train, options.peak * 1e12 * options.utilisation
    flops, reduced, late = prediction.step_flops(mode), prediction.reduced(mode), prediction.late(mode)
    links = links_of(options)
    found = {"flops_per_token": flops / train.batch_size / train.segment, "flops_per_step": flops, "late": late}
    found["ranks"] = {}
    for ranks in RANKS:
        sent, compute = prediction.sent(mode, ranks), flops / ranks / rate
        send = {name: sent / link for name, link in links.items()}
        shown = {name: late * taken + max(0.0, (1 - late) * taken - compute * 2 / 3) for name, taken in send.items()}
        efficiency = {name: compute / (compute + waits) for name, waits in shown.items()}
        found["ranks"][ranks] = {"sent": sent, "compute_s": compute, "send_s": send, "efficiency": efficiency}
    found["fsdp_sent"] = 1.5 * prediction.sent(mode, RANKS[-1])
    # flops / (W rate) = 2 (W-1)/W reduced / link, solved for W; and, for many ranks, for the rows of one.
    balance = {name: flops / rate / (2 * reduced / link) for name, link in links.items()}
    found["equal_at_ranks"] = {name: 1 + ratio for name, ratio in balance.items()}
    found["equal_at_rows"] = {name: train.batch_size / ratio for name, ratio in balance.items()}
    return found


def memory_of(prediction: Prediction, mode: str) -> dict:
    """Of a rank of 1, 8 and 64; of one of 64 that recomputes and reads a row at a time; and FSDP's total."""
    rows = prediction.config.train.batch_size
    found = {f"ranks {ranks}": prediction.memory(mode, rows / ranks, ranks) for ranks in (1, 8, 64)}
    found["ranks 64, least"] = prediction.memory(mode, rows / 64, 64, recompute=True, parts=rows // 64)
    for ranks in (8, 64):
        found[f"ranks {ranks}, FSDP"] = {"total": prediction.fsdp_memory(mode, rows / ranks, ranks)}
    return found


@lru_cache(None)
def at_width(d_model: int, rows: int, zipf: float) -> Prediction:
    """The larger size's number of blocks, at another width."""
    blocks, _ = SCALES["tenfold"]
    return Prediction(scale_config(blocks, d_model, rows), word_counts(VOCABULARY, zipf))


def largest(mode: str, gpu: float, least: bool, options) -> dict:
    """The widest model (a multiple of 64) for which a rank of 64 has room; least: recomputing, a row at a time."""
    low, high = 1, 512  # fits, does not
    while high - low > 1:
        middle = (low + high) // 2
        prediction = at_width(64 * middle, options.rows, options.zipf)
        memory = memory_of(prediction, mode)["ranks 64, least" if least else "ranks 64"]
        low, high = (middle, high) if memory["total"] <= gpu * options.usable else (low, middle)
    prediction = at_width(64 * low, options.rows, options.zipf)
    about = {"mode": mode, "gpu": gpu, "least": least, "d_model": 64 * low}
    return about | {"parameters": prediction.parameters(mode), "state": 16 * prediction.parameters(mode)}


def predict(options) -> dict:
    found = {"scales": {}}
    for name, (blocks, width) in SCALES.items():
        prediction = Prediction(scale_config(blocks, width, options.rows), word_counts(VOCABULARY, options.zipf))
        kept = {kind: prediction.kept_by(kind)._asdict() for kind in ("attention", "dense")}
        found["scales"][name] = {
            "blocks": blocks,
            "d_model": width,
            "sizes": sizes_of(prediction),
            "kept": kept | {"output": prediction.kept_by_output()._asdict()},
            "traffic": {mode: traffic_of(prediction, mode, options) for mode in MODES},
            "memory": {mode: memory_of(prediction, mode) for mode in MODES},
        }
    found["largest"] = [largest(mode, gpu, least, options) for mode in MODES for gpu in GPUS for least in (False, True)]
    return found


def report_scale(name: str, about: dict, rows: int) -> None:
    sizes, traffic, memory = about["sizes"], about["traffic"], about["memory"]
    tails = ", ".join(f"{share:.1%}" for share in sizes["tails"])
    print(
        f"\n=== {name}: {about['blocks']} blocks of width {about['d_model']}, {rows} rows; in the tails {tails} of all"
    )
    keys = ["attention", "dense", "table", "blocks", "whole", "supernet"]
    show("parameters, millions", ["", *keys], [["", *(f"{sizes[key] / 1e6:,.2f}" for key in keys)]])
    keys = ["attention", "dense", "overhead"]
    show("FLOPs per token, forward, millions", ["", *keys], [["", *(f"{sizes['flops'][k] / 1e6:,.2f}" for k in keys)]])
    show(
        "kept for the backward pass, MB",
        ["", "per row", "once"],
        [[kind, *(f"{kept[key] / 1e6:,.2f}" for key in ("per_row", "once"))] for kind, kept in about["kept"].items()],
    )
    kinds = list(memory["retrain"]["ranks 1"])
    for mode in MODES:
        rows = [[key, *(giga(at[kind]) if kind in at else "" for kind in kinds)] for key, at in memory[mode].items()]
        show(f"memory of a rank, GB, {mode}", ["", *kinds], rows)
    report_traffic(traffic)


def report_traffic(traffic: dict) -> None:
    for mode, about in traffic.items():
        title = (
            f"{mode}: {about['flops_per_token'] / 1e9:.3f} GFLOPs per token, {about['flops_per_step'] / 1e12:,.1f} "
            f"TFLOPs per step; {about['late']:.0%} of the bytes are late"
        )
        links = list(about["equal_at_ranks"])
        header = ["ranks", "sent, GB", "compute, ms", *(f"{link}, ms" for link in links)]
        header += [f"{'efficiency: ' if link == links[0] else ''}{link}" for link in links]
        rows = [
            [
                ranks,
                giga(at["sent"]),
                *(f"{1e3 * seconds:,.1f}" for seconds in (at["compute_s"], *at["send_s"].values())),
                *(f"{share:.2f}" for share in at["efficiency"].values()),
            ]
            for ranks, at in about["ranks"].items()
        ]
        show(title, header, rows)
        print(f"FSDP: {giga(about['fsdp_sent'])} GB at {RANKS[-1]} ranks")
        for link in links:
            ranks, own = about["equal_at_ranks"][link], about["equal_at_rows"][link]
            print(
                f"{link}: sending takes as long as computing at {ranks:,.0f} ranks, or {own:.1f} rows for each of many"
            )


def report(found: dict, options) -> None:
    print(
        f"assumed: {options.rows} rows a step; {options.utilisation:.0%} of {options.peak:g} TFLOP/s and "
        f"{options.usable:.0%} of a GPU's memory;\n"
        f"per direction NVLink {options.nvlink:g} GB/s, a link between machines {options.link:g}; "
        f"rank-frequency exponent {options.zipf:g}"
    )
    for name, about in found["scales"].items():
        report_scale(name, about, options.rows)
    rows = [
        [
            f"{at['mode']}, {at['gpu'] / 1e9:.0f} GB" + (", least" if at["least"] else ""),
            at["d_model"],
            giga(at["parameters"]),
            giga(at["state"]),
        ]
        for at in found["largest"]
    ]
    blocks, _ = SCALES["tenfold"]
    title = f"the largest model of {blocks} blocks that a rank of 64 holds without FSDP"
    show(title, ["", "d_model", "parameters, G", "16 bytes each, GB"], rows)


# --- measured


SMALL = {"blocks": 6, "d_model": 64, "heads": 4, "d_ffn": 256}


def small_config(memory: int = 32, rows: int = 4, **sizes):
    from nas.core.config import Config, ModelOptions, TrainOptions
    from nas.core.config_checks import settle_sparse

    config = Config(model=ModelOptions(**{"cutoffs": [300, 1000], **SMALL, **sizes}))
    config.train = TrainOptions(batch_size=rows, segment=32, memory=memory, device="cpu")
    config.search.latency.timing = "training"
    settle_sparse(config)
    return config


class SmallStep:
    """Steps of the weights on random words, on the CPU; their memories are full."""

    def __init__(self, mode: str, config, value: int = FP32, vocab_size: int = 3000):
        import torch

        from nas.core.pattern import interleaved
        from nas.search.supernet import build_supernet
        from nas.training.build import build_fixed
        from nas.training.optimizer import WeightsOptimizer

        torch.manual_seed(0)
        corpus, train = SimpleNamespace(vocab_size=vocab_size), config.train
        self.mode, self.memory = mode, train.memory
        tokens = torch.randint(vocab_size, (train.batch_size, train.segment + 1))
        self.inputs = tokens[:, :-1], tokens[:, 1:]
        counts = torch.bincount(self.inputs[1].flatten(), minlength=vocab_size).numpy()
        self.prediction = Prediction(config, counts, value)
        if mode == "retrain":
            self.model = build_fixed(interleaved(config.model.blocks), config, corpus)
            self.weights = self.model
        else:
            self.model = build_supernet(config, corpus)
            self.weights = self.model.backbone
        if mode == "soft":
            self.model.set_mixture(self.model.pi().requires_grad_())
        elif mode == "hard":
            self.set_path(0)
        self.optimizer = WeightsOptimizer(self.weights, train, total_steps=1)
        with torch.no_grad():
            _, self.memories = self.model(*self.inputs, None, self.memory)

    def take(self, shift: int) -> None:
        """Of hard search, one of the three paths that have each operation equally often, and no block's in common."""
        names, blocks = self.model.operations, len(self.model.backbone.blocks)
        self.model.set_path([(block + shift) % len(names) for block in range(blocks)])

    def forward(self):
        """The mean nll; leaves the next memories in `next`."""
        nll, self.next = self.model(*self.inputs, self.memories, self.memory)
        return nll.mean()

    def update(self) -> None:
        self.optimizer.clear()
        self.forward().backward()
        self.optimizer.set_lr(1)
        self.optimizer.apply()
        self.memories, self.next = self.next, None


def count_step_flops(mode: str) -> tuple[float, float]:
    """(predicted, counted) of a forward and backward pass, per token."""
    from torch.utils.flop_counter import FlopCounterMode

    step = SmallStep(mode, small_config())
    with FlopCounterMode(display=False) as counter:
        step.forward().backward()
    return 3 * step.prediction.forward_flops(mode), counter.get_total_flops() / step.inputs[0].numel()


def count_kept(mode: str, value: int = FP32, dropout: float = 0.0) -> tuple[float, float]:
    """(predicted, counted) bytes that a forward pass keeps: what autograd saves, and the blocks' inputs that are the
    next memories. value: bytes of a product's value."""
    import torch

    config = small_config(dropout=dropout)
    step, kept = SmallStep(mode, config, value), {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # held, so that no address is used twice
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=value == BF16, cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        step.forward()
    for memory in step.next.blocks:
        if memory is not None:
            note(memory)
    for parameter in step.model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return step.prediction.activations(mode, config.train.batch_size), sum(map(len, kept.values()))


def peak_of(mode: str, rows: int, d_model: int) -> dict:
    """Predicted and measured bytes at the peak of a step, in this process."""
    from nas.costs.benchmark import peak_memory_mb

    config = small_config(rows=rows, d_model=d_model, d_ffn=4 * d_model, cutoffs=[])
    step = SmallStep(mode, config)
    for shift in range(3):  # makes the moments
        if mode == "hard":
            step.set_path(shift)
        step.update()
    step.optimizer.clear()
    predicted = step.prediction.memory(mode, rows, ranks=1)
    return {"predicted": predicted, "measured": 1024**2 * peak_memory_mb(step.update)}


def in_process(*arguments) -> dict:
    """The last line of this program with other arguments. The C library gives freed memory back at once, so that what
    the kernel counts is what is in use."""
    import os

    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def slope(mode: str, kinds: tuple[str, ...], less: tuple[int, int], more: tuple[int, int]) -> tuple[float, float]:
    """(predicted, measured) growth of the peak between two (rows, width); kinds: of the memory that grows."""
    first, second = (in_process("--peak-memory", mode, *sizes) for sizes in (less, more))
    predicted = sum(second["predicted"][kind] - first["predicted"][kind] for kind in kinds)
    return predicted, second["measured"] - first["measured"]


def loopback_bytes() -> int:
    """All that this machine ever sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def write_inputs(folder: Path) -> None:
    """A made-up text, a configuration and a pattern."""
    import yaml

    from nas.core.pattern import interleaved

    source = np.random.default_rng(0)
    for split, lines in {"train": 2000, "valid": 20, "test": 20}.items():
        words = source.integers(2000, size=(lines, 10))
        (folder / f"{split}.txt").write_text("\n".join(" ".join(f"w{word}" for word in line) for line in words) + "\n")
    seldom = {"log_every": 10**6, "evaluate_every": 0, "checkpoint_every": 10**6}
    content = {
        "data": {"source": str(folder), "tokenizer": "words", "cache": str(folder / "cache")},
        "model": SMALL | {"d_model": 128, "d_ffn": 512, "cutoffs": [300, 1000]},
        "train": {"batch_size": 4, "segment": 16, "memory": 16, "threads": 1, "device": "cpu"} | seldom,
        "search": {"warmup_steps": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    pattern = {"format": "par-pattern/1", "blocks": interleaved(SMALL["blocks"])}
    (folder / "pattern.yaml").write_text(yaml.safe_dump(pattern))


COMMANDS = {
    "retrain": ["retrain.py", "pattern.yaml", "config.yaml"],
    "soft": ["search.py", "config.yaml", "search.sampling=soft", "search.split=shared"],
    # Paths by strict fairness: any three of them have the mean path's gradients.
    "hard": ["search.py", "config.yaml", "search.weights_paths=uniform"],
}


def send_for(mode: str, ranks: int, steps: int, folder: Path) -> int:
    """Bytes over the loopback while a run of so many steps lasts."""
    script, *arguments = COMMANDS[mode]
    arguments = [str(folder / argument) if argument.endswith(".yaml") else argument for argument in arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
    run = folder / f"{mode}-{ranks}-{steps}"
    before = loopback_bytes()
    command = [*launcher, str(ROOT / script), *arguments, "--run", str(run), f"train.steps={steps}"]
    subprocess.run(command, check=True, capture_output=True)
    return loopback_bytes() - before


def measure_network(mode: str, ranks: int, folder: Path) -> tuple[float, float]:
    """(predicted, measured) bytes that each rank sends per step: of 15 steps and 45, so that the start cancels."""
    from nas.core.config_loading import load_config
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare

    config = load_config(folder / "config.yaml", [])
    prediction = Prediction(config, Corpus(prepare(config.data)).counts(), FP32)
    short, long = (send_for(mode, ranks, steps, folder) for steps in (15, 45))
    return prediction.sent(mode, ranks), (long - short) / 30 / ranks


def check() -> list[dict]:
    rows = []

    def note(what: str, unit: str, predicted: float, measured: float) -> None:
        about = {"what": what, "unit": unit, "predicted": predicted, "measured": measured}
        rows.append(about | {"ratio": measured / predicted})
        print(f"{what}: {predicted:,.0f} predicted, {measured:,.0f} {unit} measured", file=sys.stderr, flush=True)

    for mode in MODES:
        note(f"FLOPs, {mode}", "FLOPs per token", *count_step_flops(mode))
        for value, name in ((FP32, "fp32"), (BF16, "bf16")):
            note(f"kept, {mode}, {name}", "bytes", *count_kept(mode, value))
        kinds = "activations", "memories"
        note(f"peak, {mode}, 64 to 256 rows", "bytes", *slope(mode, kinds, (64, 64), (256, 64)))
        kinds = "weights", "gradients", "moments"
        note(f"peak, {mode}, width 256 to 512", "bytes", *slope(mode, kinds, (1, 256), (1, 512)))
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        for mode in MODES:
            for ranks in (2, 4):
                note(f"sent, {mode}, {ranks} ranks", "bytes a step", *measure_network(mode, ranks, Path(folder)))
    return rows


def report_check(rows: list[dict]) -> None:
    show(
        "predicted and measured",
        ["", "predicted", "measured", "ratio", ""],
        [
            [at["what"], f"{at['predicted']:,.0f}", f"{at['measured']:,.0f}", f"{at['ratio']:.3f}", at["unit"]]
            for at in rows
        ],
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="of a step, all ranks together (a multiple of 64)")
    parser.add_argument("--peak", type=float, default=790, help="TFLOP/s of bf16 products of a GPU")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of it that is reached")
    parser.add_argument("--nvlink", type=float, default=450, help="GB/s per GPU and direction, within a machine")
    parser.add_argument("--link", type=float, default=50, help="GB/s per direction of a link between machines")
    parser.add_argument("--usable", type=float, default=0.9, help="share of a GPU's memory")
    parser.add_argument("--zipf", type=float, default=1.07, help="exponent of the words' frequencies")
    parser.add_argument("--check", action="store_true", help="measure small cases instead, on this CPU")
    parser.add_argument("--peak-memory", nargs=3, metavar=("MODE", "ROWS", "WIDTH"), help="measure this one alone")
    return parser.parse_args()


def main() -> None:
    from nas.core.errors import InputError

    options = parse_arguments()
    if options.peak_memory:
        mode, rows, width = options.peak_memory
        print(json.dumps(peak_of(mode, int(rows), int(width))))
    elif options.check:
        rows = check()
        report_check(rows)
        print(json.dumps(rows))
    else:
        if options.rows % RANKS[-1]:
            raise InputError(f"--rows {options.rows} must be a multiple of {RANKS[-1]}")
        found = predict(options)
        report(found, options)
        print(json.dumps({"assumed": vars(options), **found}))


if __name__ == "__main__":
    from nas.core.errors import run_command

    run_command(main)
