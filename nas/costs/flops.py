"""FLOPs of operations and patterns."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.operations.operation import Segment
from models.operations.registry import build_operation
from models.relative_attention import sinusoidal_encodings
from nas.core.config import Config
from nas.core.pattern import interleaved, resolve_block
from nas.costs.cost_table import FLOPS, CostTable
from nas.data.optimal_cutoffs import cluster_table
from nas.training.build import block_config, build_fixed
from nas.training.evaluation import evaluation_lengths


def batch_shape(config: Config) -> tuple[int, int, int]:
    """(batch size, segment, memory), in tokens, at which costs are counted and timed."""
    timing, (segment, memory) = config.search.latency.timing, evaluation_lengths(config)
    if timing == "training":
        return config.train.batch_size, config.train.segment, config.train.memory
    return (1, 1, segment + memory - 1) if timing == "generation" else (config.evaluate.batch_size, segment, memory)


def with_latency(config: Config, **options) -> Config:
    return replace(config, search=replace(config.search, latency=replace(config.search.latency, **options)))


def count_flops(config: Config, counts: np.ndarray, operations: list[str] | None = None) -> CostTable:
    """FLOPs per token of a forward pass, also with search.latency.timing=generation; a multiply-add counts as two.

    counts [V]: of tokens in the training text; an adaptive output layer costs less for frequent ones. operations: those
    of the table, besides attention and dense; None: those of the search.
    """
    if config.search.latency.timing == "generation":
        config = with_latency(config, timing="inference")
    with torch.device("meta"):  # only shapes are needed
        head = build_fixed([], config, len(counts)).head
    shares = [share for _, share in cluster_table(counts, config.model.cutoffs)]
    names = list(dict.fromkeys([*(operations or config.search.operations), *interleaved(2)]))
    blocks = {name: operation_flops(name, config) for name in names}
    return CostTable(FLOPS, float(head.flops(shares)), blocks)


@torch.no_grad()
def operation_flops(block: str, config: Config) -> float:
    """FLOPs of an operation per token of a segment, `memory` positions into the stream.

    Only matrix products count, including the masked part of the scores and the positions that fill rows or chunks.
    """
    (name, sizes), options = resolve_block(block, config.shape), block_config(config)
    batch, segment, memory = batch_shape(config)
    with torch.device("meta"):
        operation, x = build_operation(name, options, **sizes), torch.empty(batch, segment, options.d_model)
        past, tokens = torch.empty(batch, memory, options.d_model), torch.empty(batch, memory + segment).long()
    encodings = sinusoidal_encodings(memory + segment, options.d_model, device=x.device) if options.relative else None
    own = Segment(encodings, memory, memory, memory, tokens[:, memory:])
    state = operation.remember(past, own._replace(tokens=tokens[:, :memory]))
    with FlopCounterMode(display=False, custom_mapping=SOLVER) as counter:
        operation(x, state, own)
    return counter.get_total_flops() / (batch * segment)


def solver_flops(system: tuple, right_side: tuple, *_, out_shape=None, **__) -> int:
    """Half of those of a product. The arguments are the shapes [.., C, C] and [.., C, F] of a triangular system."""
    return math.prod(right_side) * system[-1]


SOLVER = {torch.ops.aten.linalg_solve_triangular: solver_flops}  # which PyTorch does not count
