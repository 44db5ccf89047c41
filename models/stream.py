"""A model as a function of a piece of a stream and the stream's state, which ONNX can hold.

It projects each position to keys and values only once. Shape letters as in models/relative_attention.py. A state has:

- start: the number of positions read; last [B, T]: the last tokens, for n-grams; only if the model needs them.
- memory_N, of block N: keys and values [2, G, B, M, E]; of a convolution its state [B, T, D]; of linear attention its
  last inputs [B, T, D].
- state_N [B, H, E, E]: the state of linear attention.
"""

import contextlib
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from models.transformer_xl import TransformerXL


class StreamModel(nn.Module):
    """A model of fixed blocks that reads a stream piece by piece. It computes what the model computes for the same
    pieces with memories of context - L positions.

    context: the most positions that attention sees, those of the piece included. The weights must not change.
    """

    @torch.no_grad()
    def __init__(self, model: TransformerXL, context: int):
        super().__init__()
        self.model, self.context, positions = model.eval(), context, model.positions(context)
        for index, block in enumerate(model.blocks):
            if block.operation.has_keys:  # the same for each piece, so projected once
                projected = block.operation.attention.project_positions(positions, slice(None))  # [H, K, E]
                self.register_buffer(f"position_{index}", projected)

    def start(self, rows: int) -> dict[str, Tensor]:
        """The state of `rows` streams that begin."""
        model, state, weight = self.model, {}, self.model.embedding.weight
        if model.stride > 1 or model.grid:
            state["start"] = torch.tensor(0)
        if model.ngrams:
            state["last"] = torch.full((rows, len(model.ngrams.tables)), -1, device=weight.device)
        for index, block in enumerate(model.blocks):
            operation = block.operation
            if operation.has_keys:
                groups, width = operation.attention.key_heads, operation.attention.width
                state[f"memory_{index}"] = weight.new_zeros(2, groups, rows, 0, width)
            elif operation.carries_state:
                heads = operation.attention.heads
                state[f"state_{index}"] = weight.new_zeros(rows, heads, *[model.d_model // heads] * 2)
                state[f"memory_{index}"] = weight.new_zeros(rows, 0, model.d_model)
            elif operation.step:
                state[f"memory_{index}"] = weight.new_zeros(rows, operation.reach, model.d_model)
        return state

    def forward(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The log-probabilities of the next token after each position [B, L, V], and the state after the piece."""
        x, after = self.read(tokens, state)
        return self.model.head.log_probabilities(x.flatten(0, 1)).unflatten(0, tokens.shape), after

    def read(self, tokens: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The inputs [B, L, D] of the output layer, and the state after the piece."""
        start = state.get("start", 0)
        x, last = self.model.embed(tokens, start, state.get("last"))
        after = {"start": start + tokens.shape[1], "last": last}
        after = {name: value for name, value in after.items() if name in state}
        for index in range(len(self.model.blocks)):
            x, own = self.read_block(index, x, state, start % self.model.stride)
            after |= own
        return self.model.final_norm(x), after

    def read_block(self, index: int, x: Tensor, state: dict, start: int | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The block's results [B, L, D] for the next positions x [B, L, D], and its part of the next state."""
        name, operation, length = f"memory_{index}", self.model.blocks[index].operation, x.shape[1]
        if operation.has_keys:
            inputs, memory, attention = operation.prepare(x), state[name], operation.attention
            seen = min(self.context, operation.reach or self.context)
            before = torch.sym_max(0, memory.shape[3] - torch.sym_min(seen, self.context - length))
            new = attention.project_keys(inputs)
            # Under autocast, new keys have another type than the empty ones of start().
            key_value = torch.cat([memory[:, :, :, before:].to(new.dtype), new], dim=3)
            position = getattr(self, f"position_{index}")
            position = None if position is None else position[:, -key_value.shape[3] :]
            branch = operation.finish(x, attention.attend_masked(inputs, key_value, position, start))
            return x + branch, {name: key_value[:, :, :, -min(seen, self.context - 1) :]}
        if operation.carries_state:
            branch, (new, inputs) = operation.step(x, (state[f"state_{index}"], state[name]))
            return x + branch, {f"state_{index}": new, name: inputs}
        if operation.step:
            branch, memory = operation.step(x, state[name])
            return x + branch, {name: memory}
        return x + operation(x, None, None), {}


def dynamic_sizes(state: dict[str, Tensor]) -> dict[str, dict]:
    """{name: {dimension: its symbol}} of the sizes that may change: the rows, and those that are 0 at the start."""
    symbols = {}
    for name, value in state.items():
        rows = {} if name == "start" else {2 if value.ndim == 5 else 0: torch.export.Dim("batch")}
        symbols[name] = rows | {
            axis: torch.export.Dim(f"{name}_length") for axis, size in enumerate(value.shape) if not size
        }
    return symbols


@torch.no_grad()
def export_graph(network: StreamModel, file: Path, **about: int | str) -> None:
    """Write an ONNX graph. Needs onnx and onnxscript.

    Its inputs are `tokens` and the names of the state, in the order of start(), for any number of rows and tokens. The
    outputs are log_probabilities, and next_NAME for each name. about: metadata of the graph.
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
            output_names=["log_probabilities", *(f"next_{name}" for name in state)],
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
