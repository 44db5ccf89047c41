"""The SuperNet: a Transformer-XL whose blocks hold all candidate operations.

Mandava et al. 2020, arXiv 2009.04534, section 3. N blocks, O candidate operations.
"""

import math

import torch
from torch import Tensor, nn

from models.operations.operation import BlockConfig, Segment, State, extend, limit
from models.operations.registry import build_operation
from models.transformer_xl import TransformerXL
from nas.core.config import Config
from nas.core.pattern import resolve_block
from nas.data.corpus import Corpus
from nas.training.build import backbone_options, block_config

Branches = tuple[list[int], Tensor | None]  # indices of the operations that a block runs, and their weights (None: 1)


class StochasticBlock(nn.Module):
    """x + sum of weight * operation(x) over the operations in `choice`; the others do not run.

    The block keeps its inputs and tokens with every choice, because the next segment may choose an operation that reads
    them. So no operation carries a state: linear attention reads the inputs again, from an empty state. Raises
    RuntimeError if `choice` is not set.
    """

    def __init__(self, operations: list[tuple[str, dict[str, int]]], config: BlockConfig):
        """operations: names and sizes."""
        super().__init__()
        self.candidates = nn.ModuleList(build_operation(name, config, **sizes) for name, sizes in operations)
        for candidate in self.candidates:
            candidate.carries_state = False
        self.carries_state = False
        self.d_model = config.d_model
        reaches = [candidate.reach for candidate in self.candidates]
        self.reach = None if None in reaches else max(reaches)
        self.period = math.lcm(*(candidate.period for candidate in self.candidates))
        self.stride = math.lcm(*(candidate.stride for candidate in self.candidates))
        self.choice: Branches | None = None  # None until the SuperNet sets a mixture or a path

    def begin(self, rows: int) -> State:
        weight = next(self.parameters())
        memory = weight.new_zeros(rows, 0, self.d_model)
        return {"memory": memory, "tokens": memory.new_zeros(rows, 0, dtype=torch.int64)}

    def forward(self, x: Tensor, state: State, segment: Segment) -> tuple[Tensor, State]:
        if self.choice is None:
            raise RuntimeError("no operation is chosen; call set_mixture() or set_path() first")
        (chosen, weights), past = self.choice, segment._replace(tokens=state["tokens"])
        branches = []
        for candidate in (self.candidates[index] for index in chosen):
            branch, _ = candidate(x, candidate.remember(state["memory"], past), segment)
            branches.append(branch)
        kept = limit(segment.kept, self.reach)
        new = {"memory": x, "tokens": segment.tokens}
        state = {name: extend(state[name], value, kept) for name, value in new.items()}
        if weights is None:
            return sum(branches, start=x), state
        for weight, branch in zip(weights, branches, strict=True):
            x = torch.addcmul(x, branch.to(x.dtype), weight)  # in bf16 the weight's gradient would lose digits
        return x, state


def build_supernet(config: Config, corpus: Corpus) -> TransformerXL:
    """The SuperNet of a configuration."""
    operations, block = [resolve_block(name, config.shape) for name in config.search.operations], block_config(config)
    layers = [StochasticBlock(operations, block) for _ in range(config.model.blocks)]
    return TransformerXL(layers, block, corpus.vocab_size, **backbone_options(config, corpus.vocab_size))


def set_mixture(supernet: TransformerXL, weights: Tensor) -> None:
    """Make the next forward passes run all candidates, weighted by a relaxed sample [N, O]."""
    weights = weights.to(supernet.embedding.weight.device)
    for block in supernet.blocks:
        block.choice = None  # old rows would keep the weights' gradient on the stream of an earlier step
    for block, row in zip(supernet.blocks, weights, strict=True):
        block.choice = list(range(len(row))), row


def set_path(supernet: TransformerXL, path: list[int], gates: Tensor | None = None) -> None:
    """Make the next forward passes run one operation per block.

    gates [N]: factors of the branches, which pass gradients to the logits in straight-through estimation.
    """
    rows = [None] * len(path) if gates is None else gates.to(supernet.embedding.weight.device).split(1)
    for block, index, row in zip(supernet.blocks, path, rows, strict=True):
        block.choice = [index], row
