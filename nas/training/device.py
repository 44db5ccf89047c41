"""The device, precision, threads and random state of a run, and torch.compile for the operations of its network.

Operations are compiled one by one, because a search with search.sampling=hard runs other operations in each step.
"""

import ctypes
import os
import time
import warnings
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from models.operations.operation import Operation, Segment
from models.transformer_xl import TransformerXL
from nas.core.config import TrainOptions
from nas.core.errors import InputError, local_rank
from nas.core.run_folder import count_cores, cpu_info

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


@dataclass(frozen=True)
class Runtime:
    """Where a run computes and how."""

    device: torch.device
    precision: str  # of the network's matrix products, fp32 or bf16
    compile: bool  # whether operations may be compiled
    threads: int  # of the CPU
    muon_bf16: bool = False  # whether Muon's products run in bf16

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """`cpu`, or the name of the GPU."""
        return torch.cuda.get_device_name(self.device) if self.is_gpu else self.device.type

    @property
    def gpus(self) -> list[str]:
        """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them; none if a run uses the CPU."""
        if not self.is_gpu:
            return []
        count, names = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
        # CUDA ignores the names from the first invalid one on, such as -1; device_count() counts those before it.
        return [str(number) for number in range(count)] if names is None else names.split(",")[:count]

    def __str__(self) -> str:
        muon = " (Muon's products bf16)" if self.muon_bf16 and self.precision == "fp32" else ""
        return f"{self.name}, {self.precision}{muon}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def autocast(self) -> AbstractContextManager:
        """A context in which forward passes run at `precision`."""
        if self.precision == "fp32":
            return nullcontext()
        # No cache, because the fused functions cast their inputs themselves.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def disable_compile(self) -> AbstractContextManager:
        """A context in which operations run uncompiled, for rare shapes, which do not repay compiling."""
        return torch.compiler.set_stance("force_eager") if self.compile else nullcontext()

    def fork_rng(self) -> AbstractContextManager:
        """A context that restores the random states at its end."""
        return torch.random.fork_rng(devices=[self.device] if self.is_gpu else [])

    def random_state(self) -> dict[str, torch.Tensor]:
        """The random states by device type; dropout draws from them."""
        state = {"cpu": torch.get_rng_state()}
        return state | {"cuda": torch.cuda.get_rng_state(self.device)} if self.is_gpu else state

    def set_random_state(self, state: dict[str, torch.Tensor]) -> bool:
        """Restore random_state(). Returns False if the state was saved on a CPU and so lacks that of this GPU."""
        torch.set_rng_state(state["cpu"])
        if self.is_gpu and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)
        return "cuda" in state or not self.is_gpu

    def synchronize(self) -> None:
        """Wait for the GPU, so that a clock can be read."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def choose_device(option: str) -> torch.device:
    """The device of train.device. Raises InputError if cuda finds no GPU, or fewer than this machine's processes."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    count = torch.cuda.device_count() if option != "cpu" and torch.cuda.is_available() else 0
    if option == "cuda" and not count:
        raise InputError("train.device=cuda: PyTorch sees no GPU here; give cpu or auto")
    if count and processes > count:
        advice = f"give torchrun --nproc-per-node {count}"
        raise InputError(f"{processes} processes need as many GPUs, but there are {count}: {advice}")
    return torch.device("cuda", local_rank()) if count else torch.device("cpu")


def choose_runtime(options: TrainOptions) -> Runtime:
    """The device, precision and compilation that the options select. Raises InputError if one is not available."""
    device, wanted = choose_device(options.device), options.precision
    on_gpu = device.type == "cuda"
    compiled = {"auto": on_gpu, "always": True, "never": False}[options.compile]
    if on_gpu:
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if wanted == "bf16" and not has_bf16:
            raise InputError("train.precision=bf16: this GPU has no bf16; give fp32 or auto")
    else:  # Muon needs few digits, and such a CPU is faster in bf16 (experiments/bench/LOG.md)
        has_bf16 = not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_info("flags").split())
    precision = "bf16" if wanted == "bf16" or (wanted == "auto" and on_gpu and has_bf16) else "fp32"
    muon_bf16 = options.optimizer == "muon" and wanted != "fp32" and has_bf16
    return Runtime(device, precision, compiled, torch.get_num_threads(), muon_bf16)


def set_up_device(seed: int, options: TrainOptions) -> Runtime:
    """Seed the random numbers, set the CPU threads and prepare the device. Raises InputError as choose_runtime()."""
    keep_freed_memory()
    # Sharp attention has many weights and gradients below 1e-38. They count as zero, because a CPU takes much longer
    # for these denormal numbers. Threads inherit this setting, so it must come before the first thread starts.
    torch.set_flush_denormal(True)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        if options.threads > (cores := count_cores()):
            print(f"WARNING: train.threads={options.threads} is more than the {cores} cores here, which is much slower")
    runtime = choose_runtime(options)
    if runtime.is_gpu:
        torch.cuda.set_device(runtime.device)
        torch.backends.cuda.matmul.allow_tf32 = options.precision != "fp32"
    torch.manual_seed(seed)
    return runtime


def keep_freed_memory() -> None:
    """Let glibc, if there is one, reuse large freed blocks. Page faults of fresh ones halve the speed on a CPU."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


BACKEND = "inductor"
WORTH_STEPS = 20_000  # compiling takes 10 to 30 s, and a compiled step of a small network is 1 ms shorter on a GPU
RECOMPILE_LIMIT = 128  # an operation compiles once per kind, shape and mode, and all blocks share the result


def compile_operations(network: TransformerXL, options: TrainOptions, runtime: Runtime, rows: int) -> None:
    """Compile the operations of a network for batches of `rows` rows; none, with a notice, if one does not run."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = 8 * RECOMPILE_LIMIT
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # the compiler reads it
    start = time.perf_counter()
    operations = [one for one in network.modules() if isinstance(one, Operation) and list(one.parameters())]
    kinds = {type(operation): operation for operation in operations}
    try:
        with runtime.fork_rng(), warnings.catch_warnings(), runtime.autocast():
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
