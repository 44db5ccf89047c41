"""Networks from a configuration."""

from models.operations.operation import BlockConfig
from models.transformer_xl import TransformerXL, build_pattern
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.pattern import resolve_block


def block_config(config: Config) -> BlockConfig:
    model = config.model
    return BlockConfig(model.d_model, model.dropout, model.norm, model.activation, relative=not model.grid)


def backbone_options(config: Config, vocab_size: int) -> dict:
    """The options of TransformerXL. Raises InputError if the cutoffs do not fit the vocabulary."""
    model = config.model
    if model.cutoffs and model.cutoffs[-1] >= vocab_size:
        raise InputError(f"model.cutoffs={model.cutoffs} must stay below the vocabulary size {vocab_size}")
    return {
        "cutoffs": model.cutoffs,
        "tie_embeddings": model.tie_embeddings,
        "div_value": model.div_value,
        "ngram_rows": model.ngram_rows,
        "grid": model.grid,
        "recompute": model.recompute,
        "depth_scaled": model.init == "depth_scaled",
    }


def build_fixed(pattern: list[str], config: Config, vocab_size: int) -> TransformerXL:
    blocks = [resolve_block(block, config.shape) for block in pattern]
    return build_pattern(blocks, block_config(config), vocab_size, **backbone_options(config, vocab_size))
