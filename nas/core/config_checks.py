"""Checks of options that depend on each other. The type of an option tells its own range."""

from contextlib import suppress
from dataclasses import asdict

from nas.core.blocks import parse_block, resolve_block, simplify_block
from nas.core.config import (
    CANDIDATES,
    PIECES,
    SHORT_PARTS,
    Config,
    LatencyOptions,
    ModelOptions,
    TrainOptions,
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
    check_model(config.model)
    check_grid(config)
    check_train(config.train)
    if config.train.short_share and (conflict := short_segments_conflict(config)):
        raise InputError(conflict)
    check_method(config)
    check_budget(config.search.latency)
    check_sizes(config)
    given = config.search.operations or default_operations(config)
    config.search.operations = simplify(given, config, "search.operations: entry")
    check_search(config, given)


def check_model(model: ModelOptions) -> None:
    if model.d_model % model.heads:
        divisors = [str(n) for n in range(1, model.d_model + 1) if model.d_model % n == 0]
        raise InputError(
            f"model.heads={model.heads} must divide model.d_model={model.d_model}: one of {', '.join(divisors)}"
        )
    if model.init == "depth_scaled" and model.norm != "pre":
        raise InputError(f"model.init=depth_scaled needs model.norm=pre, not {model.norm}")
    if model.tie_embeddings and model.div_value != 1:
        raise InputError(f"model.div_value={model.div_value} needs model.tie_embeddings=false")


def check_grid(config: Config) -> None:
    grid, data = config.model.grid, config.data
    if grid and (data.tokenizer in (*PIECES, "words") or data.newline != "keep"):  # a path is checked when it is read
        raise InputError(f"model.grid={grid} counts bytes: it needs data.tokenizer=bytes and data.newline=keep")


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


def check_train(train: TrainOptions) -> None:
    if train.steps is None and train.epochs is None:
        raise InputError("train.steps and train.epochs are both null: give one of them")
    if train.steps is not None and train.epochs is not None:
        raise InputError(f"train.steps={train.steps} and train.epochs={train.epochs} are both given: set one to null")
    if train.batch_size % train.grad_accum_steps:
        raise InputError(
            f"train.grad_accum_steps={train.grad_accum_steps} must divide train.batch_size={train.batch_size}"
        )


def short_segments_conflict(config: Config) -> str | None:
    """Why the configuration does not allow short segments, or None."""
    train = config.train
    if train.segment % SHORT_PARTS:
        return f"train.short_share={train.short_share} needs an even train.segment, not {train.segment}"
    if config.model.grid:
        return f"train.short_share={train.short_share} does not work with model.grid; give 0"
    return None


def check_budget(latency: LatencyOptions) -> None:
    if milliseconds(latency.target) and not latency.in_milliseconds:
        raise InputError(f"search.latency.target={latency.target} needs search.latency.source=measured")
    if latency.timing == "generation" and latency.source == "flops":
        raise InputError("search.latency.timing=generation needs search.latency.source=measured")
    if latency.source == "onnx" and latency.timing != "generation":
        raise InputError("search.latency.source=onnx needs search.latency.timing=generation")


def check_sizes(config: Config) -> None:
    search, data, head = config.search, config.data, config.model.d_model // config.model.heads
    for width in search.d_model if search.d_model != "auto" else []:
        if width % head:
            raise InputError(
                f"search.d_model={width} must be a multiple of {head}, the channels of a head (model.heads)"
            )
    if search.vocab_size and data.tokenizer not in PIECES:
        raise InputError("search.vocab_size needs data.tokenizer=bpe or unigram")
    if search.vocab_size and data.vocab_size is None:
        raise InputError("search.vocab_size needs data.vocab_size, that of the reference")


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


def check_method(config: Config) -> None:
    """Raises InputError that names the first option that needs another search method."""
    values, defaults = flat_config(asdict(config)), flat_config({})
    for key, option in options().items():
        if option.method not in (None, config.search.method) and values[key] != defaults[key]:
            raise InputError(f"{key}={values[key]} needs search.method={option.method}")


def default_operations(config: Config) -> list[str]:
    """The candidates of the search method that differ and fit the sizes of the configuration."""
    found = {}
    for name in CANDIDATES[config.search.method]:
        with suppress(InputError):
            found.setdefault(str(resolve_block(name, config.shape)), name)
    return [*found.values()]


def check_search(config: Config, given: list) -> None:
    """given: the operations as they were written."""
    names, resolved = config.search.operations, {}
    for index, name in enumerate(names):
        first = resolved.setdefault(str(resolve_block(name, config.shape)), index)
        if first != index:
            raise InputError(
                f"search.operations: {given[first]} and {given[index]} are the same; candidates must differ"
            )
