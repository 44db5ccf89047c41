"""A training step of the weights, the same in search and retraining. B batch, L segment."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.transformer_xl import Memories, TransformerXL
from nas.core.config import SHORT_PARTS, TrainOptions
from nas.data.loader import ContextBatches
from nas.training import distributed
from nas.training.compile import compile_operations
from nas.training.device import DeviceContext
from nas.training.optimizer import TailAverage, WeightsOptimizer


@dataclass
class Batch:
    """tokens and targets [B, L], and the memories of the same rows, which are None at the start of the rows."""

    tokens: Tensor
    targets: Tensor
    memories: Memories | None

    def split(self, parts: int) -> list["Batch"]:
        """The rows in equal parts."""
        if parts == 1:
            return [self]
        memories = [None] * parts if self.memories is None else self.memories.split(parts)
        return list(map(Batch, self.tokens.chunk(parts), self.targets.chunk(parts), memories))

    def shorten(self) -> "Batch":
        """Short segments without memories, SHORT_PARTS of each row (arXiv 2012.15832, section 3)."""
        length = self.tokens.shape[1] // SHORT_PARTS
        return Batch(self.tokens.reshape(-1, length), self.targets.reshape(-1, length), None)


class Stream:
    """A stream of segments, and the memories that the network carries from one segment to the next."""

    def __init__(self, loader: ContextBatches):
        self.loader = loader
        self.memories: Memories | None = None  # set by the caller after it has run the network

    def next(self) -> Batch:
        if self.loader.at_start:
            self.memories = None
        return Batch(*self.loader.next(), self.memories)

    def state_dict(self) -> dict:
        """The position and the memories. On rank 0 they are the memories of all ranks."""
        memories = self.memories and self.memories.map(distributed.gather_rows)._asdict()
        return {"position": self.loader.position, "memories": memories}

    def load_state_dict(self, state: dict) -> None:
        loader, memories = self.loader, state["memories"]
        loader.position = state["position"]
        self.memories = memories and Memories(**memories).map(lambda x: x[loader.own].to(loader.device))


class BatchRunner:
    """Runs batches through a network, forward and, if the caller asks for it, backward."""

    def __init__(self, network: nn.Module, options: TrainOptions, context: DeviceContext):
        self.network, self.options, self.context = network, options, context

    def __call__(self, batch: Batch, backward: Callable[[Tensor], None] | None = None) -> tuple[Tensor, Memories]:
        """Return the mean nll of the batch over all ranks, in nats per token and detached, and the new memories.

        The rows are read in train.grad_accum_steps parts. For each part, backward() gets its share of this rank's mean.
        """
        parts, total, memories = batch.split(self.options.grad_accum_steps), 0.0, []
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            with distributed.sync_gradients(self.network, last), self.compile_if_repeated(part):
                with self.context.autocast():
                    nll, new_memories = self.network(part.tokens, part.targets, part.memories, self.options.memory)
                loss = nll.mean() / len(parts)
                if backward:
                    backward(loss)
            total = total + loss.detach()
            memories.append(new_memories)
        return distributed.all_reduce_mean(total), Memories.join(memories)

    def compile_if_repeated(self, batch: Batch):
        """Disable compiled code while the memories fill. Short segments have no memories, and all have one shape."""
        full = batch.memories is not None and batch.memories.offset >= self.options.memory
        short = batch.tokens.shape[1] < self.options.segment
        return nullcontext() if full or short else self.context.disable_compile()


class TrainStep:
    """Trains the weights of a network, one batch at a time."""

    def __init__(
        self,
        network: TransformerXL,
        options: TrainOptions,
        total_steps: int,
        context: DeviceContext,
        sampled: bool = False,
        short_share: float = 0.0,
    ):
        """sampled: whether each step samples the operations to run; only these get gradients. short_share: the first
        share of the steps, which reads short segments.
        """
        self.context, self.sampled, self.short_steps = context, sampled, short_share * total_steps
        self.optimizer = WeightsOptimizer(network, options, total_steps, context.muon_bf16)
        self.average = TailAverage(self.optimizer.parameters, options.average_share, total_steps)
        if context.compile:
            rows = options.batch_size // (distributed.world_size() * options.grad_accum_steps)
            compile_operations(network, options, context, rows)
        if sampled:
            distributed.broadcast_parameters(network)
        self.run_batch = BatchRunner(network if sampled else distributed.wrap_ddp(network), options, context)

    def __call__(self, step: int, batch: Batch) -> tuple[Tensor, Memories | None]:
        """Train on a batch, at the learning rate of step `step`; return what BatchRunner returns.

        In the first short_share of the steps, it trains on short segments and returns no memories.

        If the loss or the gradient is not finite, the weights do not change, and a FloatingPointError is raised on a
        CPU. On a GPU, for which the step does not wait, the nll is NaN instead.
        """
        self.optimizer.set_lr(step)
        self.optimizer.zero_grad()
        short = step <= self.short_steps
        nll, memories = self.run_batch(batch.shorten() if short else batch, torch.Tensor.backward)
        if self.sampled:
            distributed.all_reduce_gradients(self.optimizer.parameters)
        self.check("the training loss", nll)
        norm = self.optimizer.step()
        self.check("the gradient's norm", norm)
        self.average.update(step)
        if self.context.is_gpu:
            nll = nll + 0 * norm  # NaN if the gradient is not finite
        return nll, None if short else memories

    def check(self, name: str, value: Tensor) -> None:
        if not self.context.is_gpu and not math.isfinite(value.item()):
            raise FloatingPointError(f"{name} is {value.item()}")

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "average": self.average.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])
