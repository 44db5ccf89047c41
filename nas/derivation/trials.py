"""Trials of patterns from scratch, at the settings of a search."""

import math

from nas.core.config_loading import load_config
from nas.core.pattern import expand, file_name
from nas.derivation.pattern_record import Candidate
from nas.derivation.runs import SearchRun
from nas.retraining.trials import Trial, run_trials, rung_steps
from nas.search.maturity import retraining_steps
from nas.search.shared_weights import load_shared_weights
from nas.training.build import count_steps

RUNGS = (1 / 4, 8), (1 / 2, 4), (1, 2)  # share of the steps of the longest trials, and networks
LONG_ENOUGH = 0.5  # of the retraining's steps; shorter trials may prefer patterns that learn fast
FOLDER = "trials"  # in the run folder of a search


class Trials:
    """Trains patterns with the options of a search, each pattern once.

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
        self.folder = run.path / FOLDER / str(self.steps)  # rungs of other steps do not continue these
        print(f"trials of up to {self.steps:,} of {self.final:,} steps (search.retrain_steps)")
        if self.steps < enough:
            print(f"WARNING: these trials are too short to order such patterns: give at least {enough} steps")

    def halve(self, candidates: list[Candidate]) -> None:
        """Successive halving (arXiv 1502.07943): the best candidates of each rung continue, until two are left.

        candidates: different networks, the most promising first. Each gets the nll per token on valid of its last rung.
        """
        for share, count in RUNGS:
            candidates, until = candidates[:count], rung_steps(share, RUNGS[0][0], self.steps)
            trials = [Trial(name_of(one), expand(one.pattern), self.final, until) for one in candidates]
            figures = run_trials(trials, self.run.path / "config.yaml", self.folder, self.context)
            for one in candidates:
                one.trial_nll, one.trial_steps = figures[name_of(one)]["nll_per_token"], until
            candidates = sorted(candidates, key=lambda one: one.trial_nll)


def name_of(candidate: Candidate) -> str:
    """The name of a candidate's run folder, with identity, because weights are saved by number of block."""
    return file_name(expand(candidate.pattern))
