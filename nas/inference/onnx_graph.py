"""A trained model as an ONNX graph, checked against PyTorch, and the readers of both."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from models.graph import export_graph, open_graph, quiet
from models.stream import StreamModel
from nas.core.errors import InputError, RunError, check_onnx
from nas.costs.measurement import timed_rounds
from nas.data.corpus import Corpus
from nas.data.sources import sha256_of
from nas.data.vocabulary import VOCABULARY, VOCABULARY_FILE
from nas.inference.language_model import LanguageModel
from nas.mixture.mixture import Mixture, Stream
from nas.retraining.weights import GRAPH
from nas.training.evaluation import evaluation_lengths, text_metrics

START, INT8 = "start.npz", "int8.onnx"
ROUNDS = 200  # of timing
CHECKED, LARGEST = 1000, 1e-3  # tokens, and the largest difference to PyTorch in nats


class StreamReader:
    """Reads a stream of one row, by a graph or by PyTorch, and with a mixture if there is one.

    step: a function of tokens [1, L] and a state -> log-probabilities [1, L, V] after each token, the inputs of the
    output layer [1, L, D], and the next state; None: no network. first: the state of a stream that begins. segment:
    tokens that an evaluation reads at once.
    """

    def __init__(self, step: Callable | None, first: dict, segment: int, mixture: Mixture | None = None):
        self.step, self.first, self.segment, self.mixture = step, first, segment, mixture
        self.restart()

    def restart(self) -> None:
        self.state, self.stream = self.first, self.mixture and Stream(self.mixture)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Read the next tokens [1, L]. Returns the log-probabilities after each of them [1, L, V]."""
        network = [(None, None)] * tokens.size
        if self.step:
            log_p, hidden, self.state = self.step(tokens, self.state)
            network = zip(log_p[0], hidden[0, :, None], strict=True)
        if not self.stream:
            return log_p
        found = []
        for token, (own, state) in zip(tokens[0], network, strict=True):
            self.stream.read(token[None], state)
            found.append(np.log(self.stream.predict(own)))
        return np.array([found])

    def score(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The log-probabilities [N - 1] of ids[1:] in a new stream, and whether each is the most probable [N - 1]."""
        self.restart()
        found, greedy, ids = [np.empty(0)], [np.empty(0, bool)], ids.astype(np.int64)
        # The last piece is as long as the others, because a shorter one would see more positions before it.
        inputs = np.pad(ids[:-1], (0, -(len(ids) - 1) % self.segment))
        for start in range(0, len(inputs), self.segment):
            targets = ids[start + 1 : start + self.segment + 1]
            log_p = self.read(inputs[None, start : start + self.segment])[0]  # [L, V]
            found.append(log_p[np.arange(len(targets)), targets])
            greedy.append(log_p[: len(targets)].argmax(axis=-1) == targets)
        return np.concatenate(found), np.concatenate(greedy)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of the files beside a graph."""
    files = {"start": folder / START, "vocabulary": folder / VOCABULARY / VOCABULARY_FILE}
    return {name: sha256_of(file) for name, file in files.items()}


def graph_reader(folder: Path, mixture: Mixture | None = None) -> StreamReader:
    """The reader of an exported graph, on one thread. Raises InputError if its files are not those of one export."""
    check_onnx("onnxruntime")
    try:
        session, first, own = open_graph(folder / GRAPH, 1), dict(np.load(folder / START)), digests(folder)
    except Exception as error:  # those of ONNX Runtime have no base of their own
        raise InputError(f"{folder} is no ONNX folder of nas.export, or is damaged: {error}") from None
    about = session.get_modelmeta().custom_metadata_map
    if not own.items() <= about.items():
        raise InputError(f"{folder / GRAPH}, {START} and {VOCABULARY} are not of one export; export the run again")
    outputs = ["log_probabilities", "hidden", *(f"next_{name}" for name in first)]

    def step(tokens: np.ndarray, state: dict) -> tuple[np.ndarray, np.ndarray, dict]:
        log_p, hidden, *after = session.run(outputs, {"tokens": tokens} | state)
        return log_p, hidden, dict(zip(first, after, strict=True))

    return StreamReader(step, first, int(about["segment"]), mixture)


def model_reader(network: StreamModel, segment: int, mixture: Mixture | None = None) -> StreamReader:
    """The reader of a model, on the CPU."""

    @torch.inference_mode()
    def step(tokens: np.ndarray, state: dict) -> tuple[np.ndarray, np.ndarray, dict]:
        log_p, hidden, after = network(torch.from_numpy(tokens), state)
        return log_p.numpy(), hidden.numpy(), after

    return StreamReader(step, network.start(1), segment, mixture)


def stream_model(model: LanguageModel, fixed: bool = False) -> tuple[StreamModel, int]:
    """The model as a function of a stream's state, and the segment of evaluation; fixed: as in StreamModel.

    Raises InputError if evaluation has no memory, or sees fewer than the three positions that an export needs.
    """
    segment, memory = evaluation_lengths(model.config)
    if not model.module:
        raise InputError("this model is a cache and counts without a network, so there is no graph to export")
    if not memory or segment + memory < 3:
        lengths = f"a segment of {segment} and a memory of {memory}"
        raise InputError(f"a stream needs memory, but evaluation has {lengths}; train with train.memory=2 or more")
    return StreamModel(model.module, segment + memory, fixed), segment


def write_graph(model: LanguageModel, folder: Path, fixed: bool = False) -> float:
    """Write GRAPH and START. Returns the largest difference of a log-probability to PyTorch's, in nats.

    folder: holds the vocabulary. fixed: for single tokens, faster. Raises InputError as stream_model(), and RunError if
    this difference is large.
    """
    network, segment = stream_model(model, fixed)
    segment = 1 if fixed else segment
    np.savez_compressed(folder / START, **{name: value.numpy() for name, value in network.start(1).items()})
    export_graph(network, folder / GRAPH, segment=segment, **digests(folder))
    difference = largest_difference(network, graph_reader(folder), model_reader(network, segment))
    if not difference <= LARGEST:
        raise RunError(f"{folder / GRAPH} differs from PyTorch by {difference:.2g} nats; please report this model")
    return difference


def largest_difference(network: StreamModel, *readers: StreamReader) -> float:
    """Of two readers of the network, in nats, for a stream of random tokens, in pieces of several lengths."""
    generator, done, largest = np.random.default_rng(0), 0, 0.0
    while done < CHECKED:
        lengths = [1] if network.fixed else [1, 2, 7, 64, 128]
        length = min(int(generator.choice(lengths)), network.context, CHECKED - done)
        tokens = generator.integers(len(network.model.embedding.weight), size=(1, length))
        one, other = (reader.read(tokens) for reader in readers)
        largest, done = np.maximum(largest, np.abs(one - other).max()), done + length  # NaN stays
    return float(largest)


def quantize_graph(folder: Path) -> None:
    """Replace the graph by one with int8 weights (dynamic quantisation).

    All inputs of a matrix product share one scale, so a token's result depends on the other tokens of the call. So it
    must be a graph for single tokens.
    """
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    graph, int8 = folder / GRAPH, folder / INT8
    with quiet():
        # It folds the slices that give clusters their weights, because quantize_dynamic quantises initializers only.
        quant_pre_process(graph, int8, skip_symbolic_shape=True)
        quantize_dynamic(int8, int8)
    int8.replace(graph)


def evaluate_graphs(readers: dict[str, StreamReader], corpus: Corpus) -> dict[str, dict]:
    """{name: the metrics of valid, and `ms_per_token`, the median time of a token}. readers: of single tokens."""
    tokens, found = corpus.tokens("valid"), {}
    for name, reader in readers.items():
        nll = -float(reader.score(tokens)[0].sum(dtype=np.float64))
        found[name] = text_metrics(nll, len(tokens) - 1, corpus.meta["splits"]["valid"])
    token = tokens[None, :1].astype(np.int64)  # the memories are full now, as in generation
    works = {name: partial(reader.read, token) for name, reader in readers.items()}
    for name, seconds in timed_rounds(works, ROUNDS).items():
        found[name]["ms_per_token"] = 1e3 * float(np.median(seconds))
    return found
