"""torch.compile for the operations of a network.

Operations are compiled one by one, because a search with search.sampling=hard runs other operations in each step.
"""

import time
import warnings

import torch
from torch import Tensor

from models.operations.operation import Operation, Segment
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
    start, modules = time.perf_counter(), network.modules()
    operations = [module for module in modules if isinstance(module, Operation) and list(module.parameters())]
    kinds = {type(operation): operation for operation in operations}
    try:
        with context.fork_rng(), warnings.catch_warnings(), context.autocast():
            warnings.simplefilter("ignore")
            for operation in operations:
                operation.forward = torch.compile(operation.forward, backend=BACKEND, dynamic=False)
            for operation in kinds.values():
                try_operation(operation, network, options, rows)
    except Exception as error:  # a compiler may raise any error, and the run can continue without it
        for operation in operations:
            operation.__dict__.pop("forward", None)  # restores the method of the class
            operation.train()
        reason = str(error).splitlines()[0] if str(error) else ""
        print(f"NOTICE: train.compile is off: {type(error).__name__}: {reason}", flush=True)
        return
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    print(f"compiled {names} in {time.perf_counter() - start:.0f} s", flush=True)


def try_operation(operation: Operation, network: TransformerXL, options: TrainOptions, rows: int) -> None:
    """Run an operation on zeros, in the shapes of training with full memories: with gradients and without."""
    weight, memory = network.embedding.weight, options.memory
    x = weight.new_zeros(rows, options.segment, network.d_model).requires_grad_()
    tokens = x.new_zeros(x.shape[:2], dtype=torch.int64)
    segment = Segment(network.encodings(memory + options.segment), 0, memory, memory, tokens)
    past = weight.new_zeros(rows, memory, network.d_model), segment._replace(tokens=tokens[:, :1].expand(-1, memory))

    def run() -> Tensor:
        if operation.carries_state:
            _, state = operation(x, operation.begin(rows), segment)
        else:
            state = operation.remember(*past)
        return operation(x, state, segment)[0]

    operation.train()
    run().float().sum().backward()
    with torch.no_grad():
        operation.eval()
        run()
    operation.train().zero_grad()
