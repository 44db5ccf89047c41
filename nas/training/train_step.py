"""A training step of the weights, the same in search and retraining. B batch, L segment."""

import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from models.softmax import FullSoftmax, has_few_logits
from models.transformer_xl import Memories, TransformerXL
from nas.core.config import SHORT_PARTS, TrainOptions
from nas.data.loader import ContextBatches
from nas.training import distributed
from nas.training.device import WORTH_STEPS, Runtime, compile_operations
from nas.training.optimizer import TailAverage, WeightsOptimizer


@dataclass
class Batch:
    """tokens and targets [B, L], the nll of the targets by another predictor [B, L], or None, and the memories of the
    same rows, which are None at the start of the rows.
    """

    tokens: Tensor
    targets: Tensor
    beside: Tensor | None
    memories: Memories | None

    def map(self, function: Callable) -> "Batch":
        """The batch with function(tensor) in place of each tensor, those of the memories at last."""
        own = (None if x is None else function(x) for x in (self.tokens, self.targets, self.beside))
        return Batch(*own, self.memories and self.memories.map(function))

    def split(self, parts: int) -> list["Batch"]:
        """The rows in equal parts."""
        if parts == 1:
            return [self]
        return [self.map(lambda x, part=part: x.chunk(parts)[part]) for part in range(parts)]

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of map()."""
        found = []
        self.map(found.append)
        return found

    def shorten(self) -> "Batch":
        """Short segments without memories, SHORT_PARTS of each row (arXiv 2012.15832, section 3)."""
        length = self.tokens.shape[1] // SHORT_PARTS
        return replace(self, memories=None).map(lambda x: x.reshape(-1, length))


class Stream:
    """A stream of segments, and the memories that the network carries from one segment to the next."""

    def __init__(self, loader: ContextBatches):
        self.loader = loader
        self.memories: Memories | None = None  # set by the caller after it has run the network

    def next(self) -> Batch:
        return Batch(*self.loader.next(), self.memories)

    def state_dict(self) -> dict:
        """The position and the memories. On rank 0 they are the memories of all ranks."""
        memories = self.memories and self.memories.map(distributed.gather_rows)._asdict()
        return {"position": self.loader.position, "memories": memories}

    def load_state_dict(self, state: dict) -> None:
        loader, memories = self.loader, state["memories"]
        loader.position = state["position"]
        self.memories = memories and Memories(**memories).map(lambda x: x[loader.own].to(loader.device))


def residual_loss(nll: Tensor, beside: Tensor | None) -> Tensor:
    """The mean of a network's nll and of the nll of its even mixture with another predictor, whose nll is given. So the
    network learns most where the other one fails (residual learning, arXiv 2210.14431). None: the nll of the network.
    """
    return nll if beside is None else (nll + math.log(2) - torch.logaddexp(-nll, -beside)) / 2


def can_replay(network: TransformerXL, options: TrainOptions, runtime: Runtime) -> bool:
    """Whether a step of a network can be a CUDA graph: neither its shapes nor its numbers may change between steps."""
    tokens = options.batch_size // options.grad_accum_steps * options.segment
    static = isinstance(network.head, FullSoftmax) or has_few_logits(tokens, len(network.embedding.weight))
    alone = distributed.world_size() == 1
    return runtime.is_gpu and alone and static and not network.recompute and network.grid is None


class ReplayedStep:
    """A step as a CUDA graph (torch.cuda.CUDAGraph), which a GPU runs without waiting for Python. A graph belongs to
    the shapes of a batch. A step runs as usual until the same shapes came REPEATS times in turn.
    """

    REPEATS = 3

    def __init__(self, step: Callable, network: TransformerXL, memory: int, possible: bool):
        """memory: train.memory. possible: whether step(batch), which returns nll and memories, can be a graph."""
        self.step, self.stride, self.memory, self.possible = step, network.stride, memory, possible
        self.forget()

    def forget(self) -> None:
        self.graphs, self.pool, self.last, self.repeats = {}, None, None, 0

    def __call__(self, batch: Batch, variant: Hashable = None) -> tuple[Tensor, Memories]:
        """Return what step(batch) returns. The next call overwrites the memories. variant: tells apart unlike steps."""
        if not self.possible:
            return self.step(batch)
        offset = batch.memories.offset if batch.memories else 0
        # Masks of sparse attention depend on the place of a segment; operations are compiled once memories are full.
        key = variant, *(x.shape for x in batch.tensors()), offset % self.stride, offset >= self.memory
        self.repeats, self.last = self.repeats + 1 if key == self.last else 1, key
        if key not in self.graphs:
            if self.repeats > self.REPEATS:
                self.try_capture(key, batch)
            if key not in self.graphs:
                return self.run_once(batch)
        graph, inputs, nll = self.graphs[key]
        for own, given in zip(inputs.tensors(), batch.tensors(), strict=True):
            if own is not given:
                own.copy_(given)
        graph.replay()
        return nll.clone(), inputs.memories and inputs.memories._replace(offset=offset + batch.tokens.shape[1])

    def run_once(self, batch: Batch) -> tuple[Tensor, Memories]:
        """The step without a graph. If it finds no memory beside that of the graphs, they are given up."""
        try:
            return self.step(batch)
        except torch.OutOfMemoryError:
            if not self.graphs:
                raise
        self.possible = False
        self.forget()
        torch.cuda.empty_cache()
        return self.step(batch)

    def try_capture(self, key: Hashable, batch: Batch) -> None:
        try:
            with torch.cuda.stream(torch.cuda.current_stream()):  # restores the stream after an error
                self.graphs[key] = self.capture(batch)
        except RuntimeError as error:  # such as torch.AcceleratorError, if an operation has to wait for the GPU
            print(f"NOTICE: no CUDA graph: {str(error).splitlines()[0]}", flush=True)
            self.possible = False
            self.forget()

    def capture(self, batch: Batch) -> tuple["torch.cuda.CUDAGraph", Batch, Tensor]:
        """A graph, the batch that it reads, and the nll that it writes. It writes the new memories over the old."""
        inputs, graph = batch.map(torch.clone), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            nll, memories = self.step(inputs)
            if inputs.memories:
                for own, new in zip(inputs.memories.tensors(), memories.tensors(), strict=True):
                    own.copy_(new)
        self.pool = graph.pool()
        return graph, inputs, nll


class BatchRunner:
    """Runs batches through a network, forward and, if asked, backward. prepare: called before each forward pass."""

    def __init__(
        self, network: nn.Module, options: TrainOptions, runtime: Runtime, prepare: Callable[[], None] = lambda: None
    ):
        self.network, self.options, self.runtime, self.prepare = network, options, runtime, prepare

    def __call__(self, batch: Batch, backward: Callable[[Tensor], None] | None = None) -> tuple[Tensor, Memories]:
        """Return the mean nll of the batch over all ranks, in nats per token and detached, and the new memories.

        The rows are read in train.grad_accum_steps parts. For each part, backward() gets its share of this rank's mean.
        """
        parts, total, memories = batch.split(self.options.grad_accum_steps), 0.0, []
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            self.prepare()
            with distributed.sync_gradients(self.network, last), self.compile_if_repeated(part):
                with self.runtime.autocast():
                    nll, new_memories = self.network(part.tokens, part.targets, part.memories, self.options.memory)
                if backward:
                    backward(residual_loss(nll, part.beside).mean() / len(parts))
            total = total + nll.detach().mean() / len(parts)
            memories.append(new_memories)
        return distributed.all_reduce_mean(total), Memories.join(memories)

    def compile_if_repeated(self, batch: Batch):
        """Disable compiled code while the memories fill. Short segments have no memories, and all have one shape."""
        full = batch.memories is not None and batch.memories.offset >= self.options.memory
        short = batch.tokens.shape[1] < self.options.segment
        return nullcontext() if full or short else self.runtime.disable_compile()


class TrainStep:
    """Trains the weights of a network, one batch at a time."""

    def __init__(
        self,
        network: TransformerXL,
        options: TrainOptions,
        total_steps: int,
        runtime: Runtime,
        sampled: bool = False,
        short_share: float = 0.0,
        prepare: Callable[[], None] = lambda: None,
        until: int | None = None,
    ):
        """sampled: whether each step samples the operations to run; only these get gradients. short_share: the first
        share of the steps, which reads short segments. prepare: as in BatchRunner. until: last step, None: total_steps.
        """
        self.runtime, self.sampled, self.short_steps = runtime, sampled, short_share * total_steps
        self.optimizer = WeightsOptimizer(network, options, total_steps, runtime.muon_bf16)
        self.average = TailAverage(self.optimizer.parameters, options.average_share, total_steps)
        if runtime.compile and (options.compile == "always" or (until or total_steps) >= WORTH_STEPS):
            rows = options.batch_size // (distributed.world_size() * options.grad_accum_steps)
            compile_operations(network, options, runtime, rows)
        if sampled:
            distributed.broadcast_parameters(network)
        wrapped = network if sampled else distributed.wrap_ddp(network)
        self.run_batch = BatchRunner(wrapped, options, runtime, prepare)
        possible = can_replay(network, options, runtime) and not sampled
        self.replayed = ReplayedStep(self.train_once, network, options.memory, possible)

    def __call__(self, step: int, batch: Batch, variant: Hashable = None) -> tuple[Tensor, Memories | None]:
        """Train on a batch, at the learning rate of step `step`; return what BatchRunner returns.

        In the first short_share of the steps, it trains on short segments and returns no memories.
        If the loss or the gradient is not finite, the weights do not change, and a FloatingPointError is raised on a
        CPU. On a GPU, for which the step does not wait, the nll is NaN instead. variant: of ReplayedStep.
        """
        self.optimizer.set_lr(step)
        short = step <= self.short_steps
        nll, memories = self.replayed(batch.shorten() if short else batch, variant)
        self.average.update(step)
        return nll, None if short else memories

    def train_once(self, batch: Batch) -> tuple[Tensor, Memories]:
        self.optimizer.zero_grad()
        nll, memories = self.run_batch(batch, torch.Tensor.backward)
        if self.sampled:
            distributed.all_reduce_gradients(self.optimizer.parameters)
        self.check("the training loss", nll)
        norm = self.optimizer.step()
        self.check("the gradient's norm", norm)
        if self.runtime.is_gpu:
            nll = nll + 0 * norm  # NaN if the gradient is not finite
        return nll, memories

    def check(self, name: str, value: Tensor) -> None:
        if not self.runtime.is_gpu and not math.isfinite(value.item()):
            raise FloatingPointError(f"{name} is {value.item()}")

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "average": self.average.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])
        self.replayed.forget()
