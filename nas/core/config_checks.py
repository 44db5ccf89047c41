"""nas.core.config_checks."""

import difflib
import math

from nas.core.config import Config, ModelOptions, options
from nas.core.errors import InputError
from nas.core.pattern import OPERATIONS


def check(config: Config) -> None:
    """Ranges, choices and what must fit together. Raises InputError that names the key."""
    for key, item in options():
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        check_range(key, value, item.metadata)
    model, train, search = config.model, config.train, config.search
    if model.d_model % model.heads:
        divisors = [str(n) for n in range(1, model.d_model + 1) if model.d_model % n == 0]
        raise InputError(
            f"model.heads={model.heads} must divide model.d_model={model.d_model}: one of {', '.join(divisors)}"
        )
    if model.d_model % 2:
        raise InputError(f"model.d_model={model.d_model} must be even: positions are pairs of sine and cosine")
    check_cutoffs(model.cutoffs)
    check_sparse(model)
    check_grid(config)
    if model.init == "depth_scaled" and model.norm != "pre":
        raise InputError(
            f"model.init=depth_scaled needs model.norm=pre, not {model.norm}: it keeps the residual stream small"
        )
    if model.tie_embeddings and model.div_value != 1:
        raise InputError(
            f"model.div_value={model.div_value} needs model.tie_embeddings=false: a tied table has one width"
        )
    if train.steps is None and train.epochs is None:
        raise InputError("train.steps and train.epochs are both null: give one of them")
    if train.steps is not None and train.epochs is not None:
        raise InputError(f"train.steps={train.steps} and train.epochs={train.epochs} are both given: set one to null")
    if train.batch_size % train.grad_accum_steps:
        raise InputError(
            f"train.grad_accum_steps={train.grad_accum_steps} must divide train.batch_size={train.batch_size}"
        )
    together = search.split == "shared" and (search.sampling == "soft" or search.estimator == "straight_through")
    if search.weights_paths == "uniform" and together:
        raise InputError(
            "search.weights_paths=uniform needs search.split=heldout, or hard sampling with leave_one_out: here "
            "weights and logits learn from one sample"
        )
    if not search.operations or len(set(search.operations)) < len(search.operations):
        raise InputError(
            f"search.operations={search.operations} must name different operations of {', '.join(OPERATIONS)}"
        )
    for name in search.operations:
        if name not in OPERATIONS:
            nearest = difflib.get_close_matches(name, OPERATIONS, n=1, cutoff=0)[0]
            raise InputError(
                f"search.operations: unknown operation {name!r}; the nearest is {nearest!r} of {', '.join(OPERATIONS)}"
            )


def default_stride(keys: int) -> int:
    """The power of two nearest to the square root of so many keys."""
    root = math.sqrt(keys)
    lower = 2 ** math.floor(math.log2(root))
    return lower if root - lower <= 2 * lower - root else 2 * lower


def settled(stride: int | None, summary: int | None, keys: int) -> tuple[int | None, int | None]:
    """model.stride and model.summary with numbers in the place of null; keys: of an attention, segment and memory."""
    if stride is None and keys > 0:  # segment and memory are checked afterwards
        stride = default_stride(keys)
    return stride, min(4, stride) if summary is None and stride is not None else summary


def settle_sparse(config: Config) -> None:
    """So that a run's config.yaml holds numbers."""
    model, train = config.model, config.train
    model.stride, model.summary = settled(model.stride, model.summary, train.segment + train.memory)


def check_sparse(model: ModelOptions) -> None:
    if model.summary > model.stride:
        raise InputError(f"model.summary={model.summary} must be at most model.stride, which is {model.stride}")
    if model.factorization == "heads" and model.heads % 2:
        raise InputError(
            f"model.heads={model.heads} must be even with model.factorization=heads: each half has its own set"
        )


def check_grid(config: Config) -> None:
    grid, data, wanted = config.model.grid, config.data, config.model.positions == "grid"
    if wanted and (len(grid) != 3 or min(grid) < 1):
        raise InputError(
            f"model.grid={grid} must give rows, columns and channels with model.positions=grid: [32, 32, 3]"
        )
    if wanted and (data.tokenizer != "bytes" or data.newline != "keep"):
        raise InputError("model.positions=grid counts bytes: it needs data.tokenizer=bytes and data.newline=keep")
    if grid and not wanted:
        raise InputError(f"model.grid={grid} needs model.positions=grid")


def check_cutoffs(cutoffs) -> None:
    if cutoffs == "auto":
        return
    if not isinstance(cutoffs, list) or any(type(cutoff) is not int for cutoff in cutoffs):
        raise InputError(f"model.cutoffs={cutoffs} must be a list of whole numbers, such as [250, 2500], or auto")
    if any(low >= high for low, high in zip([0, *cutoffs], cutoffs, strict=False)):
        raise InputError(f"model.cutoffs={cutoffs} must be positive and increasing, such as [250, 2500]")


def check_range(key: str, value, limits) -> None:
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{key}={value} must be a finite number")
    if "choices" in limits and value not in limits["choices"]:
        nearest = difflib.get_close_matches(str(value), limits["choices"], n=1, cutoff=0)[0]
        raise InputError(f"{key}={value} must be one of {', '.join(limits['choices'])}; the nearest is {nearest}")
    tests = {
        "minimum": (lambda limit: value >= limit, "at least"),
        "above": (lambda limit: value > limit, "greater than"),
        "maximum": (lambda limit: value <= limit, "at most"),
        "below": (lambda limit: value < limit, "less than"),
    }
    for name, (passes, words) in tests.items():
        if name in limits and not passes(limits[name]):
            raise InputError(f"{key}={value} must be {words} {limits[name]}")
