"""Read a stream token by token. Shape letters as in models/relative_attention.py."""

import torch
from torch import Tensor

from models.stream import StreamModel
from models.transformer_xl import TransformerXL


class Decoder:
    """Reads a stream with a model of fixed blocks, and predicts the next token.

    It computes what StreamModel computes, keeps the state itself, and reads a single position in fewer calls.
    context: as in StreamModel.
    """

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int):
        self.model, self.context, self.network = model, context, StreamModel(model, context)
        self.readers = [operation.Reader(operation) for operation in self.network.operations]
        self.offset, self.last = 0, None  # positions read so far; the last tokens, for n-grams

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        """Read the next tokens [B, L]. Returns the log-probabilities of the token after them [B, V].

        Raises ValueError unless L is from 1 to `context`.
        """
        rows, length = tokens.shape
        if not 1 <= length <= self.context:
            raise ValueError(f"a piece of {length} tokens must have 1 to {self.context}")
        if self.offset == 0:
            self.set_states([operation.begin(rows) for operation in self.network.operations])
        if length == 1:
            x, self.last = self.model.embed(tokens, self.offset, self.last)
            x, segment = x[:, 0], self.network.segment(tokens, self.offset)  # [B, D]
            for reader in self.readers:
                x = reader(x, segment)
            x = self.model.final_norm(x)
        else:
            states = [reader.state for reader in self.readers]
            x, states, self.last = self.network.read(tokens, states, self.offset, self.last)
            x = x[:, -1]
            self.set_states(states)
        self.offset += length
        return self.model.head.log_probabilities(x)

    def set_states(self, states: list) -> None:
        for reader, state in zip(self.readers, states, strict=True):
            reader.state = state

    def restart(self, rows: int) -> None:
        """Begin n-grams, and the states of operations that restart, anew."""
        self.last = None
        for reader, operation in zip(self.readers, self.network.operations, strict=True):
            if operation.restarts:
                reader.state = operation.begin(rows)

    def repeat(self, count: int) -> None:
        """Repeat the stream of one row in `count` rows, which may then go on differently."""
        repeated = [
            {name: value.expand(count, *value.shape[1:]) for name, value in reader.state.items()}
            for reader in self.readers
        ]
        self.set_states(repeated)
        self.last = self.last if self.last is None else self.last.expand(count, -1)
