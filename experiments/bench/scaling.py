"""What a training step would cost on many GPUs: `python experiments/bench/scaling.py`. Nothing is measured.

Two sizes: `paper` (32 blocks of width 512 on WikiText-103) and `tenfold`, whose blocks have ten times the parameters
(36 blocks of width 1536). A step reads --rows rows of 192 tokens with a memory of 192, divided over the ranks. A
retraining runs the interleaved pattern. A search runs one operation in each block, each equally often.

- compute_ms: three forward passes' FLOPs (matrix products), divided by the rate --tflops.
- memory_gb of a rank: weights, gradients and both AdamW moments in fp32, and what the backward pass needs in bf16.
- sent_gb of a rank: the gradients in fp32, by a ring all-reduce.
- efficiency: the computing's share of the time, if no sending overlaps with it. The last line is JSON.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.core.config import CANDIDATES, Config, ModelOptions, TrainOptions
from nas.core.errors import run_command
from nas.core.pattern import interleaved

VOCABULARY, CUTOFFS, ZIPF = 267_735, [20_000, 40_000, 200_000], 1.07
RANKS, SCALES = (1, 8, 64), {"paper": (32, 512), "tenfold": (36, 1536)}  # blocks, d_model
FIGURES = ("parameters_m", "compute_ms", "memory_gb", "sent_gb", "efficiency")
FP32, BF16 = 4, 2  # bytes


class Step(NamedTuple):
    """Numbers of parameters and of gradients, FLOPs of a token, and bytes kept for the backward pass of a row."""

    parameters: float
    gradients: float
    flops_per_token: float
    saved_per_row: float

    def memory(self, rows: float) -> float:
        return FP32 * (3 * self.parameters + self.gradients) + rows * self.saved_per_row

    def sent(self, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks * FP32 * self.gradients


def make_config(blocks: int, d_model: int):
    sizes = {"blocks": blocks, "d_model": d_model, "heads": d_model // 64, "d_ffn": 4 * d_model}
    model = ModelOptions(**sizes, cutoffs=CUTOFFS, tie_embeddings=True, ngram_rows=[], dropout=0.0)
    config = Config(model=model, train=TrainOptions(segment=192, memory=192, weight_decay=0.02))
    config.search.operations = [*CANDIDATES["gumbel"]]
    config.search.latency.timing = "training"  # FLOPs are counted at the sizes of training
    config.resolve_defaults()
    return config


def saved_per_token(config, clusters, value: int) -> dict[str, float]:
    """Bytes for a token's backward pass: of a block with each operation, and of embedding and output layer."""
    model, train = config.model, config.train
    width, keys = model.d_model, 1 + train.memory / train.segment  # per token
    attention = FP32 * keys * width + value * (3 * keys + 5) * width  # memory and segment; normed, keys, queries, ...
    attention += value * model.heads * (train.segment + train.memory)
    (head, _), *tails = clusters
    logits = head + len(tails) + sum(size * share for size, share in tails)
    return {
        "attention": attention,
        "dense": value * (width + model.d_ffn),
        "identity": 0.0,
        "every block": FP32 * width,  # its input
        "overhead": FP32 * (width + logits) + value * width * (1 + sum(share for _, share in tails)),
    }


def count_parameters(pattern: list[str], config, vocab_size: int) -> int:
    import torch

    from nas.training.build import build_fixed

    with torch.device("meta"):  # only the shapes count
        model = build_fixed(pattern, config, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def step_costs(config, counts, mode: str, value: int = BF16) -> Step:
    """Costs of a step of `retrain` or `search`. counts [V]: how often each word occurs; value: bytes of a product."""
    from nas.costs.flops import count_flops
    from nas.data.optimal_cutoffs import cluster_table

    blocks, names = config.model.blocks, config.search.operations
    saved = saved_per_token(config, cluster_table(counts, config.model.cutoffs), value)
    flops, overhead = count_flops(config, counts), count_parameters([], config, len(counts))
    sizes = {name: count_parameters([name], config, len(counts)) - overhead for name in names}
    pattern = interleaved(blocks) if mode == "retrain" else names  # a search runs each operation equally often
    runs = {name: blocks * pattern.count(name) / len(pattern) for name in names}
    gradients = overhead + sum(runs[name] * sizes[name] for name in names)
    per_token = blocks * saved["every block"] + saved["overhead"] + sum(runs[name] * saved[name] for name in names)
    return Step(
        parameters=gradients if mode == "retrain" else overhead + blocks * sum(sizes.values()),
        gradients=gradients,
        flops_per_token=3 * (flops.overhead + sum(runs[name] * flops.blocks[name] for name in names)),
        saved_per_row=config.train.segment * per_token,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="rows of a step, all ranks together")
    parser.add_argument("--tflops", type=float, default=130, help="rate that a GPU reaches (18%% of 715)")
    parser.add_argument("--link", type=float, default=400, help="GB/s of the ring: eight links of 50 GB/s a machine")
    options = parser.parse_args()
    counts, rows = np.arange(1.0, VOCABULARY + 1) ** -ZIPF, []  # relative frequencies of the words
    print("| size | step | ranks | parameters, M | compute, ms | memory, GB | sent, GB | efficiency |\n|" + "---|" * 8)
    for scale, mode in itertools.product(SCALES, ("retrain", "search")):
        config = make_config(*SCALES[scale])
        step, tokens = step_costs(config, counts, mode), options.rows * config.train.segment
        for ranks in RANKS:
            compute = step.flops_per_token * tokens / ranks / options.tflops / 1e9
            memory, sent = step.memory(options.rows / ranks) / 1e9, step.sent(ranks) / 1e9
            efficiency = compute / (compute + 1e3 * sent / options.link)
            figures = [step.parameters / 1e6, compute, memory, sent, efficiency]
            print(f"| {scale} | {mode} | {ranks} |", " | ".join(f"{figure:.2f}" for figure in figures), "|")
            rows.append({"size": scale, "step": mode, "ranks": ranks, **dict(zip(FIGURES, figures))})
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    run_command(main)
