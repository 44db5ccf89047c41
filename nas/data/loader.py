"""Prepared tokens as memory maps, and context batches over them: each row is one contiguous stretch of the corpus."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from models.transformer_xl import Memories
from nas.core.errors import InputError
from nas.training.distributed import gather_rows, rank_rows

RESIDENT_SHARE = 0.1  # of a GPU's memory: a stream that takes no more is kept there


@dataclass
class Batch:
    """tokens and targets [B, L]; memories of the same rows, from the segments before (None at the stream's start)."""

    tokens: Tensor
    targets: Tensor
    memories: Memories | None

    def parts(self, count: int) -> list["Batch"]:
        """The rows in so many equal parts."""
        if count == 1:
            return [self]
        memories = [None] * count if self.memories is None else self.memories.split(count)
        return list(map(Batch, self.tokens.chunk(count), self.targets.chunk(count), memories))


class ContextBatches:
    """An endless walk over a stream in B contiguous rows, a segment at a time, with the rows' memories.

    Of several ranks each walks over its share of the rows. Batches are on `device`: a GPU keeps the stream, or where
    that is too large, is sent batches through pinned memory, and waits for neither.

    At the end of the rows the walk starts again with empty memories. Every row begins at a multiple of `image` tokens:
    where images of that size follow each other, with one. What of the stream fills no row, and a remainder shorter than
    a segment at the end of a row, are not trained on. (Rows of fixed sparse attention are counted anew in each row.)
    Raises InputError where a row is shorter than one segment and its last target, or where the ranks, and the parts in
    which each reads its rows (grad_accum_steps), do not divide the rows.
    """

    def __init__(
        self,
        stream: np.ndarray,
        batch_size: int,
        segment: int,
        name: str = "train",
        image: int = 1,
        grad_accum_steps: int = 1,
        device: torch.device | str = "cpu",
    ):
        row = len(stream) // batch_size // image * image
        self.segment = segment
        self.segments_per_epoch = (row - 1) // segment
        if self.segments_per_epoch < 1:
            least = batch_size * -(-(segment + 1) // image) * image
            raise InputError(
                f"the {name} stream has {len(stream):,} tokens: too short for train.batch_size={batch_size} rows of "
                f"train.segment={segment} tokens and a target (needs {least:,}); "
                "make one of them smaller, or give the stream more text"
            )
        self.device, self.own = torch.device(device), rank_rows(batch_size, grad_accum_steps)
        self.rows = stream[: batch_size * row].reshape(batch_size, row)[self.own]
        self.position = 0  # segments read in this pass
        self.memories: Memories | None = None  # set by whoever has run the model on a batch

    @cached_property
    def resident(self) -> Tensor | None:
        """The rows as int32 on the GPU, sent there for the first batch, since streams are also cut only to see whether
        the text is long enough; None on a CPU, or where they would take more than RESIDENT_SHARE of the memory."""
        if self.device.type != "cuda":
            return None
        whole = torch.cuda.get_device_properties(self.device).total_memory
        if 4 * self.rows.size > RESIDENT_SHARE * whole:
            return None
        return torch.from_numpy(self.rows.astype(np.int32)).to(self.device)

    def window(self, start: int) -> Tensor:
        """Tokens [B, L + 1] of each row from a place on."""
        cut = slice(start, start + self.segment + 1)
        if self.resident is not None:
            return self.resident[:, cut].long()
        window = torch.from_numpy(self.rows[:, cut].astype(np.int64))
        if self.device.type == "cuda":
            window = window.pin_memory().to(self.device, non_blocking=True)
        return window

    def next(self) -> Batch:
        if self.position == self.segments_per_epoch:
            self.position, self.memories = 0, None
        start = self.position * self.segment
        self.position += 1
        window = self.window(start)
        return Batch(window[:, :-1], window[:, 1:], self.memories)

    def state_dict(self) -> dict:
        """With the memories of all ranks, on rank 0."""
        blocks = self.memories and [None if block is None else gather_rows(block) for block in self.memories.blocks]
        return {"position": self.position, "memories": blocks}

    def load_state_dict(self, state: dict) -> None:
        self.position, blocks = state["position"], state["memories"]  # what was read follows from the position
        self.memories = None
        if blocks is not None:
            own = [None if block is None else block[self.own].to(self.device) for block in blocks]
            self.memories = Memories(own, self.position * self.segment)
