"""Networks and streams from a configuration."""

import math

import numpy as np

from models.operations.operation import BlockConfig
from models.transformer_xl import TransformerXL, build_pattern
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.pattern import resolve_block
from nas.data.corpus import Corpus
from nas.data.loader import ContextBatches
from nas.training.device import Runtime
from nas.training.distributed import rank_rows
from nas.training.train_step import Stream


def block_config(config: Config) -> BlockConfig:
    model = config.model
    return BlockConfig(model.d_model, model.dropout, model.norm, model.activation, relative=not model.grid)


def backbone_options(config: Config, vocab_size: int) -> dict:
    """The options of TransformerXL. Raises InputError if the cutoffs do not fit the vocabulary."""
    model = config.model
    if model.cutoffs and model.cutoffs[-1] >= vocab_size:
        raise InputError(f"model.cutoffs={model.cutoffs} must stay below the vocabulary size {vocab_size}")
    same = "cutoffs", "div_value", "ngram_rows", "grid", "recompute"
    own = {
        "tie_embeddings": model.tie_embeddings is True,
        "depth_scaled": model.init == "depth_scaled",
    }  # or it is auto
    return {name: getattr(model, name) for name in same} | own


def build_fixed(pattern: list[str], config: Config, vocab_size: int) -> TransformerXL:
    blocks = [resolve_block(block, config.shape) for block in pattern]
    return build_pattern(blocks, block_config(config), vocab_size, **backbone_options(config, vocab_size))


def image_size(config: Config) -> int:
    """Number of tokens of an image; 1 if the data are not images."""
    return math.prod(config.model.grid)


def check_splits(config: Config, corpus: Corpus) -> None:
    """Raises InputError if a split is too short to evaluate, or does not consist of whole images."""
    image, grid = image_size(config), config.model.grid
    if grid and corpus.vocabulary.kind != "bytes":
        raise InputError(f"model.grid={grid} counts bytes, but the tokens of {config.data.tokenizer} are not bytes")
    for split in ("train", "valid", "test"):
        tokens = len(corpus.tokens(split))
        if split != "train" and tokens < 2:
            raise InputError(f"the {split} split has {tokens} tokens: it needs at least 2")
        if tokens % image:
            raise InputError(
                f"the {split} split has {tokens:,} bytes, not a whole number of images of {image:,} "
                f"(model.grid={grid} must be their rows, columns and channels); data.source=FOLDER with "
                "train.bin, valid.bin and test.bin keeps images whole; a single file may be split inside an image"
            )


def open_stream(
    tokens: np.ndarray, config: Config, runtime: Runtime, name: str = "train", beside: np.ndarray | None = None
) -> Stream:
    """The part of the tokens that this rank reads. beside: of ContextBatches. Raises InputError if they are too few."""
    train, rows = config.train, rank_rows(config.train.batch_size, config.train.grad_accum_steps)
    sizes = train.batch_size, train.segment, name, image_size(config)
    return Stream(ContextBatches(tokens, *sizes, rows, runtime.device, beside))


def open_streams(corpus: Corpus, config: Config, runtime: Runtime) -> tuple[Stream, Stream | None]:
    """The training text that the weights read and, with search.split=heldout, its end, which the logits of a SuperNet
    read. Raises InputError if a text is too short.
    """
    check_splits(config, corpus)
    tokens, image = corpus.tokens("train"), image_size(config)
    if config.search.method != "gumbel" or config.search.split == "shared":
        return open_stream(tokens, config, runtime), None
    boundary = round(len(tokens) * (1 - config.search.arch_fraction)) // image * image
    name = "held-out training (search.arch_fraction)"
    return open_stream(tokens[:boundary], config, runtime), open_stream(tokens[boundary:], config, runtime, name)
