"""The machine a run works on: threads, tiny numbers, memory allocation, random seeds."""

import ctypes

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


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


def set_up(seed: int, threads: int | None) -> tuple[str, int]:
    """Seed everything, set the CPU threads (None: PyTorch's choice); returns the device and the threads in use."""
    keep_freed_memory()
    # Numbers below 1e-38 count as zero. Once attention is sharp, its weights and their gradients are full of them, and
    # a processor takes many times as long for each. Said before threads begin, for they inherit it.
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    return "cpu", torch.get_num_threads()
