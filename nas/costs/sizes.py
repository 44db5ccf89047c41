"""Bytes of what ships: weights, vocabulary, and what is mixed with the network (search.size.target)."""

import math

import torch
from torch import nn

from nas.core.config import Config
from nas.core.pattern import interleaved
from nas.data.corpus import Corpus
from nas.data.vocabulary import VOCABULARY
from nas.mixture.mixture import Mixture
from nas.training.build import build_fixed

NUMBER = 22  # bytes of a number in mixture.json
OTHER_FILES = 40_000  # bytes of an export's card, picture, pattern and configuration


def weight_bytes(model: nn.Module, weights: str) -> int:
    """Of the weights in a format of search.size.weights."""
    parameters = [*model.parameters()]
    if weights == "float32":
        return sum(4 * one.numel() for one in parameters)
    return sum(one.numel() + 4 * len(one) if one.dim() > 1 else 4 * one.numel() for one in parameters)


def operation_bytes(config: Config, corpus: Corpus) -> dict[str, int]:
    """Of each operation of the search, in a block. config: without auto."""
    names, weights = dict.fromkeys([*config.search.operations, *interleaved(2)]), config.search.size.weights
    with torch.device("meta"):  # only shapes are needed
        own = {name: build_fixed([name], config, corpus.vocab_size) for name in names}
        none = weight_bytes(build_fixed([], config, corpus.vocab_size), weights)
    return {name: weight_bytes(model, weights) - none for name, model in own.items()}


def bytes_beside(config: Config, corpus: Corpus, has_network: bool = True) -> int:
    """Of everything but blocks and counts: embedding, output layer, vocabulary, and the weights of the mixture."""
    width, files = config.model.d_model * has_network, (corpus.folder / VOCABULARY).iterdir()
    states = config.beside.states * has_network
    mixture = Mixture(states, config.beside.cache, config.beside.counts, width, corpus.vocab_size, "", None)
    found = (
        OTHER_FILES
        + sum(file.stat().st_size for file in files)
        + NUMBER * sum(math.prod(shape) for shape in mixture.shapes.values())
    )
    if not has_network:
        return found
    with torch.device("meta"):
        return found + weight_bytes(build_fixed([], config, corpus.vocab_size), config.search.size.weights)
