"""A trained model as an ONNX graph, checked against PyTorch, and its reader in ONNX Runtime."""

from pathlib import Path

import numpy as np
import torch

from models.stream import StreamModel, export_graph, open_graph, quiet
from nas.core.config import Config
from nas.core.errors import InputError, RunError
from nas.costs.latency import timed_rounds
from nas.data.corpus import Corpus
from nas.inference.language_model import LanguageModel
from nas.training.evaluation import evaluation_lengths, figures

GRAPH, START, INT8 = "model.onnx", "start.npz", "int8.onnx"
TIMED = 200  # tokens
CHECKED, LARGEST = 1000, 1e-3  # tokens, and the largest difference to PyTorch in nats


def write_graph(model: LanguageModel, folder: Path) -> float:
    """Write GRAPH and START. Returns the largest difference of a log-probability to PyTorch's, in nats.

    Raises InputError if the model reads no memory, and RunError if the graph computes something else.
    """
    segment, memory = evaluation_lengths(model.config)
    if not memory:
        raise InputError(
            "a model without memory begins anew after each segment, which the graph cannot: train with one"
        )
    network = StreamModel(model.module, segment + memory)
    export_graph(network, folder / GRAPH, segment=segment)
    np.savez(folder / START, **{name: value.numpy() for name, value in network.start(1).items()})
    difference = largest_difference(network, folder)
    if difference > LARGEST:
        raise RunError(f"{folder / GRAPH} differs from PyTorch by {difference:.2g} nats; please report this model")
    return difference


class GraphReader:
    """Reads a stream of one row with an exported graph."""

    def __init__(self, folder: Path, threads: int = 1):
        self.session, self.first = open_graph(folder / GRAPH, threads), dict(np.load(folder / START))
        self.segment = int(self.session.get_modelmeta().custom_metadata_map["segment"])  # of evaluation
        self.restart()

    def restart(self) -> None:
        """Begin a new stream."""
        self.state = self.first

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Read the next tokens [1, L]. Returns the log-probabilities after each of them [1, L, V]."""
        log_p, *after = self.session.run(None, {"tokens": tokens, **self.state})
        self.state = dict(zip(self.state, after, strict=True))
        return log_p


def quantize_graph(folder: Path) -> None:
    """Replace the graph by one with weights and products of int8 (dynamic quantisation)."""
    from onnxruntime.quantization import quantize_dynamic

    with quiet():
        quantize_dynamic(folder / GRAPH, folder / INT8)
    (folder / INT8).replace(folder / GRAPH)


def judge_graph(folder: Path, config: Config, corpus: Corpus) -> dict:
    """The figures of valid by the evaluation protocol, and `ms_per_token`: the median time of a token, on one thread.

    corpus: of the model's training.
    """
    reader, tokens, total = GraphReader(folder), corpus.tokens("valid").astype(np.int64), 0.0
    segment, _ = evaluation_lengths(config)
    for start in range(0, len(tokens) - 1, segment):
        targets = tokens[start + 1 : start + segment + 1]
        log_p = reader.read(tokens[None, start : start + len(targets)])[0]  # [L, V]
        total -= float(log_p[np.arange(len(targets)), targets].sum(dtype=np.float64))
    seconds = timed_rounds({"token": lambda: reader.read(tokens[None, :1])}, TIMED)["token"]
    found = figures(total, len(tokens) - 1, corpus.meta["splits"]["valid"])
    return found | {"ms_per_token": 1e3 * float(np.median(seconds))}


@torch.no_grad()
def largest_difference(network: StreamModel, folder: Path) -> float:
    """To PyTorch, in nats, for a stream of random tokens, in pieces of several lengths."""
    generator, reader, state, done, largest = np.random.default_rng(0), GraphReader(folder), network.start(1), 0, 0.0
    while done < CHECKED:
        length = min(int(generator.choice([1, 2, 7, 64, 128])), network.context, CHECKED - done)
        tokens = generator.integers(len(network.model.embedding.weight), size=(1, length))
        expected, state = network(torch.from_numpy(tokens), state)
        largest = max(largest, float(np.abs(reader.read(tokens) - expected.numpy()).max()))
        done += length
    return largest
