"""Context batches: the token stream is divided into rows, which are read a segment at a time."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nas.core.errors import InputError

RESIDENT_SHARE = 0.1  # a stream that needs at most this share of a GPU's memory stays there


class ContextBatches:
    """An endless reader of a stream. It begins B rows at equal distances, and reads L tokens of each at a time.

    A row goes on where the next one began, and the last one at the start of the stream. So each pass reads every token,
    but for less than B, or B images, at the end. The next pass reads these.
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
        if row <= segment:
            least = batch_size * -(-(segment + 1) // image) * image
            given = f"the {name} stream has {len(stream):,} tokens: too short for"
            needs = f"train.batch_size={batch_size} rows of train.segment={segment} tokens and a target"
            raise InputError(f"{given} {needs} (needs {least:,}); make one of them smaller, or use more text")
        self.segment, self.stream, self.beside = segment, stream, beside
        self.device, self.own = torch.device(device), rows or slice(None)
        self.places = row * np.arange(batch_size)[self.own, None] + np.arange(segment + 1)  # [B, L + 1]
        self.position = 0  # segments read so far

    def next(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens and targets [B, L] of the next segment, and the nll of the targets by the other predictor."""
        places = (self.places + self.position * self.segment) % len(self.stream)
        self.position += 1
        window, beside = self.window(places), None
        if self.beside is not None:
            beside = torch.from_numpy(self.beside[places[:, 1:]]).to(self.device)
        return window[:, :-1], window[:, 1:], beside

    def window(self, places: np.ndarray) -> Tensor:
        """The tokens at some places of the stream."""
        gpu = self.device.type == "cuda"
        if self.resident is not None:
            return self.resident[torch.from_numpy(places).pin_memory().to(self.device, non_blocking=True)].long()
        window = torch.from_numpy(self.stream[places].astype(np.int64))
        return window.pin_memory().to(self.device, non_blocking=True) if gpu else window

    @cached_property
    def resident(self) -> Tensor | None:
        """The stream as int32 on the GPU; None on a CPU, or if it needs more than RESIDENT_SHARE of its memory."""
        # It is copied at the first batch, because some streams are only made to check the length of a text.
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
            if 4 * self.stream.size <= RESIDENT_SHARE * memory:
                return torch.from_numpy(self.stream.astype(np.int32)).to(self.device)
        return None
