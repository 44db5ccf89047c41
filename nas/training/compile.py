"""torch.compile for the operations of a network.

Operations are compiled one by one, because a hard search samples another path in each step. The whole network changes
with the path, but an operation does not.
"""

import time
import warnings

import torch
from torch import Tensor, nn

from models.attention import Positions
from models.operations import Operation
from models.transformer_xl import TransformerXL
from nas.core.config import TrainOptions
from nas.training.device import DeviceContext

BACKEND = "inductor"
RECOMPILE_LIMIT = 128  # an operation compiles once per kind, shape and mode, and all blocks share the result


def compile_operations(network: TransformerXL, options: TrainOptions, context: DeviceContext, rows: int) -> None:
    """Compile the operations of a network for batches of `rows` rows.

    One operation of each kind runs first. If that fails, nothing is compiled, and a notice gives the reason.
    """
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = 8 * RECOMPILE_LIMIT
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler reads it
    operations, start = [module for module in network.modules() if isinstance(module, Operation)], time.perf_counter()
    kinds = {type(operation): operation for operation in operations}
    methods = {operation: "step" if operation.carries_state else "forward" for operation in operations}
    try:
        with context.fork_rng(), warnings.catch_warnings(), context.autocast():
            warnings.simplefilter("ignore")
            for operation, name in methods.items():
                setattr(operation, name, torch.compile(getattr(operation, name), backend=BACKEND, dynamic=False))
            for operation in kinds.values():
                try_operation(operation, methods[operation], *training_inputs(network, options, context, rows))
    except Exception as error:  # a compiler may raise any error, and the run can continue without it
        for operation, name in methods.items():
            operation.__dict__.pop(name, None)  # restores the method of the class
            operation.train()
        reason = str(error).splitlines()[0] if str(error) else ""
        print(f"NOTICE: train.compile is off: {type(error).__name__}: {reason}", flush=True)
        return
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    print(f"compiled {names} in {time.perf_counter() - start:.0f} s", flush=True)


def training_inputs(
    network: TransformerXL, options: TrainOptions, context: DeviceContext, rows: int
) -> tuple[Tensor, Tensor | None, Positions]:
    """Zeros in the shapes that an operation gets in training with full memories."""
    length, memory_length, d_model = options.segment, options.memory, network.d_model
    x = torch.zeros(rows, length, d_model, device=context.device, requires_grad=True)
    memory = torch.zeros(rows, memory_length, d_model, device=context.device) if memory_length else None
    return x, memory, network.positions(memory_length + length)


def try_operation(operation: nn.Module, method: str, x: Tensor, memory: Tensor | None, positions: Positions) -> None:
    """Run a forward and backward pass, and a forward pass without gradients. method: `forward`, or `step`."""

    def run() -> Tensor:
        if method == "forward":
            return operation(x, memory, positions)
        _, state = operation.step(x, None)
        return operation.step(x, state)[0]

    operation.train()
    run().float().sum().backward()
    with torch.no_grad():
        operation.eval()
        run()
    operation.train().zero_grad()
