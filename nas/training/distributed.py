"""Communication between the ranks of a run, which are processes that torchrun starts.

Each rank trains its share of the rows of a batch, and the gradients are averaged. The result equals that of one process
with all rows. In a single process every function here returns at once, without communication.
"""

import gc
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from nas.core.errors import InputError, Interrupted, RunError, local_rank, rank, world_size

TIMEOUT = timedelta(hours=2)  # one rank may prepare a text or measure latencies while the others wait
LOST_CONTACT = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")

Result = TypeVar("Result")


def is_main() -> bool:
    """Whether this rank writes and prints."""
    return rank() == 0


@contextmanager
def process_group(device: torch.device):
    """Connect the ranks by gloo, and between GPUs by NCCL. Raises RunError if the contact to another rank is lost."""
    if world_size() == 1:
        yield
        return
    # Imported later by an optimizer, it would keep the group and its threads alive
    import torch._dynamo  # noqa: F401

    on_gpu = {"backend": "cpu:gloo,cuda:nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(timeout=TIMEOUT, **on_gpu)
    try:
        yield
        dist.barrier()  # no rank leaves while another still waits for it
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in LOST_CONTACT):
            raise
        advice = "torchrun names the one that ended below; --resume continues from the last checkpoint"
        raise RunError(f"lost contact with another process ({str(error).splitlines()[0]}); {advice}") from None
    except Interrupted as error:  # all ranks stop together
        traceback.clear_frames(error.__traceback__)
        leave_group()
        raise
    leave_group()  # not after other errors, because it could wait for a rank that has ended


def leave_group() -> None:
    """End the group and its threads. A thread that still runs when the interpreter ends may abort the process."""
    dist.destroy_process_group()
    gc.collect()  # DistributedDataParallel is in a reference cycle, and keeps the group


def rank_rows(rows: int, grad_accum_steps: int) -> slice:
    """The rows of a batch that this rank reads. Raises InputError if ranks and parts do not divide the batch."""
    if rows % (world_size() * grad_accum_steps):
        times = f" times train.grad_accum_steps={grad_accum_steps}" if grad_accum_steps > 1 else ""
        raise InputError(f"train.batch_size={rows} must be a multiple of the {world_size()} processes{times}")
    own = rows // world_size()
    return slice(rank() * own, (rank() + 1) * own)


def gather_rows(own: Tensor) -> Tensor | None:
    """The rows of all ranks in order, on rank 0; None on the others. own: this rank's rows, equally many on all."""
    if world_size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(world_size())] if is_main() else None
    dist.gather(own.contiguous(), parts)
    return torch.cat(parts) if is_main() else None


def all_reduce_mean(x: Tensor) -> Tensor:
    """The mean of x over all ranks, the same on each."""
    return x if world_size() == 1 else all_reduce_sum(x.clone()) / world_size()


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum of values over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def any_rank(flag: bool) -> bool:
    return bool(all_reduce_sum(torch.tensor(float(flag))) > 0)


def all_gather(value) -> list:
    """The values of all ranks in order, on each rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def check_replicated(values: dict[str, Tensor]) -> None:
    """Raises RunError if a tensor is not bit-identical on all ranks. The keys name the tensors in the message."""
    for name, value in values.items():
        value = value.detach().double().cpu()
        for number, other in enumerate(all_gather(value)):
            if not torch.equal(other, value):
                advice = "with --resume, on machines of one kind with the same versions"
                reason = f"ranks {rank()} and {number} must agree but differ in {name}"
                raise RunError(f"{reason}; restart from the last checkpoint {advice}")


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def first_on_each_node(work: Callable[[], Result]) -> Result:
    """The result of work(). One rank of each machine runs it first, so that the others find its files in the cache."""
    result = work() if local_rank() == 0 else None
    barrier()
    return result if local_rank() == 0 else work()


def broadcast_from_main(work: Callable[[], Result]) -> Result:
    """The result of work() on rank 0, on each rank."""
    return all_gather(work() if is_main() else None)[0]


def wrap_ddp(model: nn.Module) -> nn.Module:
    """Wrap a model in DistributedDataParallel. All parameters must get a gradient in each backward pass."""
    return model if world_size() == 1 else DistributedDataParallel(model, gradient_as_bucket_view=True)


def sync_gradients(model: nn.Module, wanted: bool) -> AbstractContextManager:
    """A context in which DistributedDataParallel averages gradients only if `wanted`: for the last part of a batch."""
    return nullcontext() if wanted or not isinstance(model, DistributedDataParallel) else model.no_sync()


def broadcast_parameters(model: nn.Module) -> None:
    """Give all ranks the parameters of rank 0, as DistributedDataParallel does."""
    for parameter in model.parameters() if world_size() > 1 else ():
        dist.broadcast(parameter.data, src=0)


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients of a path, which all ranks sample alike, by their means over the ranks.

    DistributedDataParallel would expect a gradient of every parameter, or search the graph in each step.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if world_size() > 1:
        vector_to_parameters(all_reduce_mean(parameters_to_vector(gradients)), gradients)
