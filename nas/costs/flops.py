"""FLOPs of operations and patterns, and the options that costs depend on."""

from dataclasses import asdict

import numpy as np
import torch

from models.operations import OPERATIONS
from models.softmax import AdaptiveSoftmax
from nas.core.config import Config
from nas.core.pattern import OWN_OPTIONS
from nas.costs.cost_table import FLOPS, CostTable
from nas.data.cutoffs import cluster_table
from nas.training.build import backbone_options, block_config, build_fixed
from nas.training.evaluation import evaluation_lengths


def batch_shape(config: Config) -> tuple[int, int, int]:
    """(batch size, segment, memory), in tokens, at which costs are counted and timed: evaluation's or training's."""
    if config.search.latency.timing == "training":
        return config.train.batch_size, config.train.segment, config.train.memory
    return config.evaluate.batch_size, *evaluation_lengths(config)


def cost_options(config: Config, vocab_size: int, operations: list[str]) -> dict:
    """The sizes and model options that the costs of these operations depend on."""
    batch, segment, memory = batch_shape(config)
    model = asdict(block_config(config)) | backbone_options(config, vocab_size)
    unused = ["depth_scaled"]
    if config.search.latency.timing == "inference":
        unused += ["recompute", "dropout"]
    used = {size for name in operations for size in OWN_OPTIONS.get(name, ())}
    unused += [size for sizes in OWN_OPTIONS.values() for size in sizes if size not in used]
    model = {key: value for key, value in model.items() if key not in unused}
    return {"batch_size": batch, "segment": segment, "memory": memory, "vocab_size": vocab_size, **model}


def count_flops(config: Config, counts: np.ndarray) -> CostTable:
    """FLOPs per token of a forward pass; a multiply-add counts as two. They depend on sizes only, not on the device.

    counts [V]: how often each token occurs in the training text. An adaptive output layer costs less for frequent
    tokens.
    """
    sizes = block_config(config)
    with torch.device("meta"):  # only shapes are needed
        head = build_fixed([], config, len(counts)).head
    shares = [share for _, share in cluster_table(counts, config.model.cutoffs)]
    overhead = head.flops(shares) if isinstance(head, AdaptiveSoftmax) else head.flops()
    blocks = {name: float(cls.flops(sizes, *batch_shape(config))) for name, cls in OPERATIONS.items()}
    return CostTable(FLOPS, float(overhead), blocks, cost_options(config, len(counts), list(OPERATIONS)))
