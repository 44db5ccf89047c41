"""nas.training.build."""

import math

import numpy as np
import torch
from torch import nn

from models.cutoffs import LayerCost, optimal_cutoffs
from models.operations import BlockConfig
from models.transformer_xl import TransformerXL, build_pattern
from nas.core.config import Config
from nas.core.errors import InputError
from nas.data.corpus import Corpus
from nas.data.loader import ContextBatches
from nas.training.device import device_context
from nas.training.evaluation import count_looking_back, evaluate_split, period_of


def block_config(config: Config) -> BlockConfig:
    model = config.model
    return BlockConfig(
        d_model=model.d_model,
        heads=model.heads,
        d_ffn=model.d_ffn,
        dropout=model.dropout,
        norm=model.norm,
        activation=model.activation,
        relative=model.positions == "relative",
        stride=model.stride,
        summary=model.summary,
        factorization=model.factorization,
    )


def image_size(config: Config) -> int:
    """Tokens of an image, at whose borders rows of a batch begin; 1 where positions are relative."""
    return math.prod(config.model.grid)


def resolve_cutoffs(config: Config, corpus: Corpus) -> None:
    """Replace model.cutoffs: auto by the cutoffs that cost least on the training text: before anything is built from
    the configuration, or the run's config.yaml is written.

    Raises InputError where the vocabulary has fewer words than clusters.
    """
    model, train = config.model, config.train
    if model.cutoffs != "auto":
        return
    if model.clusters > corpus.vocab_size:
        raise InputError(f"model.clusters={model.clusters} must be at most the vocabulary size {corpus.vocab_size}")
    cost = LayerCost(model.d_model, model.div_value, train.batch_size * train.segment)
    model.cutoffs = optimal_cutoffs(corpus.counts(), model.clusters, cost)
    print(f"model.cutoffs=auto: {model.cutoffs} of {corpus.vocab_size:,} words")


def backbone_options(config: Config, vocab_size: int) -> dict:
    """How all but the blocks is built. Raises InputError where the cutoffs do not fit the vocabulary."""
    model = config.model
    options = {"grid": model.grid, "recompute": model.recompute, "depth_scaled": model.init == "depth_scaled"}
    return output_options(config, vocab_size) | options


def output_options(config: Config, vocab_size: int) -> dict:
    """How the output layer is built. Raises InputError where the cutoffs do not fit the vocabulary."""
    model = config.model
    if model.cutoffs and model.cutoffs[-1] >= vocab_size:
        raise InputError(f"model.cutoffs={model.cutoffs} must stay below the vocabulary size {vocab_size}")
    return {"cutoffs": model.cutoffs, "tie_embeddings": model.tie_embeddings, "div_value": model.div_value}


def build_fixed(pattern: list[str], config: Config, corpus: Corpus) -> TransformerXL:
    options = backbone_options(config, corpus.vocab_size)
    return build_pattern(pattern, block_config(config), corpus.vocab_size, **options)


def count_parameters(pattern: list[str], config: Config, vocab_size: int) -> int:
    with torch.device("meta"):  # shapes alone are needed
        model = build_pattern(pattern, block_config(config), vocab_size, **backbone_options(config, vocab_size))
    return sum(parameter.numel() for parameter in model.parameters())


def check_splits(config: Config, corpus: Corpus) -> None:
    """Raises InputError where a split is too short to evaluate, or holds no whole number of images."""
    image = image_size(config)
    for split in ("train", "valid", "test"):
        tokens = len(corpus.tokens(split))
        if split != "train" and tokens < 2:
            raise InputError(f"the {split} split has {tokens} tokens: it needs at least 2")
        if tokens % image:
            raise InputError(
                f"the {split} split has {tokens:,} bytes, no whole number of images of {image:,} "
                f"(model.grid={config.model.grid} must be their rows, columns and channels); data.source=FOLDER with "
                "train.bin, valid.bin and test.bin keeps images whole, a single file is cut anywhere"
            )


def count_steps(config: Config, stream_tokens: int) -> int:
    """train.steps, or what train.epochs passes over a stream take."""
    if config.train.steps is not None:
        return config.train.steps
    return max(1, math.ceil(config.train.epochs * stream_tokens / (config.train.batch_size * config.train.segment)))


def context_batches(stream: np.ndarray, config: Config, name: str = "train") -> ContextBatches:
    """Raises InputError where the stream is too short, or the ranks do not divide the batch."""
    train, device = config.train, device_context(config.train).device
    return ContextBatches(
        stream, train.batch_size, train.segment, name, image_size(config), train.grad_accum_steps, device
    )


def evaluate_with(config: Config, model: nn.Module, blocks, corpus: Corpus, split: str) -> dict:
    """The evaluation protocol at the configured lengths."""
    context = device_context(config.train)
    segment, memory = evaluation_lengths(config)
    looking_back, period = count_looking_back(blocks), period_of(blocks, image_size(config))
    rows = config.evaluate.batch_size
    with context.autocast(), context.disable_compile():
        return evaluate_split(model, corpus, split, rows, segment, memory, looking_back, period, context.device)


def evaluation_lengths(config: Config) -> tuple[int, int]:
    """(segment, memory) of evaluation; null stands for training's."""
    options, train = config.evaluate, config.train
    segment = train.segment if options.segment is None else options.segment
    return segment, train.memory if options.memory is None else options.memory
