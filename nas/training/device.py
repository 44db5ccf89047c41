"""The machine a run works on: device, precision, threads, tiny numbers, memory allocation, random seeds."""

import ctypes
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from nas.core.config import TrainOptions
from nas.core.errors import InputError
from nas.training.distributed import local_rank

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


@dataclass(frozen=True)
class DeviceContext:
    """Where a run computes and how: precision of matrix products (fp32 or bf16), whether to compile, CPU threads."""

    device: torch.device
    precision: str
    compile: bool
    threads: int

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        """`cpu`, or the GPU's name."""
        return torch.cuda.get_device_name(self.device) if self.is_gpu else self.device.type

    def __str__(self) -> str:
        compiled = ", compiled operations" if self.compile else ""
        return f"{self.name}, {self.precision}{compiled}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def autocast(self) -> AbstractContextManager:
        """Forward passes in the precision. Casts are not kept between operations: CUDA graphs could not hold them."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def random_state(self) -> dict[str, torch.Tensor]:
        """That of dropout."""
        state = {"cpu": torch.get_rng_state()}
        return state | {"cuda": torch.cuda.get_rng_state(self.device)} if self.is_gpu else state

    def set_random_state(self, state: dict[str, torch.Tensor]) -> bool:
        """Whether it could be set: a state saved on a CPU says nothing of a GPU's."""
        torch.set_rng_state(state["cpu"])
        if self.is_gpu and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)
        return "cuda" in state or not self.is_gpu

    def disable_compile(self) -> AbstractContextManager:
        """While it lasts nothing compiled is used (but graphs, where shapes are those of training): shapes that come
        rarely, such as those of evaluation and of memories that are not full yet, would take longer to compile than
        that saves."""
        return torch.compiler.set_stance("force_eager") if self.compile else nullcontext()

    def fork_rng(self) -> AbstractContextManager:
        """While it lasts, what is drawn changes nothing of what is drawn afterwards."""
        return torch.random.fork_rng(devices=[self.device] if self.is_gpu else [])

    def synchronize(self) -> None:
        """Wait for the GPU, so that a clock can be read."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def keep_freed_memory() -> None:
    """Let glibc hand large freed blocks out again instead of returning them to the kernel.

    By default every activation of some megabytes is a fresh mapping whose pages fault one by one; that halves the
    speed of a training step on CPU. Where the C library is not glibc nothing happens.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):
        pass


def choose_device(wanted: str) -> torch.device:
    """Raises InputError where cuda is wanted and there is none, or this machine has fewer GPUs than processes."""
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and not count:
        raise InputError("train.device=cuda: PyTorch sees no GPU here; give cpu, or auto, which takes what there is")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # those that torchrun started on this machine
    if count and processes > count:
        raise InputError(f"{processes} processes share {count} GPUs here: give torchrun --nproc-per-node {count}")
    return torch.device("cuda", local_rank()) if count else torch.device("cpu")


def choose_precision(wanted: str, device: torch.device) -> str:
    """fp32 or bf16. Raises InputError where bf16 is wanted of a GPU that lacks it."""
    if device.type != "cuda":
        return "bf16" if wanted == "bf16" else "fp32"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "bf16" and not has_bf16:
        raise InputError("train.precision=bf16: this GPU has no bf16; give fp32, or auto")
    return "bf16" if has_bf16 and wanted != "fp32" else "fp32"


def device_context(options: TrainOptions) -> DeviceContext:
    """What these options mean here. Raises InputError where the device is not there, or cannot do it."""
    device = choose_device(options.device)
    wanted = {"auto": device.type == "cuda", "always": True, "never": False}[options.compile]
    return DeviceContext(device, choose_precision(options.precision, device), wanted, torch.get_num_threads())


def set_up(seed: int, options: TrainOptions) -> DeviceContext:
    """Seed everything, set the CPU threads, get the device ready. Raises InputError as machine_of()."""
    keep_freed_memory()
    # Numbers below 1e-38 count as zero. Once attention is sharp, its weights and their gradients are full of them, and
    # a processor takes many times as long for each. Said before threads begin, for they inherit it.
    torch.set_flush_denormal(True)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    context = device_context(options)
    if context.is_gpu:
        torch.cuda.set_device(context.device)
        torch.backends.cuda.matmul.allow_tf32 = options.precision != "fp32"  # whoever asks for fp32 gets it
        # No attention here goes through scaled_dot_product_attention, and should one ever: cuDNN's gave gradients of
        # NaN under a mask at some lengths (pytorch 196678), and misread fp32 masks of bf16 queries (pytorch 191612).
        torch.backends.cuda.enable_cudnn_sdp(False)
        # The optimizer steps as it is, too, before its graph is captured and where there is none.
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
    torch.manual_seed(seed)
    return context
