"""A model as a function of a piece of a stream and its state, which ONNX can hold, and a reader of single tokens.

Shape letters as in models/relative_attention.py. A state is flat: it has `start`, the number of positions read, and
`last` [B, T], the last tokens for n-grams, if the model needs them, and NAME_N for each NAME of the state of block N.
"""

import contextlib
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from models.operations.operation import Segment, State
from models.transformer_xl import TransformerXL


class StreamModel(nn.Module):
    """A model of fixed blocks that reads a stream piece by piece. It computes what the model computes for the same
    pieces with memories of context - L positions.

    context: the most positions that attention sees, those of the piece included. The weights must not change.
    """

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int):
        super().__init__()
        self.model, self.context = model.eval(), context
        self.register_buffer("encodings", model.encodings(context))
        self.operations = nn.ModuleList(block.operation.cached(self.encodings) for block in model.blocks)

    def start(self, rows: int) -> dict[str, Tensor]:
        """The state of `rows` streams that begin."""
        model, state = self.model, {}
        if model.stride > 1 or model.grid:
            state["start"] = torch.tensor(0)
        if model.ngrams:
            state["last"] = model.ngrams.begin(rows)
        for index, operation in enumerate(self.operations):
            state |= {f"{name}_{index}": value for name, value in operation.begin(rows).items()}
        return state

    def forward(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The log-probabilities of the next token after each position [B, L, V], the inputs of the output layer
        [B, L, D], which a mixture reads, and the state after the piece.
        """
        states, start = [{} for _ in self.operations], state.get("start", 0)
        for key in state.keys() - {"start", "last"}:
            name, _, index = key.rpartition("_")
            states[int(index)][name] = state[key]
        x, states, last = self.read(tokens, states, start, state.get("last"))
        after = {"start": start + tokens.shape[1], "last": last}
        after |= {f"{name}_{index}": value for index, own in enumerate(states) for name, value in own.items()}
        log_probabilities = self.model.head.log_probabilities(x.flatten(0, 1)).unflatten(0, tokens.shape)
        return log_probabilities, x, {name: after[name] for name in state}

    def read(
        self, tokens: Tensor, states: list[State], start: int | Tensor, last: Tensor | None
    ) -> tuple[Tensor, list[State], Tensor | None]:
        """The inputs [B, L, D] of the output layer, the states of the blocks and the last tokens after the piece."""
        x, last = self.model.embed(tokens, start, last)
        segment, after = self.segment(tokens, start), []
        for operation, state in zip(self.operations, states, strict=True):
            branch, state = operation(x, state, segment)
            x = x + branch
            after.append(state)
        return self.model.final_norm(x), after, last

    def segment(self, tokens: Tensor, start: int | Tensor) -> Segment:
        """The segment of a piece [B, L]. start: positions of the stream before it."""
        memory = self.context - tokens.shape[1]
        return Segment(self.encodings, start % self.model.stride, memory, self.context - 1, tokens)


class Decoder:
    """StreamModel that keeps the state itself, and reads a single position in fewer calls. context: as there."""

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int):
        self.model, self.context, self.network = model, context, StreamModel(model, context)
        self.readers = [operation.Reader(operation) for operation in self.network.operations]
        self.offset, self.last = 0, None  # positions read so far; the last tokens, for n-grams
        self.hidden: Tensor | None = None  # the inputs of the output layer [B, L, D] after the last piece

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
            x = self.model.final_norm(x)[:, None]
        else:
            states = [reader.state for reader in self.readers]
            x, states, self.last = self.network.read(tokens, states, self.offset, self.last)
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


def dynamic_sizes(state: dict[str, Tensor]) -> dict[str, dict]:
    """{name: {dimension: its symbol}} of the sizes that may change: the rows, and those that are 0 at the start."""
    symbols = {}
    for name, value in state.items():
        grown = torch.export.Dim(f"length_{name.rpartition('_')[2]}")  # all of a block grow together
        rows = {} if name == "start" else {0: torch.export.Dim("batch")}
        symbols[name] = rows | {axis: grown for axis, size in enumerate(value.shape) if not size}
    return symbols


@torch.no_grad()
def export_graph(network: StreamModel, file: Path, **about: int | str) -> None:
    """Write an ONNX graph. Needs onnx and onnxscript.

    Its inputs are `tokens` and the names of the state, in the order of start(), for any number of rows and tokens. The
    outputs are log_probabilities, hidden, and next_NAME for each name. about: metadata of the graph.
    """
    state = network.start(2)
    # Sizes of 0 and 1 would become constants.
    length, memory = min(5, network.context), min(3, network.context - 1)
    example = {name: value.new_zeros([size or memory for size in value.shape]) for name, value in state.items()}
    with quiet():
        program = torch.onnx.export(
            network,
            (torch.zeros(2, length, dtype=torch.int64),),
            kwargs={"state": example},
            dynamo=True,
            verbose=False,
            input_names=["tokens", *state],
            output_names=["log_probabilities", "hidden", *(f"next_{name}" for name in state)],
            dynamic_shapes={"tokens": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
            | {"state": dynamic_sizes(state)},
        )
        program.model.metadata_props.update({key: str(value) for key, value in about.items()})
        program.save(file)


def open_graph(file: Path, threads: int):
    """The session of a graph in ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def quiet():
    """Hide the exporter's warnings, which concern its authors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
