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
from scipy.special import entr
from torch import Tensor, nn

from models.operations.operation import BlockConfig, Segment, State, as_memory, extend, limit
from models.operations.registry import build_operation
from models.transformer_xl import Memories, TransformerXL
from nas.core.config import Config, SearchOptions
from nas.core.errors import InputError
from nas.core.pattern import abbreviate, resolve_block
from nas.core.run_folder import PI, RunFolder
from nas.costs.cost_table import MILLISECONDS, CostTable
from nas.data.corpus import Corpus
from nas.training import distributed
from nas.training.build import backbone_options, block_config, open_streams
from nas.training.device import Runtime
from nas.training.evaluation import evaluate_split
from nas.training.passes import count_steps
from nas.training.train_step import Batch, BatchRunner, ReplayedStep, TrainStep, can_replay
from nas.training.trainer import Phase

SAMPLING_SEED = 0x5EED  # separates the noise of the samples from that of initialisation and dropout
ADAM_BETAS = (0.5, 0.999)  # as in DARTS (arXiv 1806.09055, appendix A.1.1): low momentum, as the loss changes


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u) of float64 draws u in [0, 1]. Float32 would round draws to exactly 0 and 1.

    u is clamped to the smallest normal float64 and to the largest below 1, so the noise is in [-6.6, 36.8].
    """
    uniform = uniform.clamp(torch.finfo(torch.float64).tiny, 1 - torch.finfo(torch.float64).eps / 2)
    return -torch.log(-torch.log(uniform))


def gumbel_like(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of the shape and type of the logits, which are on the CPU."""
    uniform = torch.rand(logits.shape, dtype=torch.float64, generator=generator, device="cpu")
    return gumbel(uniform).to(logits.dtype)


