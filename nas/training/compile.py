"""Faster steps on a GPU: operations by torch.compile, launches by CUDA graphs. Where something is not supported, a line
says so, and the step is to run as it is (whether it can after a capture that failed, no GPU has shown yet).

A hard search samples another path in each step. So operations are compiled one by one, never the network: whatever path
they stand in, they are the same. A small model's step is as long as its launches take. Where every step runs the same
(retraining, soft search) the whole step becomes one CUDA graph; in a hard search each operation has graphs of its own,
with memory of their own, so that they can be replayed in any order. (The graphs that torch.compile itself makes share
memory, and hold for the order in which they were recorded: each new path would be recorded anew.)
"""

import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from models.attention import Positions, sinusoidal_encodings
from models.operations import Operation, SparseOperation
from models.softmax import STATIC_LOGITS, AdaptiveSoftmax
from models.transformer_xl import TransformerXL
from nas.core.config import Config
from nas.training.device import DeviceContext

BACKEND = "inductor"


WARM_UP = 3  # steps of one kind that run before a graph is captured: libraries and optimizer have to be ready


RECOMPILE_LIMIT = 128  # an operation's code is compiled for each kind, shape, and mode of its use, once for all blocks


LAUNCH_BOUND = 2**22  # values in a batch's residual stream, up to which launches are taken to last longer than work


def is_launch_bound(config: Config, rows: int) -> bool:
    """Whether a batch of so many rows is so small that a graph is worth its memory."""
    return rows * config.train.segment * config.model.d_model <= LAUNCH_BOUND


def is_same_everywhere(network: TransformerXL) -> bool:
    """Whether a step does the same wherever in the stream its segment stands: a graph could not know. Masks of sparse
    attention and embeddings of a grid depend on the place."""
    sparse = any(isinstance(operation, SparseOperation) for operation in operations_of(network))
    return network.grid is None and not sparse


def has_fixed_shapes(network: TransformerXL, tokens: int) -> bool:
    """Whether the output layer does the same for all batches of so many tokens, or tails for the tokens in them."""
    adaptive = isinstance(network.head, AdaptiveSoftmax)
    return not adaptive or tokens * network.head.cluster_bounds[-1] <= STATIC_LOGITS


def operations_of(network: nn.Module) -> list[Operation]:
    return [module for module in network.modules() if isinstance(module, Operation)]


Result = TypeVar("Result")


Inputs = tuple[Tensor, Tensor | None, Positions]  # of an operation


def usual_inputs(network: TransformerXL, config: Config, context: DeviceContext, rows: int) -> Inputs:
    """Zeros in the shapes of training, with full memories."""
    train, d_model = config.train, network.d_model
    x = torch.zeros(rows, train.segment, d_model, device=context.device, requires_grad=True)
    memory = torch.zeros(rows, train.memory, d_model, device=context.device) if train.memory else None
    encodings = (
        sinusoidal_encodings(train.memory + train.segment, d_model, x.dtype, x.device) if network.relative else None
    )
    return x, memory, Positions(encodings)


