"""How often the weights of a SuperNet train each operation, beside the trainings of patterns."""

import math

from nas.core.config import Config
from nas.training.build import count_steps, passes_warning, warmup_warning

MATURE = 0.9  # share of a pattern's steps in which each operation should train


def retraining_steps(config: Config, weights_steps: int) -> int:
    """The steps for which patterns will be trained: search.retrain_steps, or the updates of an operation."""
    return config.search.retrain_steps or math.ceil(weights_steps / len(config.search.operations))


def describe_steps(config: Config, text_tokens: int) -> list[str]:
    """What a search's steps of the weights mean for its operations, and warnings. text_tokens: of the training text."""
    if config.search.weights_from or config.search.method == "gumbel":
        return []
    steps = count_steps(config, text_tokens)
    lines = (
        describe_maturity(config, steps),
        maturity_warning(config, steps, config.search.retrain_steps),
        passes_warning(config, "search.retrain_steps", retraining_steps(config, steps), text_tokens),
        warmup_warning(config, steps),
    )
    return [line for line in lines if line]


def describe_maturity(config: Config, weights_steps: int) -> str:
    """How often the steps train each operation."""
    updates = weights_steps / len(config.search.operations)
    tokens, pattern_steps = config.train.batch_size * config.train.segment, config.search.retrain_steps
    text = f"{weights_steps:,} steps of {tokens:,} tokens train each operation of a block {updates:,.0f} times"
    if pattern_steps is None:
        return f"{text}: search.retrain_steps is not set, so patterns are assumed to train for as many steps"
    return f"{text}, {updates / pattern_steps:.2f} of the {pattern_steps:,} steps for which patterns will be trained"


def maturity_warning(config: Config, weights_steps: int, pattern_steps: int | None) -> str | None:
    """A warning if operations train in less than MATURE of a pattern's steps. pattern_steps: None if unknown."""
    enough = math.ceil(MATURE * (pattern_steps or 0) * len(config.search.operations))
    if weights_steps >= enough:
        return None
    return (
        f"WARNING: the search may misjudge patterns, because {weights_steps:,} steps train each operation only "
        f"{weights_steps / len(config.search.operations):,.0f} times; give the search train.steps={enough} or more"
    )
