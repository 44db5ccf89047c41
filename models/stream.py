"""A model as a function of a piece of a stream and its state, and a reader of single tokens.

Shape letters as in models/relative_attention.py. A state is flat. `start`, a number: the positions read, if masks, a
grid or fixed sizes need them. `last` [B, T]: the last tokens, with n-grams. NAME_N: each NAME of the state of block N.
"""

import torch
from torch import Tensor, nn

from models.operations.operation import Segment, State
from models.transformer_xl import TransformerXL


class StreamModel(nn.Module):
    """A model of fixed blocks that reads a stream piece by piece. It computes what the model computes for the same
    pieces with memories of context - L positions.

    context: the most positions that attention sees, those of the piece included. The weights must not change. fixed:
    the sizes of the state do not grow, if no operation needs a memory of inputs; then pieces have one token.
    """

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int, fixed: bool = False):
        super().__init__()
        self.model, self.context = model.eval(), context
        self.register_buffer("encodings", model.encodings(context))
        self.operations = nn.ModuleList(block.operation.cached(self.encodings) for block in model.blocks)
        self.fixed = fixed and not any("memory" in operation.begin(1) for operation in self.operations)

    def start(self, rows: int) -> dict[str, Tensor]:
        """The state of `rows` streams that begin."""
        model, state = self.model, {}
        if model.stride > 1 or model.grid or self.fixed:
            state["start"] = torch.tensor(0)
        if model.ngrams:
            state["last"] = model.ngrams.begin(rows)
        room = self.context - 1 if self.fixed else 0
        for index, operation in enumerate(self.operations):
            state |= {f"{name}_{index}": value for name, value in operation.begin(rows, room).items()}
        return state

    def forward(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The log-probabilities of the next token after each position [B, L, V], the inputs of the output layer
        [B, L, D], which a mixture reads, and the state after the piece.
        """
        x, state = self.hidden(tokens, state)
        log_probabilities = self.model.head.log_probabilities(x.flatten(0, 1)).unflatten(0, tokens.shape)
        return log_probabilities, x, state

    def hidden(self, tokens: Tensor, state: dict[str, Tensor], least: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """As forward(), without the log-probabilities. least: as in segment()."""
        states, start = [{} for _ in self.operations], state.get("start", 0)
        for key in state.keys() - {"start", "last"}:
            name, _, index = key.rpartition("_")
            states[int(index)][name] = state[key]
        x, states, last = self.read(tokens, states, start, state.get("last"), least)
        after = {"start": start + tokens.shape[1], "last": last}
        after |= {f"{name}_{index}": value for index, own in enumerate(states) for name, value in own.items()}
        return x, {name: after[name] for name in state}

    def read(
        self, tokens: Tensor, states: list[State], start: int | Tensor, last: Tensor | None, least: int = 0
    ) -> tuple[Tensor, list[State], Tensor | None]:
        """The inputs [B, L, D] of the output layer, the states of the blocks and the last tokens after the piece."""
        x, last = self.model.embed(tokens, start, last)
        segment, after = self.segment(tokens, start, least), []
        for operation, state in zip(self.operations, states, strict=True):
            branch, state = operation(x, state, segment)
            x = x + branch
            after.append(state)
        return self.model.final_norm(x), after, last

    def segment(self, tokens: Tensor, start: int | Tensor, least: int = 0) -> Segment:
        """The segment of a piece [B, L]. start: positions of the stream before it.

        least: a shorter piece has the memory of one of this length, as the end of a text has in an evaluation.
        """
        memory = self.context - (torch.sym_max(tokens.shape[1], least) if least else tokens.shape[1])
        filled = start if self.fixed else None
        return Segment(self.encodings, start % self.model.stride, memory, self.context - 1, tokens, filled)


class Decoder:
    """StreamModel that keeps the state itself, and reads a single position in fewer calls. context: as there."""

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int):
        self.model, self.context, self.network = model, context, StreamModel(model, context)
        self.readers = [operation.Reader(operation) for operation in self.network.operations]
        self.offset, self.last = 0, None  # positions read so far; the last tokens, for n-grams
        self.hidden: Tensor | None = None  # the inputs of the output layer [B, L, D] after the last piece

    @torch.inference_mode()
    def read(self, tokens: Tensor, least: int = 0) -> Tensor:
        """Read the next tokens [B, L]. Returns the log-probabilities of the token after them [B, V].

        least: as in StreamModel.segment(). Raises ValueError unless L is from 1 to `context`.
        """
        rows, length = tokens.shape
        if not 1 <= length <= self.context:
            raise ValueError(f"a piece of {length} tokens must have 1 to {self.context}")
        if self.offset == 0:
            self.set_states([operation.begin(rows) for operation in self.network.operations])
        if length == 1:
            x, self.last = self.model.embed(tokens, self.offset, self.last)
            x, segment = x[:, 0], self.network.segment(tokens, self.offset, least)  # [B, D]
            for reader in self.readers:
                x = reader(x, segment)
            x = self.model.final_norm(x)[:, None]
        else:
            states = [reader.state for reader in self.readers]
            x, states, self.last = self.network.read(tokens, states, self.offset, self.last, least)
            self.set_states(states)
        self.offset, self.hidden = self.offset + length, x
        return self.model.head.log_probabilities(x[:, -1])

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
        for reader in self.readers:
            reader.state = {name: value.expand(count, *value.shape[1:]) for name, value in reader.state.items()}
        self.last = self.last if self.last is None else self.last.expand(count, -1)