def compile_operations(network: TransformerXL, config: Config, context: DeviceContext, rows: int) -> None:
    """Compile the network's operations, for batches of so many rows, if that works, which is tried on one of each
    kind."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = 8 * RECOMPILE_LIMIT
    # What the compiler notes in passing is not for who trains; this it says at any time, having looked itself.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    operations, begun = operations_of(network), time.perf_counter()
    kinds = {type(operation): operation for operation in operations}
    try:
        with context.fork_rng(), warnings.catch_warnings(), context.autocast():
            warnings.simplefilter("ignore")
            for operation in operations:
                operation.forward = torch.compile(operation.forward, backend=BACKEND, dynamic=False)
            for operation in kinds.values():
                try_operation(operation, *usual_inputs(network, config, context, rows))
    except Exception as error:  # whatever a compiler may raise, it must not end a run that can go on without
        restore(operations)
        print(f"NOTICE: train.compile is off: {one_line(error)}", flush=True)
        return
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    print(f"compiled {names} in {time.perf_counter() - begun:.0f} s", flush=True)


def try_operation(operation: Operation, *inputs) -> None:
    """A forward and backward pass, and a forward pass without gradients."""
    operation.train()(*inputs).float().sum().backward()
    with torch.no_grad():
        operation.eval()(*inputs)
    operation.train().zero_grad()


def restore(operations: list[Operation]) -> None:
    for operation in operations:
        operation.__dict__.pop("forward", None)  # what stood before the class's own
        operation.train()


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class GraphedOperation:
    """Stands for an operation's forward(): replays its CUDA graphs where the inputs are those of training with full
    memories; one graph for forward and one for backward while it trains, one of forward alone for what is not to
    learn. Else the operation runs as before."""

    def __init__(self, operation: Operation, inputs: Inputs):
        x, memory, positions = inputs
        self.operation, self.plain = operation, operation.forward
        self.shapes, self.encodings = (shape_of(x), shape_of(memory)), positions.encodings
        tensors = (x,) if memory is None else (x, memory)
        self.learning = graph_both_passes(Bound(operation, self.plain, positions).train(), tensors)
        bound = Bound(operation, self.plain, positions).eval()
        with torch.no_grad():
            bound(*tensors)  # so that all is ready
            self.scoring = capture(bound, tensors)
        operation.train()

    def __call__(self, x: Tensor, memory: Tensor | None, positions: Positions) -> Tensor:
        tensors, learns = (x,) if memory is None else (x, memory), torch.is_grad_enabled()
        usual = self.shapes == (shape_of(x), shape_of(memory)) and positions.encodings is self.encodings
        if not usual or learns != self.operation.training:
            return self.plain(x, memory, positions)
        if learns:
            return self.learning(*tensors)
        replay, places, output = self.scoring
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        replay()
        return output


class Bound(nn.Module):
    """An operation at fixed positions, of tensors alone, as capturing wants it."""

    def __init__(self, operation: Operation, forward: Callable[..., Tensor], positions: Positions):
        super().__init__()
        self.operation, self.run, self.positions = operation, forward, positions

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return self.run(x, memory, self.positions)


def shape_of(x: Tensor | None) -> torch.Size | None:
    return None if x is None else x.shape


def graph_operations(network: TransformerXL, config: Config, context: DeviceContext, rows: int) -> None:
    """Give each operation its graphs."""
    operations = operations_of(network)
    before = [operation.forward for operation in operations]
    try:
        with context.fork_rng(), context.autocast():
            for operation in operations:
                operation.forward = GraphedOperation(operation, usual_inputs(network, config, context, rows))
    except Exception as error:
        for operation, forward in zip(operations, before, strict=True):
            operation.forward = forward
            operation.train()
        print(f"NOTICE: no CUDA graphs of operations: {one_line(error)}", flush=True)


def graph_both_passes(module: nn.Module, tensors: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    return torch.cuda.make_graphed_callables(module, tensors)


class CapturedStep:
    """work(*inputs), replayed as a CUDA graph where `kind` and the inputs' shapes are those of earlier calls.

    inputs: tensors, or None. work must do all with tensors that stay where they are: parameters, optimizer state, and
    its inputs, which are copied into place. It returns tensors or None, which the next replay overwrites.
    """

    def __init__(self, work: Callable[..., tuple]):
        self.work, self.works, self.side = work, True, None
        self.calls: dict[tuple, int] = {}
        self.graphs: dict[tuple, tuple[Callable[[], None], list, tuple]] = {}

    def __call__(self, kind: str, *inputs: Tensor | None) -> tuple:
        key = (kind, *(None if x is None else x.shape for x in inputs))
        self.calls[key] = self.calls.get(key, 0) + 1
        self.side = self.side or side_stream()
        if not self.works or self.calls[key] <= WARM_UP:
            return warm_up(self.work, inputs, self.side)
        if key not in self.graphs:
            try:
                self.graphs[key] = capture(self.work, inputs)
            except Exception as error:
                self.works = False
                print(f"NOTICE: no CUDA graph of the step: {one_line(error)}", flush=True)
                return warm_up(self.work, inputs, self.side)
        replay, places, outputs = self.graphs[key]
        for place, x in zip(places, inputs, strict=True):
            if place is not None:
                place.copy_(x)
        replay()
        return outputs


def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def warm_up(work: Callable[..., tuple], inputs: tuple, side: torch.cuda.Stream) -> tuple:
    """work(*inputs), on another stream than the usual one, as capturing asks for."""
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        outputs = work(*inputs)
    current.wait_stream(side)
    return outputs


def capture(work: Callable[..., Result], inputs: tuple) -> tuple[Callable[[], None], list, Result]:
    """(what replays work, where its inputs must be put before, its outputs). Nothing is computed yet."""
    places = [None if x is None else x.clone() for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work(*places)
    return graph.replay, places, outputs
