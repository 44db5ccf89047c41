"""Checks of options that depend on each other. The type of an option tells its own range."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

from nas.core.blocks import parse_block, resolve_block, simplify_block
from nas.core.config import (
    CANDIDATES,
    PIECES,
    SHORT_PARTS,
    Config,
    LatencyOptions,
    flat_config,
    milliseconds,
    options,
)
from nas.core.errors import InputError

MOST_BUDGET = 10  # times the cost of the reference


def check(config: Config) -> None:
    """Give the operations their usual spelling, and add those of the method if there are none.

    Raises InputError that names the first option that does not fit another.
    """
    for conflict in conflicts(config):
        raise InputError(conflict)
    names = config.search.operations or default_operations(config)
    config.search.operations, known = simplify(names, config, "search.operations: entry"), {}
    for given, name in zip(names, config.search.operations):
        if (block := str(resolve_block(name, config.shape))) in known:
            raise InputError(f"search.operations: {known[block]} and {given} are the same; candidates must differ")
        known[block] = given


def conflicts(config: Config) -> Iterator[str]:
    """What is wrong with options that do not fit each other, in sentences."""
    data, model, train, search, latency = config.data, config.model, config.train, config.search, config.search.latency
    if model.d_model % model.heads:
        divisors = ", ".join(str(n) for n in range(1, model.d_model + 1) if model.d_model % n == 0)
        yield f"model.heads={model.heads} must divide model.d_model={model.d_model}: one of {divisors}"
    if model.init == "depth_scaled" and model.norm != "pre":
        yield f"model.init=depth_scaled needs model.norm=pre, not {model.norm}"
    if model.tie_embeddings and model.div_value != 1:
        yield f"model.div_value={model.div_value} needs model.tie_embeddings=false"
    if model.grid and (data.tokenizer in (*PIECES, "words") or data.newline != "keep"):  # build.py checks a path
        yield f"model.grid={model.grid} counts bytes: it needs data.tokenizer=bytes and data.newline=keep"
    if train.steps is None and train.epochs is None:
        yield "train.steps and train.epochs are both null: give one of them"
    if train.steps is not None and train.epochs is not None:
        yield f"train.steps={train.steps} and train.epochs={train.epochs} are both given: set one to null"
    if train.batch_size % train.grad_accum_steps:
        yield f"train.grad_accum_steps={train.grad_accum_steps} must divide train.batch_size={train.batch_size}"
    if train.short_share and (conflict := short_segments_conflict(config)):
        yield conflict
    values, defaults = flat_config(asdict(config)), flat_config({})
    for key, option in options().items():
        if option.method not in (None, search.method) and values[key] != defaults[key]:
            yield f"{key}={values[key]} needs search.method={option.method}"
    if milliseconds(latency.target) and not latency.in_milliseconds:
        yield f"search.latency.target={latency.target} needs search.latency.source=measured"
    if latency.timing == "generation" and latency.source == "flops":
        yield "search.latency.timing=generation needs search.latency.source=measured"
    if latency.source == "onnx" and latency.timing != "generation":
        yield "search.latency.source=onnx needs search.latency.timing=generation"
    head = model.d_model // model.heads
    for width in search.d_model if search.d_model != "auto" else []:
        if width % head:
            yield f"search.d_model={width} must be a multiple of {head}, the channels of a head (model.heads)"
    if search.vocab_size and data.tokenizer not in PIECES:
        yield "search.vocab_size needs data.tokenizer=bpe or unigram"
    if search.vocab_size and data.vocab_size is None:
        yield "search.vocab_size needs data.vocab_size, that of the reference"


def simplify(pattern: list, config: Config, where: str) -> list[str]:
    """The blocks of a pattern in their usual spelling, without sizes that are the defaults.

    Raises InputError, which begins with `where` and the number of the block, if a block is invalid or does not fit the
    configuration.
    """
    model, simple = config.model, []
    for number, block in enumerate(pattern, start=1):
        simple.append(simplify_block(block, config.shape, f"{where} {number}: "))
        # The state of linear attention would go on from one image to the next.
        if model.grid and parse_block(block)[0] == "linear":
            raise InputError(f"{where} {number}: linear cannot read images; remove it, or model.grid={model.grid}")
    if set(simple) == {"identity"} and config.train.optimizer == "muon":
        raise InputError("train.optimizer=muon needs blocks with weights; give train.optimizer=adamw")
    return simple


def short_segments_conflict(config: Config) -> str | None:
    """Why the configuration does not allow short segments, or None."""
    train = config.train
    if train.segment % SHORT_PARTS:
        return f"train.short_share={train.short_share} needs an even train.segment, not {train.segment}"
    if config.model.grid:
        return f"train.short_share={train.short_share} does not work with model.grid; give 0"
    return None


def check_search_budget(config: Config) -> None:
    """Raises InputError if a search has a budget of its own, but no source of costs, or a budget that is no share."""
    latency = config.search.latency
    if latency.source != "none" and milliseconds(latency.target) is None and latency.target > MOST_BUDGET:
        raise InputError(
            f"search.latency.target={latency.target} is a ratio to the reference: give at most {MOST_BUDGET}"
        )
    if latency.source == "none" and latency.target != LatencyOptions().target:
        raise InputError(f"search.latency.target={latency.target} needs search.latency.source=measured, or flops")


def check_same_text(config: Config) -> None:
    """Raises InputError if a search among vocabularies has trainings of a number of steps."""
    if config.search.vocab_size and config.train.epochs is None:
        raise InputError(
            "search.vocab_size needs train.epochs instead of train.steps, so that each vocabulary reads the same text; "
            "nas.run --minutes finds a suitable number"
        )


def default_operations(config: Config) -> list[str]:
    """The candidates of the search method that differ and fit the sizes of the configuration."""
    found = {}
    for name in CANDIDATES[config.search.method]:
        with suppress(InputError):
            found.setdefault(str(resolve_block(name, config.shape)), name)
    return [*found.values()]
