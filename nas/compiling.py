"""Faster steps on a GPU: operations by torch.compile, launches by CUDA graphs. Where something is not supported, a line
says so, and the step runs as it is.

A hard search samples another path in each step. So operations are compiled one by one, never the network: whatever path
they stand in, they are the same. On a GPU a small model's step is as long as its launches take. Where every step runs
the same (retraining, soft search) the whole step is one CUDA graph; in a hard search each operation has its own.
"""

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.attention import Positions, sinusoids
from models.operations import Operation, SparseOperation
from models.transformer_xl import TransformerXL
from nas.config import Config
from nas.device import Machine

BACKEND = "inductor"
WARM_UP = 3  # steps of one kind that run before a graph is captured: libraries and optimizer have to be ready
RECOMPILE_LIMIT = 128  # an operation's code is compiled for each kind, shape, and mode of its use, once for all blocks


def compile_operations(network: TransformerXL, config: Config, machine: Machine, rows: int, graphs: bool) -> bool:
    """Compile the network's operations for training batches of so many rows with full memories; graphs: with a CUDA
    graph of each. Returns whether that works, which is tried on one operation of each kind."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = 8 * RECOMPILE_LIMIT
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # the compiler's own looking
    operations, begun = operations_of(network), time.perf_counter()
    kinds = {type(operation): operation for operation in operations}
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the compiler notes in passing is not for who trains
            for operation in operations:
                operation.compile(backend=BACKEND, dynamic=False, **({"mode": "reduce-overhead"} if graphs else {}))
            for operation in kinds.values():
                try_operation(operation, network, config, machine, rows)
    except Exception as error:  # whatever a compiler may raise, it must not end a run that can go on without
        for operation in operations:
            operation._compiled_call_impl = None
        print(f"NOTICE: train.compile is off: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return False
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    print(f"compiled {names} in {time.perf_counter() - begun:.0f} s", flush=True)
    return True


def operations_of(network: nn.Module) -> list[Operation]:
    return [module for module in network.modules() if isinstance(module, Operation)]


def try_operation(operation: Operation, network: TransformerXL, config: Config, machine: Machine, rows: int) -> None:
    """A forward and backward pass, and a forward pass without gradients."""
    train, d_model = config.train, network.d_model
    x = torch.zeros(rows, train.segment, d_model, device=machine.device, requires_grad=True)
    memory = torch.zeros(rows, train.memory, d_model, device=machine.device) if train.memory else None
    table = sinusoids(train.memory + train.segment, d_model, device=machine.device) if network.relative else None
    positions = Positions(table, train.memory)
    with machine.autocast():
        operation.train()(x, memory, positions).float().sum().backward()
        with torch.no_grad():
            operation.eval()(x, memory, positions)
    operation.train().zero_grad()


class CapturedStep:
    """work(*inputs), replayed as a CUDA graph where `kind` and the inputs' shapes are those of earlier calls.

    inputs: tensors, or None. work must do all with tensors that stay where they are: parameters, optimizer state, and
    its inputs, which are copied into place. It returns tensors or None, which the next replay overwrites.
    """

    def __init__(self, work: Callable[..., tuple]):
        self.work, self.works = work, True
        self.calls: dict[tuple, int] = {}
        self.graphs: dict[tuple, tuple[Callable[[], None], list, tuple]] = {}

    def __call__(self, kind: str, *inputs: Tensor | None) -> tuple:
        key = (kind, *(None if x is None else x.shape for x in inputs))
        self.calls[key] = self.calls.get(key, 0) + 1
        if not self.works or self.calls[key] <= WARM_UP:
            return warm_up(self.work, inputs)
        if key not in self.graphs:
            try:
                self.graphs[key] = capture(self.work, inputs)
            except RuntimeError as error:
                self.works = False
                print(f"NOTICE: no CUDA graph of the step: {str(error).splitlines()[0]}", flush=True)
                return warm_up(self.work, inputs)
        replay, places, outputs = self.graphs[key]
        for place, x in zip(places, inputs, strict=True):
            if place is not None:
                place.copy_(x)
        replay()
        return outputs


def warm_up(work: Callable[..., tuple], inputs: tuple) -> tuple:
    """work(*inputs), on a stream of its own, as capturing asks for."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        outputs = work(*inputs)
    current.wait_stream(side)
    return outputs


def capture(work: Callable[..., tuple], inputs: tuple) -> tuple[Callable[[], None], list, tuple]:
    """(what replays work, where its inputs must be put before, its outputs). Nothing is computed yet."""
    places = [None if x is None else x.clone() for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work(*places)
    return graph.replay, places, outputs


def is_same_everywhere(network: TransformerXL) -> bool:
    """Whether a step does the same wherever in the stream its segment stands: a graph could not know. Masks of sparse
    attention and embeddings of a grid depend on the place."""
    sparse = any(isinstance(operation, SparseOperation) for operation in operations_of(network))
    return network.grid is None and not sparse
