"""The first phase: train the weights and the logits of a SuperNet (arXiv 2009.04534, section 3).

N blocks, O candidate operations.
"""

import torch
from torch import Tensor

from nas.core.config import Config
from nas.core.pattern import abbreviate
from nas.core.run_folder import RunFolder
from nas.costs.cost_table import CostTable
from nas.costs.flops import count_flops
from nas.data.corpus import Corpus
from nas.search.convergence import Convergence
from nas.search.estimators import estimator_class
from nas.search.objective import LatencyPenalty, path_distribution
from nas.search.pi_statistics import entropy
from nas.search.sampling import PathDistribution, PathsWithinBudget, WeightsSampler, temperature_at
from nas.search.schedule import make_schedule
from nas.search.supernet import SuperNet
from nas.training import distributed
from nas.training.build import open_streams
from nas.training.device import DeviceContext
from nas.training.evaluation import evaluate_split
from nas.training.train_step import BatchRunner, TrainStep

SAMPLING_SEED = 0x5EED  # separates the noise of the samples from that of initialisation and dropout
ADAM_BETAS = (0.5, 0.999)  # as in DARTS (arXiv 1806.09055, appendix A.1.1): low momentum, as the loss changes


class SearchPhase:
    """Trains a SuperNet: its weights with train.optimizer, its logits by Adam along the gradient of an estimator.

    search.schedule=sequential: the weights train on uniform paths, then the logits with fixed weights.
    search.schedule=joint: after a warm-up, in which pi stays uniform, weights and logits train in turn.
    With search.split=heldout the logits train on the end of the training stream, which the weights never see. With
    search.split=shared, in a joint search, both train on every batch.
    """

    def __init__(
        self,
        supernet: SuperNet,
        corpus: Corpus,
        config: Config,
        context: DeviceContext,
        latency: CostTable | None = None,
        paths: PathDistribution | None = None,
    ):
        """latency: the measured table; search.latency.source=measured needs it. paths: the distribution of the paths
        that are drawn from pi, in place of that of search.latency.

        Raises InputError if no step is left to train the logits, or if no pattern reaches search.latency.target.
        """
        self.supernet, self.corpus, self.config, self.context = supernet, corpus, config, context
        self.options = options = config.search
        if options.latency.source == "measured" and latency is None:
            raise ValueError("search.latency.source=measured needs the measured table")
        self.flops, self.latency = count_flops(config, corpus.counts()), latency
        self.costs = latency if options.latency.source == "measured" else self.flops
        self.paths = paths or path_distribution(options, config.model.blocks, self.costs)
        self.penalty = None
        if options.latency.source != "none" and options.latency.mode != "budget":
            self.penalty = LatencyPenalty(options.latency, options.operations, config.model.blocks, self.costs)
        self.stream, self.heldout_stream = open_streams(corpus, config, context)
        self.schedule = make_schedule(config, len(corpus.tokens("train")))
        self.total_steps = self.schedule.total_steps
        supernet.backbone.to(context.device)
        hard, steps = options.sampling == "hard", self.schedule.weights_steps
        self.train_weights = TrainStep(supernet.backbone, config.train, steps, context, hard, self.schedule.short_share)
        self.generator = torch.Generator().manual_seed(config.seed ^ SAMPLING_SEED)
        self.sampler = WeightsSampler(supernet, options, self.paths, self.generator)
        runner = BatchRunner(supernet, config.train, context)
        self.estimator = estimator_class(options)(supernet, runner, self.sampler, options)
        self.learned: list[Tensor] = []  # the logits [N, O] of the seeds before the present one
        self.begin_logits()
        self.chosen = self.paths.best(supernet.logits)  # at the last evaluation
        self.heldout_nll: float | None = None  # mean over the samples of the last held-out logits step

    def begin_logits(self) -> None:
        """Start to learn the logits, from uniform pi."""
        options = self.options.optimizer
        self.supernet.logits.data.zero_()
        self.logits_optimizer = torch.optim.Adam(
            [self.supernet.logits], lr=options.lr, betas=ADAM_BETAS, weight_decay=options.weight_decay
        )
        self.convergence = Convergence(self.supernet, self.options, self.paths.best(self.supernet.logits))

    def step(self, step: int) -> tuple[Tensor | None, int]:
        """One training step:

        temperature = schedule(step)
        if the logits do not train at this step:
            set the SuperNet to a sample (from uniform pi in the warm-up)
            train the weights on the next batch
        elif search.split=heldout:
            estimate the gradient of the logits on the next held-out batch
            update the logits
        else:
            train the weights, and estimate the gradient of the logits, on the next batch
            update the logits
        """
        if not self.supernet.training:  # setting the mode of every module takes time
            self.supernet.train()
        if step - 1 in self.schedule.restarts:
            self.learned.append(self.supernet.logits.detach().clone())
            self.begin_logits()
        self.estimator.temperature = self.annealed_temperature(step)
        self.estimator.progress = self.schedule.progress(step)
        nll = None
        if not self.schedule.logits_learn(step):
            batch = self.stream.next()
            self.draw_for_weights(step)
            nll, self.stream.memories = self.train_weights(step, batch)
        elif self.heldout_stream:
            batch = self.heldout_stream.next()
            heldout_nll, self.heldout_stream.memories = self.estimator.estimate(batch)
            self.heldout_nll = float(heldout_nll)
            self.update_logits(step)
        else:
            batch = self.stream.next()
            self.estimator.begin_shared(batch)
            nll, self.stream.memories = self.train_weights(step, batch)
            self.estimator.end_shared()
            self.update_logits(step)
        if step == self.schedule.weights_steps:  # the logits of a sequential search learn with the mean
            self.train_weights.average.replace_weights()
        return nll, batch.targets.numel() * distributed.world_size()

    def draw_for_weights(self, step: int) -> None:
        """Set the SuperNet to a sample for a step in which only the weights train."""
        self.sampler.draw(step <= self.schedule.warmup_steps, self.estimator.temperature)

    def update_logits(self, step: int) -> None:
        """Add the gradient of the latency penalty to that of the estimator, and step."""
        logits = self.supernet.logits
        logits.grad = distributed.all_reduce_mean(logits.grad)  # relaxed samples get a gradient of this rank's rows
        if self.penalty:
            (gradient,) = torch.autograd.grad(self.penalty(logits), [logits])
            logits.grad = logits.grad + gradient
        if not logits.grad.isfinite().all():
            raise FloatingPointError("the gradient of the logits is not finite")
        self.logits_optimizer.step()
        self.logits_optimizer.zero_grad(set_to_none=True)
        self.convergence.update(step, self.paths.best(logits))

    def annealed_temperature(self, step: int) -> float:
        """The temperature at a step. It changes from the end of the warm-up to the last step."""
        schedule = self.options.temperature
        return temperature_at(self.schedule.progress(step), schedule.start, schedule.end, schedule.schedule)

    def pi_of_seeds(self) -> Tensor:
        """pi [seeds, N, O] of each seed of the logits so far, in float64."""
        return torch.stack([*self.learned, self.supernet.logits.detach()]).double().softmax(dim=-1)

    def replicated_state(self) -> dict[str, Tensor]:
        return {
            "the logits": self.supernet.logits,
            "the state of the sampling": self.generator.get_state(),
            "the sums of the weights": self.train_weights.optimizer.parameter_sums(),
        }

    def expected_costs(self, pi: Tensor) -> dict[str, float | None]:
        """Expected costs of a pattern drawn from pi [N, O]: milliseconds if measured, and FLOPs relative to the
        interleaved pattern.
        """
        names = self.supernet.operations
        return {
            "expected_latency_ms": None if self.latency is None else self.latency.expected(pi, names).item(),
            "expected_flops_ratio": self.flops.expected_ratio(pi, names).item(),
        }

    def scalars(self, step: int) -> dict[str, float]:
        """What trains at this time: the learning rate of the weights, and values about pi once the logits learn."""
        scalars = {"heldout_nll": self.heldout_nll}
        if step <= self.schedule.weights_steps:
            scalars["lr"] = self.train_weights.optimizer.lr
        if step >= self.schedule.first_logits_step:
            pi = self.paths.marginals(self.supernet.logits)
            costs = self.expected_costs(pi)
            scalars |= {
                "temperature": self.estimator.temperature,
                "entropy": float(entropy(pi.numpy()).mean()),
                "flops_ratio": costs["expected_flops_ratio"],
                "latency_ms": costs["expected_latency_ms"],
            }
        return {name: value for name, value in scalars.items() if value is not None}

    def note(self, step: int) -> str:
        """The likeliest pattern, from the first step that trains the logits."""
        names = self.supernet.names(self.convergence.path)
        return f"likeliest pattern {abbreviate(names)}" if step >= self.schedule.first_logits_step else ""

    def record(self, run: RunFolder, step: int, logged: bool) -> None:
        """Append pi to pi.jsonl, in a sequential search at every step that changes it."""
        if not logged and not (self.options.schedule == "sequential" and self.schedule.logits_learn(step)):
            return
        marginals = self.paths.marginals(self.supernet.logits)
        line = {
            "step": step,
            "of_steps": self.total_steps,
            "temperature": self.estimator.temperature,
            "operations": self.supernet.operations,
            "logits_seed": len(self.learned) + 1,
            "pi": self.supernet.pi().double().tolist(),
        }
        if isinstance(self.paths, PathsWithinBudget):
            line["pi_within_budget"] = marginals.tolist()
        run.append("pi.jsonl", line | self.expected_costs(marginals))

    def evaluate(self, run: RunFolder, step: int) -> dict:
        """Evaluate the likeliest path of each seed of the logits on valid; choose the best, and return its figures."""
        figures = {}
        with self.train_weights.average.in_use():
            for path in {tuple(self.paths.best(logits)) for logits in (*self.learned, self.supernet.logits)}:
                self.supernet.set_path(path)
                blocks = self.supernet.operations_on(path)
                figures[path] = evaluate_split(self.config, self.supernet, blocks, self.corpus, "valid", self.context)
        self.chosen = list(min(figures, key=lambda path: figures[path]["nll"]))
        return figures[tuple(self.chosen)]

    def finished(self, step: int) -> str | None:
        return self.convergence.stop_reason(step, self.schedule.first_step_of_last_seed)

    def end(self) -> None:
        self.train_weights.average.replace_weights()

    def state_dict(self) -> dict:
        return {
            "supernet": self.supernet.state_dict(),
            "train_weights": self.train_weights.state_dict(),
            "logits_optimizer": self.logits_optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "heldout_stream": self.heldout_stream.state_dict() if self.heldout_stream else None,
            "generator": self.generator.get_state(),
            "fair_queue": list(self.sampler.fair_queue),
            "learned": self.learned,
            "chosen": self.chosen,
            "convergence": self.convergence.state_dict(),
            "temperature": self.estimator.temperature,
            "heldout_nll": self.heldout_nll,
        }

    def load_state_dict(self, state: dict) -> None:
        self.supernet.load_state_dict(state["supernet"])
        self.train_weights.load_state_dict(state["train_weights"])
        self.logits_optimizer.load_state_dict(state["logits_optimizer"])
        self.stream.load_state_dict(state["stream"])
        if self.heldout_stream:
            self.heldout_stream.load_state_dict(state["heldout_stream"])
        self.generator.set_state(state["generator"])
        self.sampler.fair_queue = list(state["fair_queue"])
        self.learned, self.chosen = list(state["learned"]), state["chosen"]
        self.convergence.load_state_dict(state["convergence"])
        self.estimator.temperature, self.heldout_nll = state["temperature"], state["heldout_nll"]
