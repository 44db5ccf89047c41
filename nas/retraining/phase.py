"""nas.retraining.phase."""

import math

from torch import Tensor

from models.transformer_xl import TransformerXL
from nas.core.config import Config
from nas.core.run_folder import RunFolder
from nas.data.corpus import Corpus
from nas.training import distributed as ranks
from nas.training.build import check_splits, context_batches, count_steps, evaluate_with
from nas.training.checkpoint import save_checkpoint
from nas.training.device import device_context
from nas.training.train_step import TrainStep

BEST = "best.pt"


class Retraining:
    """A fixed pattern, trained as an ordinary Transformer-XL; keeps the weights that were best on valid."""

    nonfinite = 0.0

    def __init__(self, model: TransformerXL, corpus: Corpus, config: Config):
        self.context = device_context(config.train)
        self.model, self.corpus, self.config = model.to(self.context.device), corpus, config
        check_splits(config, corpus)
        tokens = corpus.tokens("train")
        self.stream = context_batches(tokens, config)
        self.total_steps = count_steps(config, len(tokens))
        self.weights = TrainStep(model, config, self.total_steps, self.context, sampled=False)
        self.best_nll, self.best_step, self.without_improvement = math.inf, 0, 0

    def step(self, step: int) -> tuple[Tensor, int]:
        if not self.model.training:  # setting the mode of every module costs 0.4 ms a step
            self.model.train()
        batch = self.stream.next()
        return self.weights(step, batch, self.stream), batch.targets.numel() * ranks.world_size()

    def replicated_state(self) -> dict[str, Tensor]:
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
