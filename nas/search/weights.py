"""Train the weights of a SuperNet: an ordinary training, whose network is a new path in each step.

Single path one-shot (Guo et al. 2019, arXiv 1904.00420) with fair paths (Chu et al. 2019, arXiv 1907.01845).
"""

from torch import Tensor

from nas.core.config import Config
from nas.core.run_folder import RunFolder
from nas.data.corpus import Corpus
from nas.search.sampling import fair_paths, sampling_generator
from nas.search.supernet import SuperNet, evaluate_path
from nas.training import distributed
from nas.training.build import count_steps, open_streams, short_share
from nas.training.device import DeviceContext
from nas.training.train_step import TrainStep
from nas.training.trainer import Phase


class WeightsPhase(Phase):
    """Trains the operations of each block equally often, on the text that pi does not learn from."""

    def __init__(self, supernet: SuperNet, corpus: Corpus, config: Config, context: DeviceContext):
        self.supernet, self.corpus, self.config, self.context = supernet, corpus, config, context
        self.stream, _ = open_streams(corpus, config, context)
        self.total_steps = count_steps(config, len(corpus.tokens("train")))
        supernet.backbone.to(context.device)
        self.train_weights = TrainStep(
            supernet.backbone, config.train, self.total_steps, context, sampled=True, short_share=short_share(config)
        )
        self.generator = sampling_generator(config.seed)
        self.queue: list[list[int]] = []  # the unused paths of the last fair_paths()

    def step(self, step: int) -> tuple[Tensor, int]:
        """Train the weights along the next fair path, on the next batch."""
        if not self.supernet.training:  # setting the mode of every module takes time
            self.supernet.train()
        self.supernet.set_path(self.next_path())
        batch = self.stream.next()
        nll, self.stream.memories = self.train_weights(step, batch)
        return nll, batch.targets.numel() * distributed.world_size()

    def next_path(self) -> list[int]:
        self.queue = self.queue or fair_paths(self.supernet.blocks, len(self.supernet.operations), self.generator)
        return self.queue.pop()

    def evaluate(self, run: RunFolder, step: int) -> dict:
        """Figures on valid along one typical path, the same at each evaluation."""
        path = fair_paths(self.supernet.blocks, len(self.supernet.operations), sampling_generator(0))[0]
        with self.train_weights.average.in_use():
            return evaluate_path(self.supernet, path, self.corpus, self.config, self.context)

    def replicated_state(self) -> dict[str, Tensor]:
        return super().replicated_state() | {"the state of the sampling": self.generator.get_state()}

    def state_dict(self) -> dict:
        return {
            "supernet": self.supernet.state_dict(),
            "train_weights": self.train_weights.state_dict(),
            "stream": self.stream.state_dict(),
            "generator": self.generator.get_state(),
            "queue": list(self.queue),
        }

    def load_state_dict(self, state: dict) -> None:
        self.supernet.load_state_dict(state["supernet"])
        self.train_weights.load_state_dict(state["train_weights"])
        self.stream.load_state_dict(state["stream"])
        self.generator.set_state(state["generator"])
        self.queue = list(state["queue"])
