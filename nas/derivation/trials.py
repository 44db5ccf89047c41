"""Trials: short trainings of patterns from scratch."""

import math
from dataclasses import replace

from nas.core.config_loading import load_config
from nas.core.pattern import abbreviate, network
from nas.derivation.runs import SearchRun
from nas.retraining.phase import train_pattern
from nas.search.maturity import retraining_steps
from nas.search.shared_weights import load_shared_weights
from nas.training.build import count_steps

LONG_ENOUGH = 0.5  # of the retraining's steps; shorter trials may prefer patterns that learn fast


class Trials:
    """Trains patterns with the options of a search, each network once.

    Weights that all patterns share hide how hard a pattern is to train, and misjudge patterns unlike the average path.
    """

    def __init__(self, run: SearchRun, steps: int | None):
        """steps: None for half of the retraining's steps. Prints a warning if fewer are given."""
        weights = load_shared_weights(run.path)
        self.config, self.corpus, self.context = weights.config, weights.corpus, weights.context
        trained = load_config(run.weights_run / "config.yaml", [])
        final = retraining_steps(self.config, count_steps(trained, len(self.corpus.tokens("train"))))
        enough = math.ceil(LONG_ENOUGH * final)
        self.steps, self.losses = steps or enough, {}
        print(f"trials of {self.steps:,} steps, for patterns that train for {final:,} steps (search.retrain_steps)")
        if self.steps < enough:
            print(f"WARNING: these trials are too short to order such patterns: give at least {enough} steps")

    def nll(self, pattern: list[str]) -> float:
        """nll per token on valid of a pattern trained from scratch, at its best evaluation.

        It is evaluated every train.evaluate_every steps (0: never) and at the last step.
        """
        if network(pattern) not in self.losses:
            print(f"trial of {abbreviate(pattern)}", end="  ", flush=True)
            train = replace(self.config.train, steps=self.steps, epochs=None)
            every, losses = train.evaluate_every or self.steps, []

            def evaluate(step, phase):
                if step and (step % every == 0 or step == self.steps):
                    losses.append(phase.valid_figures()["nll_per_token"])

            train_pattern(pattern, replace(self.config, train=train), self.corpus, self.context, evaluate)
            self.losses[network(pattern)] = min(losses)
            print(f"{min(losses):.4f}", flush=True)
        return self.losses[network(pattern)]