def relax(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """The relaxed sample softmax((log pi + g) / temperature), [N, O] (arXiv 1611.01144, equation 2)."""
    return ((logits.log_softmax(dim=-1) + noise) / temperature).softmax(dim=-1)


def straight_through(logits: Tensor, noise: Tensor, temperature: float) -> tuple[list[list[int]], Tensor]:
    """The one sampled operation of each block, and gates [N, 1] 1 + w_i - stop_gradient(w_i) of value 1, which pass
    gradients to the logits.
    """
    weights = relax(logits, noise, temperature)  # [N, O]
    path = weights.detach().argmax(dim=-1, keepdim=True)  # [N, 1]
    chosen = weights.gather(1, path)  # [N, 1]
    return path.tolist(), 1 + (chosen - chosen.detach())


class StochasticBlock(nn.Module):
    """x + sum of weight * operation(x) over the operations in `choice`; the others do not run.

    The block keeps its inputs, because the next segment may choose an operation that reads them. So no operation
    carries a state: linear attention reads the inputs again, from an empty state.
    """

    def __init__(self, operations: list[tuple[str, dict[str, int]]], config: BlockConfig):
        super().__init__()
        self.candidates = nn.ModuleList(build_operation(name, config, **sizes) for name, sizes in operations)
        for candidate in self.candidates:
            candidate.carries_state = False
        self.carries_state = False
        self.reads_tokens = any(candidate.reads_tokens for candidate in self.candidates)
        reaches = [candidate.reach for candidate in self.candidates]
        self.reach = None if None in reaches else max(reaches)
        self.period = math.lcm(*(candidate.period for candidate in self.candidates))
        self.stride = math.lcm(*(candidate.stride for candidate in self.candidates))
        self.choice: tuple[list[int], Tensor | None] | None = None  # indices of operations, and their weights (None: 1)

    def begin(self, rows: int) -> State:
        return {}

    def forward(self, x: Tensor, state: State, segment: Segment) -> tuple[Tensor, State]:
        chosen, weights = self.choice  # of set_choices()
        inputs = as_memory(x, segment.tokens, self.reads_tokens)
        state = state or {name: value[:, :0].detach() for name, value in inputs.items()}
        past = segment._replace(tokens=state.get("tokens"))
        candidates = [self.candidates[index] for index in chosen]
        branches = [one(x, one.remember(state["memory"], past), segment)[0] for one in candidates]
        kept = limit(segment.kept, self.reach)
        state = {name: extend(state[name], value, kept) for name, value in inputs.items()}
        if weights is None:
            return sum(branches, start=x), state
        for weight, branch in zip(weights, branches, strict=True):
            x = torch.addcmul(x, branch.to(x.dtype), weight)  # in bf16 the weight's gradient would lose digits
        return x, state


def build_supernet(config: Config, corpus: Corpus) -> TransformerXL:
    operations, block = [resolve_block(name, config.shape) for name in config.search.operations], block_config(config)
    layers = [StochasticBlock(operations, block) for _ in range(config.model.blocks)]
    return TransformerXL(layers, block, corpus.vocab_size, **backbone_options(config, corpus.vocab_size))


def set_choices(supernet: TransformerXL, choices: list[list[int]], weights: Tensor | None = None) -> None:
    """Make the next forward passes run these operations of each block. weights: of their branches, a row for each
    block; None: 1.
    """
    for block in supernet.blocks:
        block.choice = None  # old rows would keep the weights' gradient on the stream of an earlier step
    rows = [None] * len(choices) if weights is None else weights.to(supernet.embedding.weight.device)
    for block, choice, row in zip(supernet.blocks, choices, rows, strict=True):
        block.choice = choice, row


class Schedule:
    """Which steps train the logits, and the temperature. Raises InputError if no step is left to train the logits."""

    def __init__(self, options: SearchOptions, total_steps: int, shared: bool):
        self.options, self.total_steps = options, total_steps
        self.share = 1.0 if shared else options.arch_fraction  # of the steps after the warm-up
        self.warmup_steps = total_steps // 4 if options.warmup_steps is None else options.warmup_steps
        if not any(map(self.logits_learn, range(self.warmup_steps + 1, total_steps + 1))):
            raise InputError(
                f"search.warmup_steps={self.warmup_steps} leaves no step of {total_steps} to train the logits: "
                "use a smaller search.warmup_steps or more train.steps"
            )

    def logits_learn(self, step: int) -> bool:
        return step > self.warmup_steps and math.floor(step * self.share) > math.floor((step - 1) * self.share)

    def temperature(self, step: int) -> float:
        """Exactly `start` in the warm-up, then an exponential curve to exactly `end`."""
        progress = max(0, step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.options.temperature.start ** (1 - progress) * self.options.temperature.end**progress


class Logits:
    """The logits [N, O], their samples and optimizer, on the CPU: so samples are equal on all devices and ranks."""

    def __init__(self, supernet: TransformerXL, config: Config, costs: CostTable, target: float | None):
        self.supernet, self.options, self.costs, self.target = supernet, config.search, costs, target
        self.values = nn.Parameter(torch.zeros(len(supernet.blocks), len(self.options.operations)))
        self.hard, adam = self.options.sampling == "hard", self.options.optimizer
        self.optimizer = torch.optim.Adam([self.values], adam.lr, ADAM_BETAS, weight_decay=adam.weight_decay)
        self.generator = torch.Generator().manual_seed(config.seed ^ SAMPLING_SEED)
        blocks, operations = self.values.shape
        self.choices = [[*range(operations)]] * blocks  # those that the sample runs
        shape = blocks, 1 if self.hard else operations
        # In one place, where a CUDA graph reads and writes it
        self.gates = torch.zeros(shape, device=supernet.embedding.weight.device)
        self.gates.grad = torch.zeros_like(self.gates)

    @property
    def pi(self) -> np.ndarray:
        return self.values.detach().double().softmax(dim=-1).numpy()

    @property
    def path(self) -> list[int]:
        return self.values.detach().argmax(dim=-1).tolist()

    def sample(self, temperature: float, learn: bool) -> Tensor:
        """Draw a sample, and copy it to the gates, at which backward passes stop. learn: whether they get a gradient.

        Returns the weights [N, O] or, in hard sampling, the gates [N, 1], as a function of the logits.
        """
        noise = gumbel_like(self.values, self.generator)
        if self.hard:
            self.choices, sample = straight_through(self.values, noise, temperature)
        else:
            sample = relax(self.values, noise, temperature)
        self.gates.requires_grad_(learn).data.copy_(sample.detach())
        self.gates.grad.zero_()
        return sample

    def set_gates(self) -> None:
        """Make the SuperNet use the sample, before each forward pass."""
        set_choices(self.supernet, self.choices, self.gates)

    def latency_term(self) -> Tensor:
        """weight * max(0, expected cost / cost of the reference - target), in nats. It is exact."""
        ratio = self.costs.expected_ratio(self.values.softmax(dim=-1), self.options.operations)
        return self.options.latency.weight * (ratio - self.target).clamp_min(0)

    def update(self, sample: Tensor) -> None:
        """Follow the gradient of the loss, which reached the gates, and of the latency term."""
        sample.backward(self.gates.grad.cpu())
        self.values.grad = distributed.all_reduce_mean(self.values.grad)  # each rank has its own rows
        if self.target is not None:
            self.latency_term().backward()
        if not self.values.grad.isfinite().all():
            raise FloatingPointError("the gradient of the logits is not finite")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        optimizer, generator = self.optimizer.state_dict(), self.generator.get_state()
        return {"values": self.values.detach(), "optimizer": optimizer, "generator": generator}

    def load_state_dict(self, state: dict) -> None:
        self.values.data.copy_(state["values"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


class GumbelPhase(Phase):
    """Trains weights and logits of a SuperNet in turn. target: the highest expected cost ratio; None: any."""

    def __init__(self, corpus: Corpus, config: Config, runtime: Runtime, costs: CostTable, target: float | None = None):
        self.supernet = supernet = build_supernet(config, corpus).to(runtime.device)
        self.corpus, self.config, self.runtime = corpus, config, runtime
        self.options, self.costs = config.search, costs
        self.stream, self.heldout_stream = open_streams(corpus, config, runtime)
        self.total_steps = count_steps(config, len(corpus.tokens("train")))
        self.schedule = Schedule(self.options, self.total_steps, shared=not self.heldout_stream)
        self.logits = Logits(supernet, config, costs, target)
        hard, prepare = self.logits.hard, self.logits.set_gates
        self.train_weights = TrainStep(supernet, config.train, self.total_steps, runtime, sampled=hard, prepare=prepare)
        possible = can_replay(supernet, config.train, runtime) and not hard
        self.run_heldout = ReplayedStep(self.heldout_once, supernet, config.train.memory, possible)
        self.run_batch = BatchRunner(supernet, config.train, runtime, prepare)
        self.temperature, self.heldout_nll = self.options.temperature.start, None
        self.parts = {"supernet": supernet, "train_weights": self.train_weights, "logits": self.logits}
        self.parts |= {"stream": self.stream} | ({"heldout_stream": self.heldout_stream} if self.heldout_stream else {})

    def step(self, step: int) -> tuple[Tensor | None, int]:
        self.temperature, learn = self.schedule.temperature(step), self.schedule.logits_learn(step)
        sample = self.logits.sample(self.temperature, learn)
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
            self.logits.update(sample)
        return nll, batch.targets.numel() * distributed.world_size()

    def heldout_once(self, batch: Batch) -> tuple[Tensor, Memories]:
        return self.run_batch(batch, partial(Tensor.backward, inputs=[self.logits.gates]))

    def evaluate(self, run: RunFolder, step: int) -> dict:
        """Metrics on valid of the argmax path, without noise."""
        path = self.logits.path
        set_choices(self.supernet, [[index] for index in path])
        chosen = [block.candidates[index] for block, index in zip(self.supernet.blocks, path, strict=True)]
        with self.train_weights.average.in_use():
            return evaluate_split(self.config, self.supernet, chosen, self.corpus, "valid", self.runtime)

    def record(self, run: RunFolder, step: int) -> None:
        pi, ratio = self.logits.pi, self.scalars(step)["cost_ratio"]
        line = {"step": step, "operations": self.options.operations, "pi": pi.tolist()}
        cost = ratio * self.costs.reference(len(pi)) if self.costs.unit == MILLISECONDS else None  # for 1,000 bytes
        line |= {"expected_latency_ms": cost, "expected_cost_ratio": ratio, "of_steps": self.total_steps}
        run.append(PI, line | {"temperature": self.temperature})

    def scalars(self, step: int) -> dict[str, float]:
        pi = self.logits.pi
        scalars = super().scalars(step) | {
            "temperature": self.temperature,
            "entropy": float(entr(pi).sum(axis=1).mean()),
            "cost_ratio": float(self.costs.expected_ratio(pi, self.options.operations)),
        }
        return scalars if self.heldout_nll is None else scalars | {"heldout_nll": self.heldout_nll}

    def note(self) -> str:
        return f"likeliest pattern {abbreviate(self.pattern)}"

    @property
    def pattern(self) -> list[str]:
        return [self.options.operations[index] for index in self.logits.path]

    def replicated_state(self) -> dict[str, Tensor]:
        own = {"the logits": self.logits.values, "the state of the sampling": self.logits.generator.get_state()}
        return own | super().replicated_state()

    def state_dict(self) -> dict:
        return super().state_dict() | {"heldout_nll": self.heldout_nll}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.heldout_nll = state["heldout_nll"]
