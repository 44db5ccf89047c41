"""The schedule of a search: which steps train the weights, and which the logits."""

import math
from dataclasses import dataclass

from nas.core.config import Config
from nas.core.errors import InputError
from nas.search.sampling import weight_groups
from nas.training.build import count_steps, short_share

MATURE_WITH_TRIALS = 0.5  # share of the retraining's steps in which each operation should train, if trials follow
MATURE = 0.9  # the same without trials


@dataclass(frozen=True)
class Schedule:
    """Steps are numbered from 1. After the warm-up, a share of the steps trains the logits.

    weights_steps: the length of the weights' learning-rate schedule, 0 if the weights do not train; warmup_steps: the
    first steps, in which only the weights train, on uniform paths (in a sequential search, all of its weights_steps);
    total_steps: all steps; logits_share: the share of steps after the warm-up that train the logits; restarts: the
    steps after which the logits begin anew; short_share: the first share of the weights' steps, on short segments.
    """

    weights_steps: int
    warmup_steps: int
    total_steps: int
    logits_share: float
    restarts: tuple[int, ...] = ()
    short_share: float = 0.0

    def logits_learn(self, step: int) -> bool:
        """Whether the logits train at a step."""
        share = self.logits_share
        return step > self.warmup_steps and math.floor(step * share) > math.floor((step - 1) * share)

    @property
    def first_logits_step(self) -> int:
        return next(filter(self.logits_learn, range(self.warmup_steps + 1, self.total_steps + 1)))

    @property
    def first_step_of_last_seed(self) -> int:
        """The first step at which the last seed of the logits trains."""
        return self.restarts[-1] + 1 if self.restarts else self.first_logits_step

    def logits_seed(self, step: int) -> int:
        """How often the logits have begun anew before a step."""
        return sum(restart < step for restart in self.restarts)

    def progress(self, step: int) -> float:
        """The progress of the logits at a step, at most 1 and negative in the warm-up."""
        edges = [self.warmup_steps, *self.restarts, self.total_steps]
        seed = self.logits_seed(step)
        return (step - edges[seed]) / (edges[seed + 1] - edges[seed])


def make_schedule(config: Config, train_tokens: int) -> Schedule:
    """The schedule of search.schedule. train_tokens: the number of tokens of the training text.

    Raises InputError if no step is left to train the logits.
    """
    options = config.search
    if options.schedule == "sequential":
        weights_steps = 0 if options.weights_from else count_steps(config, train_tokens)
        ends = [weights_steps + options.logits_steps * seed for seed in range(1, options.logits_seeds + 1)]
        return Schedule(weights_steps, weights_steps, ends[-1], 1.0, tuple(ends[:-1]), short_share(config))
    total = count_steps(config, train_tokens)
    warmup = total // 2 if options.warmup_steps is None else options.warmup_steps
    schedule = Schedule(total, warmup, total, options.arch_fraction if options.split == "heldout" else 1.0)
    if not any(map(schedule.logits_learn, range(warmup + 1, total + 1))):
        raise InputError(
            f"search.warmup_steps={warmup} leaves no step of {total} to train the logits: "
            "use a smaller search.warmup_steps or more train.steps"
        )
    return schedule


def steps_per_update(config: Config) -> int:
    """The number of steps in which each operation of a block trains once.

    With fair paths, operations that share their weights take turns. A soft mixture trains all operations at every step.
    """
    options = config.search
    if options.sampling == "soft":
        return 1
    groups = weight_groups(options.operations, options.shared_projections)
    return len(groups) if options.fair_warmup else len(options.operations)


def retraining_steps(config: Config, weights_steps: int) -> int:
    """The steps for which patterns will be trained: search.retrain_steps, or the updates of an operation."""
    return config.search.retrain_steps or max(1, round(updates_per_operation(config, weights_steps)))


def updates_per_operation(config: Config, weights_steps: int) -> float:
    """How often each operation of a block trains, on average."""
    return weights_steps / steps_per_update(config)


def describe_maturity(
    config: Config, weights_steps: int, retrain_steps: int | None = None, share: float = MATURE_WITH_TRIALS
) -> str:
    """How often uniform paths train each operation, beside the steps for which patterns will be trained.

    The text begins with WARNING if the operations train in less than `share` of these steps.

    Args:
        retrain_steps: the steps for which patterns will be trained; None: search.retrain_steps.
        share: MATURE, or MATURE_WITH_TRIALS if trials follow.
    """
    updates, steps = updates_per_operation(config, weights_steps), retrain_steps or config.search.retrain_steps
    tokens = config.train.batch_size * config.train.segment
    text = (
        f"{weights_steps:,} steps of {tokens:,} tokens on uniform paths train each operation of a block "
        f"{updates:,.0f} times"
    )
    if steps is None:
        return f"{text}: search.retrain_steps is not set, so patterns are assumed to train for as many steps"
    text += f", {updates / steps:.2f} of the {steps:,} steps for which patterns will be trained"
    enough = math.ceil(share * steps * steps_per_update(config))
    if weights_steps >= enough:
        return text
    return f"WARNING: {text}: the search may misjudge them; give the search train.steps={enough} or more"
