"""A model in a stream as an ONNX graph."""

import contextlib
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor

from models.stream import StreamModel


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

    Its inputs are `tokens` and the names of the state, in the order of start(), for any number of rows and tokens, or
    for one of each if sizes are fixed. The outputs are log_probabilities, hidden, and next_NAME for each name. about:
    metadata of the graph.
    """
    rows, length, shapes, state = 1, 1, None, network.start(1)
    if not network.fixed:
        # Sizes of 0 and 1 would become constants.
        rows, length, memory = 2, min(5, network.context), min(3, network.context - 1)
        begun = network.start(rows)
        state = {name: value.new_zeros([size or memory for size in value.shape]) for name, value in begun.items()}
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
        shapes = {"tokens": sizes, "state": dynamic_sizes(begun)}
    with quiet():
        program = torch.onnx.export(
            network,
            (torch.zeros(rows, length, dtype=torch.int64),),
            kwargs={"state": state},
            dynamo=True,
            verbose=False,
            input_names=["tokens", *state],
            output_names=["log_probabilities", "hidden", *(f"next_{name}" for name in state)],
            dynamic_shapes=shapes,
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
