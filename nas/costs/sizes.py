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
ENTRY, BLOCK = 120, 1000  # bytes of a tensor in the head of a file; of a block in picture and pattern
OTHER_FILES = 40_000  # bytes of an export's card, picture, pattern and configuration


def weight_bytes(model: nn.Module, weights: str) -> int:
    """Of the weights in a format of search.size.weights, see nas.retraining.weights.quantize()."""
    found = 0
    for one in model.parameters():
        is_rounded = weights == "int8" and one.dim() > 1
        found += one.numel() + 4 * len(one) + 2 * ENTRY if is_rounded else 4 * one.numel() + ENTRY
    return found


def operation_bytes(config: Config, corpus: Corpus) -> dict[str, int]:
    """Of each operation of the search, in a block. config: without auto."""
    names, weights = dict.fromkeys([*config.search.operations, *interleaved(2)]), config.search.size.weights
    with torch.device("meta"):  # only shapes are needed
        own = {name: build_fixed([name], config, corpus.vocab_size) for name in names}
        none = weight_bytes(build_fixed([], config, corpus.vocab_size), weights)
    return {name: weight_bytes(model, weights) - none + BLOCK * (name != "identity") for name, model in own.items()}


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
