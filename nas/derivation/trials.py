"""Trials: short trainings of a few patterns from scratch.

Weights that all patterns share misjudge patterns unlike the average path, and hide how hard a pattern is to train.
"""

import sys
import time
from dataclasses import replace

from tqdm import tqdm

from nas.core.pattern import expand, network
from nas.derivation.pattern_record import Choice
from nas.derivation.supernet_evaluator import SuperNetEvaluator
from nas.retraining.phase import train_pattern
from nas.search.schedule import retraining_steps
from nas.training.build import count_steps
from nas.training.evaluation import evaluate_split

PROMISING = 0.1  # nats per token behind the best by shared weights; patterns further behind get no trial
LONG_ENOUGH = 0.25  # of the retraining's steps; after a sixteenth and an eighth, the order is about random


def choose_by_trials(
    choices: list[Choice], rules: list[dict[str, dict]], evaluator: SuperNetEvaluator, steps: int
) -> list[Choice]:
    """For each choice, the best of its promising patterns after trials; their losses are added to `rules`.

    rules: for each choice, the result of compare_with_rules(). evaluator: of the search whose options the trials have.
    """
    if warning := short_trials_warning(evaluator, steps):
        print(f"WARNING: {warning}")
    operations, losses = evaluator.supernet.operations, {}
    for index, (choice, compared) in enumerate(zip(choices, rules, strict=True)):
        began = time.monotonic()
        limit = min(about["nll"] for about in compared.values()) + PROMISING
        promising = [about for about in compared.values() if about["nll"] <= limit]
        for about in tqdm(promising, f"trials of {steps} steps", disable=not sys.stderr.isatty()):
            pattern = expand(about["pattern"])
            if network(pattern) not in losses:
                losses[network(pattern)] = trial_nll(pattern, evaluator, steps)
            about["trial_nll"] = round(losses[network(pattern)], 4)
        best = expand(min(promising, key=lambda about: about["trial_nll"])["pattern"])
        seconds = (choice.seconds or 0) + time.monotonic() - began
        choices[index] = replace(choice, path=[operations.index(name) for name in best], seconds=seconds)
    return choices


def trial_nll(pattern: list[str], evaluator: SuperNetEvaluator, steps: int) -> float:
    """nll per token on valid of a pattern trained from scratch for `steps` steps."""
    config = replace(evaluator.config, train=replace(evaluator.config.train, steps=steps, epochs=None))
    model = train_pattern(pattern, config, evaluator.corpus, evaluator.context)
    return evaluate_split(config, model, model.blocks, evaluator.corpus, "valid", evaluator.context)["nll_per_token"]


def short_trials_warning(evaluator: SuperNetEvaluator, steps: int) -> str | None:
    """A warning if trials of `steps` steps are too short to order patterns."""
    config = evaluator.config
    final = retraining_steps(config, count_steps(config, len(evaluator.corpus.tokens("train"))))
    if steps >= LONG_ENOUGH * final:
        return None
    return (
        f"--trials {steps} is too short to order patterns that train for {final:,} steps: give at least "
        f"{round(LONG_ENOUGH * final)}"
    )
