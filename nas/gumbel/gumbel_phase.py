"""The method of Mandava et al. 2020, "Pay Attention when Required" (arXiv 2009.04534, section 3).

A SuperNet runs all candidate operations of each block, weighted by a sample of the Gumbel-softmax of the logits:

    x + sum over o of w_o * operation_o(x),    w = softmax((log pi + g) / temperature)

First the weights train alone, with uniform pi. Then weights (on 80% of the text) and logits (on the other 20%) train in
turn, with an optimizer each, while the temperature falls. The pattern is the argmax of pi.

Variants: `search.sampling=hard` runs one sampled operation per block, with straight-through gates (GDAS, Dong and Yang
2019, arXiv 1910.04465). A block that samples identity then gets no gradient, because its branch is 0.
`search.split=shared` trains weights and logits on the same batches. With costs, the expected cost above the target is a
term of the logits' loss (PLANER, arXiv 2208.14580). N blocks, O candidate operations.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from models.transformer_xl import Memories, TransformerXL
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.pattern import abbreviate
from nas.core.pi_history import entropy
from nas.core.run_folder import PI, RunFolder
from nas.costs.cost_table import MILLISECONDS, CostTable
from nas.data.corpus import Corpus
from nas.gumbel.gumbel_softmax import gumbel_like, relax, straight_through
from nas.gumbel.supernet import set_mixture, set_path
from nas.training import distributed
from nas.training.device import DeviceContext
from nas.training.evaluation import evaluate_split
from nas.training.passes import count_steps
from nas.training.streams import open_streams
from nas.training.train_step import Batch, BatchRunner, ReplayedStep, TrainStep, can_replay
from nas.training.trainer import Phase

SAMPLING_SEED = 0x5EED  # separates the noise of the samples from that of initialisation and dropout
ADAM_BETAS = (0.5, 0.999)  # as in DARTS (arXiv 1806.09055, appendix A.1.1): low momentum, as the loss changes


class GumbelPhase(Phase):
    """Trains the weights and the logits [N, O] of a SuperNet in turn.

    Raises InputError if no step is left to train the logits.
    """

    def __init__(
        self, supernet: TransformerXL, corpus: Corpus, config: Config, context: DeviceContext, costs: CostTable
    ):
        self.supernet, self.corpus, self.config, self.context = supernet.to(context.device), corpus, config, context
        self.options, self.costs = config.search, costs
        self.stream, self.heldout_stream = open_streams(corpus, config, context)
        self.total_steps = count_steps(config, len(corpus.tokens("train")))
        given = self.options.warmup_steps
        self.warmup_steps = self.total_steps // 4 if given is None else given
        if not any(map(self.logits_learn, range(self.warmup_steps + 1, self.total_steps + 1))):
            raise InputError(
                f"search.warmup_steps={self.warmup_steps} leaves no step of {self.total_steps} to train the logits: "
                "use a smaller search.warmup_steps or more train.steps"
            )
        hard = self.options.sampling == "hard"
        self.logits = nn.Parameter(torch.zeros(len(supernet.blocks), len(self.options.operations)))  # on the CPU
        shape = self.logits.shape[:1] if hard else self.logits.shape
        self.gates = torch.zeros(shape, device=context.device)  # in one place, where a CUDA graph reads and writes it
        self.gates.grad = torch.zeros_like(self.gates)
        self.train_weights = TrainStep(
            supernet, config.train, self.total_steps, context, sampled=hard, prepare=self.set_gates
        )
        possible = can_replay(supernet, config.train, context) and not hard
        self.run_heldout = ReplayedStep(self.heldout_once, supernet, config.train.memory, possible)
        self.run_batch = BatchRunner(supernet, config.train, context, self.set_gates)
        adam = self.options.optimizer
        self.optimizer = torch.optim.Adam([self.logits], adam.lr, ADAM_BETAS, weight_decay=adam.weight_decay)
        # On the CPU, so that samples are equal on all devices and ranks
        self.generator = torch.Generator().manual_seed(config.seed ^ SAMPLING_SEED)
        self.temperature, self.heldout_nll = self.options.temperature.start, None
        self.parts = {"supernet": supernet, "train_weights": self.train_weights, "logits_optimizer": self.optimizer}
        self.parts |= {"stream": self.stream} | ({"heldout_stream": self.heldout_stream} if self.heldout_stream else {})

    def step(self, step: int) -> tuple[Tensor | None, int]:
        self.temperature, learn = self.temperature_at(step), self.logits_learn(step)
        sample = self.sample(learn)
        if learn and self.heldout_stream:
            nll, batch = None, self.heldout_stream.next()
            self.supernet.eval()  # without dropout; the weights do not change
            heldout, self.heldout_stream.memories = self.run_heldout(batch)
            self.heldout_nll = float(heldout)
        else:
            batch = self.stream.next()
            self.supernet.train()
            nll, self.stream.memories = self.train_weights(step, batch, learn)
        if learn:
            self.update_logits(sample)
        return nll, batch.targets.numel() * distributed.world_size()

    def logits_learn(self, step: int) -> bool:
        """Whether the logits train at a step: after the warm-up, in search.arch_fraction of the steps, or in all."""
        share = self.options.arch_fraction if self.heldout_stream else 1.0
        return step > self.warmup_steps and math.floor(step * share) > math.floor((step - 1) * share)

    def temperature_at(self, step: int) -> float:
        """The temperature at a step: exactly `start` in the warm-up, then an exponential curve to exactly `end`."""
        progress = max(0, step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.options.temperature.start ** (1 - progress) * self.options.temperature.end**progress

    def heldout_once(self, batch: Batch) -> tuple[Tensor, Memories]:
        return self.run_batch(batch, partial(Tensor.backward, inputs=[self.gates]))

    def sample(self, learn: bool) -> Tensor:
        """Draw a sample, and copy it to the gates, at which backward passes stop. learn: whether they get a gradient.

        Returns the weights [N, O] or, in hard sampling, the gates [N], as a function of the logits.
        """
        noise = gumbel_like(self.logits, self.generator)
        if self.options.sampling == "hard":
            self.sampled_path, sample = straight_through(self.logits, noise, self.temperature)
        else:
            sample = relax(self.logits, noise, self.temperature)
        self.gates.requires_grad_(learn).data.copy_(sample.detach())
        self.gates.grad.zero_()
        return sample

    def set_gates(self) -> None:
        """Make the SuperNet use the sample, before each forward pass."""
        if self.options.sampling == "hard":
            set_path(self.supernet, self.sampled_path, self.gates)
        else:
            set_mixture(self.supernet, self.gates)

    def update_logits(self, sample: Tensor) -> None:
        """Follow the gradient of the loss, which reached the gates, and of the latency term."""
        sample.backward(self.gates.grad.cpu())
        self.logits.grad = distributed.all_reduce_mean(self.logits.grad)  # each rank has its own rows
        if self.options.latency.source != "none":
            self.latency_loss().backward()
        if not self.logits.grad.isfinite().all():
            raise FloatingPointError("the gradient of the logits is not finite")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def latency_loss(self) -> Tensor:
        """search.latency.weight * max(0, expected cost / interleaved cost - target), in nats. It is exact."""
        latency = self.options.latency
        ratio = self.costs.expected_ratio(self.logits.softmax(dim=-1), self.options.operations)
        return latency.weight * (ratio - latency.target).clamp_min(0)

    def line(self, step: int) -> dict:
        """A line of pi.jsonl."""
        pi, names = self.logits.detach().double().softmax(dim=-1).numpy(), self.options.operations
        ms = float(self.costs.expected(pi, names)) if self.costs.unit == MILLISECONDS else None
        costs = {"expected_latency_ms": ms, "expected_cost_ratio": float(self.costs.expected_ratio(pi, names))}
        line = {"step": step, "operations": names, "pi": pi.tolist(), **costs}
        return line | {"of_steps": self.total_steps, "temperature": self.temperature}

    def record(self, run: RunFolder, step: int) -> None:
        run.append(PI, self.line(step))

    def scalars(self, step: int) -> dict[str, float]:
        line = self.line(step)
        scalars = super().scalars(step) | {
            "temperature": self.temperature,
            "entropy": float(entropy(np.array(line["pi"])).mean()),
            "cost_ratio": line["expected_cost_ratio"],
        }
        return scalars if self.heldout_nll is None else scalars | {"heldout_nll": self.heldout_nll}

    def note(self) -> str:
        return f"likeliest pattern {abbreviate([self.options.operations[index] for index in self.path])}"

    @property
    def path(self) -> list[int]:
        """The argmax of pi."""
        return self.logits.detach().argmax(dim=-1).tolist()

    def evaluate(self, run: RunFolder, step: int) -> dict:
        """Figures on valid of the argmax path, without noise."""
        set_path(self.supernet, self.path)
        chosen = [block.candidates[index] for block, index in zip(self.supernet.blocks, self.path, strict=True)]
        with self.train_weights.average.in_use():
            return evaluate_split(self.config, self.supernet, chosen, self.corpus, "valid", self.context)

    def replicated_state(self) -> dict[str, Tensor]:
        own = {"the logits": self.logits, "the state of the sampling": self.generator.get_state()}
        return own | super().replicated_state()

    def state_dict(self) -> dict:
        own = {"logits": self.logits.detach(), "generator": self.generator.get_state(), "heldout_nll": self.heldout_nll}
        return super().state_dict() | own

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.logits.data.copy_(state["logits"])
        self.generator.set_state(state["generator"])
        self.heldout_nll = state["heldout_nll"]
