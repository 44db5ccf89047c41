"""Trials of patterns from scratch, at the settings of a search."""

import math

from nas.core.config_loading import load_config
from nas.core.pattern import network
from nas.derivation.runs import SearchRun
from nas.retraining.trials import Trial, run_trials
from nas.search.maturity import retraining_steps
from nas.search.shared_weights import load_shared_weights
from nas.training.build import count_steps

LONG_ENOUGH = 0.5  # of the retraining's steps; shorter trials may prefer patterns that learn fast
FOLDER = "trials"  # in the run folder of a search


class Trials:
    """Trains patterns with the options of a search, each network once.

    Weights that all patterns share hide how hard a pattern is to train, and misjudge patterns unlike the average path.
    """

    def __init__(self, run: SearchRun, steps: int | None):
        """steps: None for half of the retraining's steps. Prints a warning if fewer are given."""
        weights = load_shared_weights(run.path)
        self.run, self.context = run, weights.context
        trained = load_config(run.weights_run / "config.yaml", [])
        self.final = retraining_steps(weights.config, count_steps(trained, len(weights.corpus.tokens("train"))))
        enough = math.ceil(LONG_ENOUGH * self.final)
        self.steps = min(steps or enough, self.final)
        print(
            f"trials of {self.steps:,} steps, for patterns that train for {self.final:,} steps (search.retrain_steps)"
        )
        if self.steps < enough:
            print(f"WARNING: these trials are too short to order such patterns: give at least {enough} steps")

    def nlls(self, patterns: list[list[str]]) -> list[float]:
        """nll per token on valid of patterns that train from scratch until the last step of the trial."""
        names = [network(pattern).replace(" ", "") for pattern in patterns]
        distinct = dict(zip(names, patterns, strict=True))
        trials = [Trial(name, blocks, self.final, self.steps) for name, blocks in distinct.items()]
        figures = run_trials(trials, self.run.path / "config.yaml", self.run.path / FOLDER, self.context)
        return [figures[name]["nll_per_token"] for name in names]
