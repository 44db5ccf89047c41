"""Context batches: the token stream is divided into rows, which are read a segment at a time."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nas.core.errors import InputError

RESIDENT_SHARE = 0.1  # a stream that needs at most this share of a GPU's memory stays there


class ContextBatches:
    """An endless reader of a stream. It cuts the stream into B contiguous rows, and reads L tokens of each at a time.

    It skips tokens at the end that do not fill a row, or a segment of a row.
    """

    def __init__(
        self,
        stream: np.ndarray,
        batch_size: int,
        segment: int,
        name: str = "train",
        image: int = 1,
        rows: slice | None = None,
        device: torch.device | str = "cpu",
        beside: np.ndarray | None = None,
    ):
        """stream: token ids [tokens]. image: tokens of an image; rows begin with one. rows: those that this process
        reads; None: all B. beside [tokens]: the nll of each token by another predictor. Raises InputError if a row is
        shorter than a segment and its last target.
        """
        row = len(stream) // batch_size // image * image
        self.segment = segment
        self.segments_per_epoch = (row - 1) // segment
        if self.segments_per_epoch < 1:
            least = batch_size * -(-(segment + 1) // image) * image
            given = f"the {name} stream has {len(stream):,} tokens: too short for"
            rows = f"train.batch_size={batch_size} rows of train.segment={segment} tokens and a target"
            raise InputError(f"{given} {rows} (needs {least:,}); make one of them smaller, or use more text")
        self.device, self.own = torch.device(device), rows or slice(None)
        self.rows, self.beside = (
            None if values is None else values[: batch_size * row].reshape(batch_size, row)[self.own]
            for values in (stream, beside)
        )
        self.position = 0  # segments read in this epoch

    @property
    def at_start(self) -> bool:
        """Whether next() returns the first segment of the rows."""
        return self.position in (0, self.segments_per_epoch)

    def next(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens and targets [B, L] of the next segment, and the nll of the targets by the other predictor."""
        if self.at_start:
            self.position = 0
        start = self.position * self.segment
        self.position += 1
        window = self.window(slice(start, start + self.segment + 1))
        beside = None
        if self.beside is not None:
            beside = torch.from_numpy(self.beside[:, start + 1 : start + self.segment + 1].copy()).to(self.device)
        return window[:, :-1], window[:, 1:], beside

    def window(self, columns: slice) -> Tensor:
        if self.resident is not None:
            return self.resident[:, columns].long()
        window = torch.from_numpy(self.rows[:, columns].astype(np.int64))
        return window.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else window

    @cached_property
    def resident(self) -> Tensor | None:
        """The rows as int32 on the GPU; None on a CPU, or if they need more than RESIDENT_SHARE of the GPU's memory."""
        # They are copied at the first batch, because some streams are only made to check the length of a text.
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
            if 4 * self.rows.size <= RESIDENT_SHARE * memory:
                return torch.from_numpy(self.rows.astype(np.int32)).to(self.device)
        return None
