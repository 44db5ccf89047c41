"""A training in this process, without a run folder."""

from collections.abc import Callable
from dataclasses import replace

import torch

from nas.core.config import Config, MixtureOptions
from nas.data.corpus import Corpus
from nas.retraining.phase import RetrainPhase
from nas.search.trials import rung_steps
from nas.training.build import build_fixed
from nas.training.device import Runtime


class Training:
    """A training of a network alone, in this process, without a run folder. The seed is config.seed.

    after_step: called with 0 and the phase before the first step, and after each step with its number.
    """

    def __init__(
        self,
        blocks: list[str],
        config: Config,
        corpus: Corpus,
        runtime: Runtime,
        after_step: Callable = lambda step, phase: None,
    ):
        torch.manual_seed(config.seed)
        nothing = MixtureOptions(states=0, cache=[], counts=0)
        config = replace(config, train=replace(config.train, residual=False), mixture=nothing)
        self.model = build_fixed(blocks, config, corpus.vocab_size)
        self.phase, self.steps, self.after_step = RetrainPhase(self.model, corpus, config, runtime), 0, after_step
        after_step(0, self.phase)

    def until(self, share: float) -> dict:
        """Train until a share of the steps, and return the figures on valid as a trial has them. Shares must grow."""
        last = rung_steps(share, self.phase.total_steps)
        if last == self.phase.total_steps:
            return self.end()  # rates have decayed, so retrain.py judges the whole training too
        self.phase.begin_trial(last)
        self.train(last)
        return self.phase.trial_metrics()["valid"]

    def end(self) -> dict:
        """Figures on valid at the end. The model is then in evaluation mode."""
        self.train(self.phase.total_steps)
        self.phase.end()
        self.model.eval()
        return self.phase.metrics(self.phase.train_weights.average)

    def train(self, last: int) -> None:
        while self.steps < last:
            self.steps += 1
            self.phase.step(self.steps)
            self.after_step(self.steps, self.phase)
