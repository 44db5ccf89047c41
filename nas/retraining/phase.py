"""The training of a fixed pattern, as an ordinary Transformer-XL, and its results."""

import math
from dataclasses import replace

from torch import Tensor

from models.transformer_xl import TransformerXL
from nas.core.config import SHORT_PARTS, Config
from nas.core.run_folder import RunFolder
from nas.data.corpus import Corpus
from nas.mixture.without_network import train_nll
from nas.training import distributed
from nas.training.build import check_splits, open_stream
from nas.training.device import Runtime
from nas.training.evaluation import evaluate_split, evaluation_lengths, read_text, text_metrics
from nas.training.optimizer import TailAverage
from nas.training.passes import count_steps, judged_text, short_share
from nas.training.train_step import TrainStep
from nas.training.trainer import Phase, save_checkpoint

BEST = "best.pt"
TRIAL_SHARE = 0.5  # last share of a trial's steps, over which weights are averaged


class RetrainPhase(Phase):
    """Trains the network of a fixed pattern, and keeps the weights with the lowest nll on valid.

    until: last step of a trial, or None. A trial is judged by a mean of weights of its own, because rates have not
    decayed; the training goes on as if there had been no trial.
    """

    def __init__(
        self, model: TransformerXL, corpus: Corpus, config: Config, runtime: Runtime, until: int | None = None
    ):
        self.model, self.corpus, self.config, self.runtime = model.to(runtime.device), corpus, config, runtime
        check_splits(config, corpus)
        tokens, short = corpus.tokens("train"), short_share(config)
        residual = config.train.residual
        beside = distributed.first_on_each_node(lambda: train_nll(corpus, config.beside) if residual else None)
        self.stream = open_stream(tokens, config, runtime, beside=beside)
        self.total_steps = count_steps(config, len(tokens))
        self.train_weights = TrainStep(model, config.train, self.total_steps, runtime, short_share=short, until=until)
        self.parts = {"model": model, "train_weights": self.train_weights, "stream": self.stream}
        self.best_nll = math.inf
        self.begin_trial(until)

    def begin_trial(self, until: int | None) -> None:
        """Average weights for a trial that ends after the step `until` (None: no trial)."""
        share = TRIAL_SHARE if until and self.config.train.average_share else 0
        parameters = self.train_weights.optimizer.parameters
        self.until, self.trial_average = until, TailAverage(parameters, share, until or self.total_steps)

    def step(self, step: int) -> tuple[Tensor, int]:
        if not self.model.training:  # setting the mode of every module takes time
            self.model.train()
        batch = self.stream.next()
        nll, self.stream.memories = self.train_weights(step, batch)
        self.trial_average.update(step)
        return nll, batch.targets.numel() * distributed.world_size()

    def evaluate(self, run: RunFolder, step: int) -> dict:
        metrics = self.metrics(self.train_weights.average)
        if metrics["nll_per_token"] < self.best_nll:
            self.best_nll = metrics["nll_per_token"]
            if distributed.is_main():
                with self.train_weights.average.in_use():
                    save_checkpoint(run.path / BEST, {"step": step, "model": self.model.state_dict()})
        return metrics

    def metrics(self, average: TailAverage) -> dict:
        """Metrics on valid of a mean of the weights, or of the weights if it has none yet."""
        with average.in_use():
            return evaluate_split(self.config, self.model, self.model.blocks, self.corpus, "valid", self.runtime)

    def trial_metrics(self) -> dict:
        """Metrics of the trial's mean on the first part of valid."""
        config, short = self.config, self.config.train.segment // SHORT_PARTS
        # Before long segments begin, the model has not learned to attend much farther than in short ones.
        if self.until <= self.train_weights.short_steps:
            segment, memory = (min(length, short) for length in evaluation_lengths(config))
            config = replace(config, evaluate=replace(config.evaluate, segment=segment, memory=memory))
        tokens, text = judged_text(config, self.corpus)
        with self.trial_average.in_use():
            nll, _ = read_text(config, self.model, tokens, self.runtime)
        return text_metrics(float(nll.sum()), len(nll), text)

    def state_dict(self) -> dict:
        trial = {"until": self.until, "average": self.trial_average.state_dict()}
        return super().state_dict() | {"best_nll": self.best_nll, "trial": trial}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.best_nll = state["best_nll"]
        if state["trial"]["until"] == self.until:
            self.trial_average.load_state_dict(state["trial"]["average"])
