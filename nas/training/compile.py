"""torch.compile for the operations of a network.

Operations are compiled one by one, because a search with search.sampling=hard runs other operations in each step.
"""

import time
import warnings

import torch
from torch import Tensor

from models.operations import Operation
from models.transformer_xl import TransformerXL
from nas.core.config import TrainOptions
from nas.training.device import DeviceContext

BACKEND = "inductor"
WORTH_STEPS = 20_000  # compiling takes 10 to 30 s, and a compiled step of a small network is 1 ms shorter on a GPU
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
                try_operation(operation, network, options, rows)
    except Exception as error:  # a compiler may raise any error, and the run can continue without it
        for operation, name in methods.items():
            operation.__dict__.pop(name, None)  # restores the method of the class
            operation.train()
        reason = str(error).splitlines()[0] if str(error) else ""
        print(f"NOTICE: train.compile is off: {type(error).__name__}: {reason}", flush=True)
        return
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    print(f"compiled {names} in {time.perf_counter() - start:.0f} s", flush=True)


def try_operation(operation: Operation, network: TransformerXL, options: TrainOptions, rows: int) -> None:
    """Run an operation on zeros, in the shapes of training with full memories: with gradients and without."""
    weight, shape = network.embedding.weight, (rows, options.segment, network.d_model)
    x = weight.new_zeros(shape).requires_grad_()
    memory = weight.new_zeros(rows, options.memory, network.d_model) if options.memory else None

    def run() -> Tensor:
        if not operation.carries_state:
            return operation(x, memory, network.positions(options.memory + options.segment))
        _, state = operation.step(x, None)
        return operation.step(x, state)[0]

    operation.train()
    run().float().sum().backward()
    with torch.no_grad():
        operation.eval()
        run()
    operation.train().zero_grad()
