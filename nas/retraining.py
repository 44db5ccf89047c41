"""The second phase: a fixed pattern, trained from scratch as an ordinary Transformer-XL."""

import math
import time

from torch import Tensor

from models.transformer_xl import TransformerXL
from nas import ranks
from nas.assembly import check_splits, context_batches, count_steps, evaluate_with, evaluation_lengths
from nas.checkpoint import load_checkpoint, save_checkpoint
from nas.config import Config
from nas.data import Corpus
from nas.device import machine_of
from nas.latency import count_flops, measure_beside, prediction
from nas.record import RunFolder
from nas.stepping import WeightsStep

BEST = "best.pt"
RESULTS_FORMAT = "par-results/1"


class Retraining:
    """A fixed pattern, trained as an ordinary Transformer-XL; keeps the weights that were best on valid."""

    nonfinite = 0.0

    def __init__(self, model: TransformerXL, corpus: Corpus, config: Config):
        self.machine = machine_of(config.train)
        self.model, self.corpus, self.config = model.to(self.machine.device), corpus, config
        check_splits(config, corpus)
        tokens = corpus.tokens("train")
        self.stream = context_batches(tokens, config)
        self.total_steps = count_steps(config, len(tokens))
        self.weights = WeightsStep(model, config, self.total_steps, self.machine, sampled=False)
        self.best_nll, self.best_step, self.without_improvement = math.inf, 0, 0

    def step(self, step: int) -> tuple[Tensor, int]:
        if not self.model.training:  # setting the mode of every module costs 0.4 ms a step
            self.model.train()
        batch = self.stream.next()
        return self.weights(step, batch, self.stream), batch.targets.numel() * ranks.world_size()

    def must_be_same(self) -> dict[str, Tensor]:
        return {"the sums of the weights": self.weights.optimizer.sums()}

    def scalars(self) -> dict[str, float]:
        return {"lr": self.weights.optimizer.lr}

    def record(self, run: RunFolder, step: int) -> None:
        pass

    def evaluate(self, run: RunFolder, step: int) -> dict:
        figures = evaluate_with(self.config, self.model, self.model.blocks, self.corpus, "valid")
        if figures["nll_per_token"] < self.best_nll:
            self.best_nll, self.best_step, self.without_improvement = figures["nll_per_token"], step, 0
            if ranks.is_main():
                save_checkpoint(run.path / BEST, {"step": step, "model": self.model.state_dict()})
        else:
            self.without_improvement += 1
        return figures

    def finished(self, step: int) -> str | None:
        patience = self.config.train.patience
        if patience and self.without_improvement >= patience:
            return f"no improvement on valid in {patience} evaluations; the best was step {self.best_step}"
        return None

    def state_dict(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "weights_optimizer": self.weights.optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "best": [self.best_nll, self.best_step, self.without_improvement],
        }

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.weights.optimizer.load_state_dict(state["weights_optimizer"])
        self.stream.load_state_dict(state["stream"])
        self.best_nll, self.best_step, self.without_improvement = state["best"]


def evaluate_best(phase: Retraining, run: RunFolder, pattern_file: dict) -> dict:
    """What results.yaml holds: the best weights on valid and test, size, cost, and measured latency, beside that which
    the pattern file predicts."""
    config, model, corpus = phase.config, phase.model, phase.corpus
    best = load_checkpoint(run.path / BEST, "model")
    model.load_state_dict(best["model"])
    segment, memory = evaluation_lengths(config)
    started = time.perf_counter()
    splits = {split: evaluate_with(config, model, model.blocks, corpus, split) for split in ("valid", "test")}
    seconds = time.perf_counter() - started
    pattern, counts = run.config["pattern"], corpus.counts()
    costs, predicted = count_flops(config, counts), prediction(pattern_file, config, corpus.vocab_size)
    return {
        "format": RESULTS_FORMAT,
        "pattern": pattern,
        **splits,
        "segment": segment,
        "memory": memory,
        "best_step": best["step"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": costs.pattern(pattern),
        "flops_ratio_to_interleaved": costs.ratio(pattern),
        "latency": ranks.broadcast_from_main(lambda: measure_beside(pattern, config, counts, predicted)),
        "evaluated_tokens_per_s": sum(about["tokens"] for about in splits.values()) / seconds,
    }
