"""The processes of one run, called ranks: torchrun starts them, torch.distributed joins them. Of one process alone,
everything here is the plain thing, without communication.

Each rank trains its share of a batch's rows, and gradients are averaged: the same as one process with all of them.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nas.core.errors import InputError, Interrupted, RunError

TIMEOUT = timedelta(minutes=30)  # for a rank to prepare a text or measure latencies while the others wait


BUCKET = 2**22  # entries: smaller gradients are put together, so that each message is worth its latency


Result = TypeVar("Result")


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is the rank that writes and prints."""
    return rank() == 0


def local_rank() -> int:
    """This rank's number among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) if started_by_torchrun() else 0


@contextmanager
def process_group(device: torch.device):
    """While it lasts, the ranks that torchrun started talk to each other: by gloo, and between GPUs by NCCL.

    Ranks that lose another raise RunError: that one's own error says why, and torchrun ends all.
    """
    if not started_by_torchrun():
        yield
        return
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield
        dist.barrier()  # none leaves while another still waits for it
    except RuntimeError as error:
        if is_lost_contact(error):
            raise RunError(
                "contact with another process was lost: torchrun says below which one ended, and --resume goes on from "
                f"the last checkpoint ({first_line(error)})"
            ) from None
        raise
    except Interrupted:  # all together
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # after an error it could wait for what never comes; the process ends at once


def is_lost_contact(error: RuntimeError) -> bool:
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def rank_rows(rows: int, grad_accum_steps: int) -> slice:
    """Of the batch's rows those of this rank. Raises InputError where ranks and parts do not divide them."""
    if rows % (world_size() * grad_accum_steps):
        raise InputError(
            f"train.batch_size={rows} must be a multiple of the {world_size()} processes"
            + (f" times train.grad_accum_steps={grad_accum_steps}" if grad_accum_steps > 1 else "")
        )
    own = rows // world_size()
    return slice(rank() * own, (rank() + 1) * own)


def gather_rows(own: Tensor) -> Tensor | None:
    """The rows of all ranks in order, on rank 0; None on the others. own: those of this rank, the same shape on all."""
    if world_size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(world_size())] if is_main() else None
    dist.gather(own.contiguous(), parts)
    return torch.cat(parts) if is_main() else None


def all_reduce_mean(x: Tensor) -> Tensor:
    """Mean of x over all ranks, the same on each."""
    if world_size() > 1:
        x = x.clone()
        dist.all_reduce(x)
        x /= world_size()
    return x


def all_reduce_sum(numbers: list[float]) -> list[float]:
    """Sums of some numbers over all ranks."""
    if world_size() == 1:
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def any_rank(flag: bool) -> bool:
    """Whether it is so on any rank."""
    return all_reduce_sum([float(flag)])[0] > 0


def all_gather(value) -> list:
    """The value of each rank, on each."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def check_replicated(values: dict[str, Tensor]) -> None:
    """Raises RunError where a tensor, by name, is not the same, bit by bit, on all ranks: they would drift apart."""
    for name, value in values.items():
        value = value.detach().double().cpu()
        for number, other in enumerate(all_gather(value)):
            if not torch.equal(other, value):
                raise RunError(
                    f"not the same on ranks {rank()} and {number}, and must be: {name}; start again from the last "
                    "checkpoint with --resume, on machines of one kind with one version of everything"
                )


def barrier() -> None:
    """Until every rank has come to the same point."""
    if world_size() > 1:
        dist.barrier()


def first_on_each_node(work: Callable[[], Result]) -> Result:
    """Its result, made by one rank of each machine before the others, which then find it in a cache."""
    if world_size() == 1:
        return work()
    result = work() if local_rank() == 0 else None
    barrier()
    return result if local_rank() == 0 else work()


def broadcast_from_main(work: Callable[[], Result]) -> Result:
    """Its result, made by rank 0 alone, on each rank."""
    if world_size() == 1:
        return work()
    box = [work() if is_main() else None]
    dist.broadcast_object_list(box)
    return box[0]


def wrap_ddp(model: nn.Module) -> nn.Module:
    """A model all of whose parameters get a gradient in each backward pass, which then averages them over the ranks
    while it is still going on (DistributedDataParallel)."""
    if world_size() == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def broadcast_parameters(model: nn.Module) -> None:
    """Give all ranks the parameters of rank 0, as replicate() does."""
    for parameter in model.parameters() if world_size() > 1 else ():
        dist.broadcast(parameter.data, src=0)


def sync_gradients(model: nn.Module, wanted: bool) -> AbstractContextManager:
    """Forward and backward passes in which a replicated model averages gradients only where wanted: of several parts of
    a batch, in the last."""
    return nullcontext() if wanted or not isinstance(model, DistributedDataParallel) else model.no_sync()


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients that are there by their means over the ranks.

    For a sampled path, whose operations alone have gradients, the same on all ranks: DistributedDataParallel expects
    all, or searches the graph of each step for those that will come.
    """
    if world_size() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    large, small = [], []
    for gradient in gradients:
        (large if gradient.numel() >= BUCKET and gradient.is_contiguous() else small).append(gradient)
    waiting = [dist.all_reduce(gradient, async_op=True) for gradient in large]
    for bucket in buckets(small):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
    for work in waiting:
        work.wait()
    if gradients:
        torch._foreach_div_(gradients, world_size())


def buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """In order, with up to BUCKET entries each, or one gradient."""
    found, entries = [], BUCKET
    for gradient in gradients:
        if entries + gradient.numel() > BUCKET:
            found.append([])
            entries = 0
        found[-1].append(gradient)
        entries += gradient.numel()
    return found
