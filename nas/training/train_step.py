"""A step of the weights, the same for search and retraining: forward and backward pass, the mean over ranks, the
update; compiled and captured where that is wanted.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor, nn

from models.transformer_xl import Memories, TransformerXL
from nas.core.config import Config
from nas.data.loader import Batch, ContextBatches
from nas.training import distributed as ranks
from nas.training.compile import (
    CapturedStep,
    compile_operations,
    graph_operations,
    has_fixed_shapes,
    is_launch_bound,
    is_same_everywhere,
)
from nas.training.device import DeviceContext
from nas.training.optimizer import WeightsOptimizer


def run_batch(
    model: nn.Module,
    batch: Batch,
    config: Config,
    context: DeviceContext,
    backward: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Memories]:
    """Mean nll of a batch over all ranks, detached, and the memories for the stream's next batch.

    The rows are read in train.grad_accum_steps parts, and backward(), where given, gets each part's share of this rank's
    mean. On a CPU a loss that is not finite raises FloatingPointError; on a GPU nobody waits for it: see Trainer.
    """
    parts, total, memories = batch.parts(config.train.grad_accum_steps), 0.0, []
    for number, part in enumerate(parts, start=1):
        usual = nullcontext() if has_full_memories(part, config) else context.disable_compile()
        with ranks.sync_gradients(model, wanted=number == len(parts)), usual:
            with context.autocast():
                nll, after = model(part.tokens, part.targets, part.memories, config.train.memory)
            loss = nll.mean() / len(parts)
            if backward:
                backward(loss)
        total = total + loss.detach()
        memories.append(after)
    total = ranks.all_reduce_mean(total)
    if not context.is_gpu and not math.isfinite(total.item()):
        raise FloatingPointError(f"the training loss is {total.item()}")
    return total, Memories.join(memories)


def has_full_memories(batch: Batch, config: Config) -> bool:
    return batch.memories is not None and batch.memories.offset >= config.train.memory


class TrainStep:
    """Trains the weights of a network, a batch at a time."""

    def __init__(self, network: TransformerXL, config: Config, total_steps: int, context: DeviceContext, sampled: bool):
        """sampled: whether steps run different operations, as those of a hard search do."""
        self.config, self.context, self.sampled = config, context, sampled
        self.optimizer = WeightsOptimizer(network, config.train, total_steps, context.is_gpu)
        self.captured = self.speed_up(network) if context.compile else None
        if sampled:
            ranks.broadcast_parameters(network)
        self.replica = network if sampled else ranks.wrap_ddp(network)

    def speed_up(self, network: TransformerXL) -> CapturedStep | None:
        """Compile, and capture what is worth it. Parts of a batch would overwrite each other's gradients in a graph,
        recomputation draws random numbers anew, and DistributedDataParallel has work beside the step."""
        train, context = self.config.train, self.context
        rows = train.batch_size // (ranks.world_size() * train.grad_accum_steps)
        compile_operations(network, self.config, context, rows)
        plain = context.is_gpu and train.grad_accum_steps == 1 and not self.config.model.recompute
        if not plain or not is_launch_bound(self.config, rows) or not is_same_everywhere(network):
            return None
        if self.sampled:
            graph_operations(network, self.config, context, rows)
            return None
        fixed = has_fixed_shapes(network, rows * train.segment)
        return CapturedStep(self.update_flat) if fixed and ranks.world_size() == 1 else None

    def __call__(
        self, step: int, batch: Batch, stream: ContextBatches, begin: Callable[[], None] = lambda: None, kind: str = ""
    ) -> Tensor:
        """Step number `step`; returns the mean nll of the batch over all ranks, and leaves the memories to the stream.

        begin() sets what the network is to run. kind: of two steps with the same, begin() does the same.
        Raises FloatingPointError before any weight has changed; on a GPU weights stay, and the nll is NaN.
        """
        self.optimizer.set_lr(step)
        self.begin = begin
        if self.captured is None or not has_full_memories(batch, self.config):
            nll, stream.memories = self.update(batch)
            return nll
        nll, *blocks = self.captured(kind, batch.tokens, batch.targets, *batch.memories.blocks)
        stream.memories = Memories(blocks, batch.memories.offset + batch.tokens.shape[1])
        return nll.clone()  # the next replay writes into it

    def update(self, batch: Batch) -> tuple[Tensor, Memories]:
        self.begin()
        self.optimizer.clear()
        nll, memories = run_batch(self.replica, batch, self.config, self.context, Tensor.backward)
        if self.sampled:
            ranks.all_reduce_gradients(self.optimizer.parameters)
        return nll + self.optimizer.apply(), memories

    def update_flat(self, tokens: Tensor, targets: Tensor, *blocks: Tensor | None) -> tuple:
        """update() from tensors to tensors, as CapturedStep needs it."""
        nll, memories = self.update(Batch(tokens, targets, Memories(list(blocks), self.config.train.memory)))
        return nll, *memories.blocks
