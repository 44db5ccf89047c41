"""The first phase: a SuperNet, whose weights and logits learn in turn (arXiv 2009.04534, section 3).

N blocks, O candidate operations, K paths.
"""

import math
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.run_folder import RunFolder
from nas.costs.flops import count_flops
from nas.costs.table import CostTable
from nas.data.corpus import Corpus
from nas.data.loader import Batch, ContextBatches
from nas.search.estimators import leave_one_out_gradient
from nas.search.objective import check_target, entropy_of
from nas.search.pi_statistics import undecided_message
from nas.search.sampling import fair_paths, gumbel_like, relax, sample_path, straight_through, temperature_at
from nas.search.supernet import SuperNet
from nas.training import distributed as ranks
from nas.training.build import check_splits, context_batches, count_steps, evaluate_with, image_size
from nas.training.device import device_context
from nas.training.train_step import TrainStep, run_batch

SAMPLING_SEED = 0x5EED  # keeps the noise of the samples apart from that of initialisation and dropout


def cut_streams(corpus: Corpus, config: Config) -> tuple[ContextBatches, ContextBatches | None]:
    """The training text as the weights read it and, where the split is held-out, its end, which the logits read.
    Raises InputError where a text is too short."""
    check_splits(config, corpus)
    tokens, image = corpus.tokens("train"), image_size(config)
    if config.search.split == "shared":
        return context_batches(tokens, config), None
    border = round(len(tokens) * (1 - config.search.arch_fraction)) // image * image
    name = "held-out training (search.arch_fraction)"
    return context_batches(tokens[:border], config), context_batches(tokens[border:], config, name)


class Search:
    """A SuperNet whose weights and logits learn in turn (arXiv 2009.04534, section 3).

    With split `heldout` the logits learn on the end of the training stream, which the weights never see, in one step
    of every 1 / arch_fraction; with `shared` both learn on every batch. During the warm-up the logits rest, at uniform
    pi.
    """

    def __init__(self, supernet: SuperNet, corpus: Corpus, config: Config, latency: CostTable | None = None):
        """latency: the table that search.latency.source=measured needs."""
        self.context = device_context(config.train)
        self.supernet, self.corpus, self.config, self.options = supernet, corpus, config, config.search
        if config.search.latency.source == "measured" and latency is None:
            raise ValueError("search.latency.source=measured needs the measured table")
        self.flops, self.latency = count_flops(config, corpus.counts()), latency
        self.price = self.latency or self.flops
        check_target(config, self.price)
        self.stream, self.arch_stream = cut_streams(corpus, config)
        self.total_steps = count_steps(config, len(corpus.tokens("train")))
        given = self.options.warmup_steps
        self.warmup_steps = self.total_steps // 2 if given is None else given
        if self.first_logits_step is None:
            raise InputError(
                f"search.warmup_steps={self.warmup_steps} leaves the logits none of the {self.total_steps} "
                "training steps: make it smaller, or train longer"
            )
        supernet.to(self.context.device)
        hard, logits = config.search.sampling == "hard", supernet.logits
        if hard:  # where paths are chosen: else each choice would wait for the GPU
            logits.data = logits.data.cpu()
        shape = logits.shape[:1] if hard else logits.shape
        self.leaf = torch.zeros(shape, device=self.context.device, requires_grad=True)  # gates, or weights
        self.leaf.grad = torch.zeros_like(self.leaf)  # it and its gradient stay where they are
        self.weights = TrainStep(supernet.backbone, config, self.total_steps, self.context, sampled=hard)
        optimizer = self.options.optimizer
        self.logits_optimizer = torch.optim.Adam(
            [supernet.logits], lr=optimizer.lr, betas=(0.5, 0.999), weight_decay=optimizer.weight_decay
        )
        self.generator = torch.Generator().manual_seed(config.seed ^ SAMPLING_SEED)
        self.fair_queue: list[list[int]] = []  # of the warm-up: paths that make the visits of each operation equal
        self.temperature = self.options.temperature.start
        self.nonfinite: Tensor | float = 0.0
        self.heldout_nll: Tensor | None = None  # of the last logits step on held-out text, mean over its paths
        # Tensors beside the logits, for which nobody has to wait: the likeliest operation of each block [N], and the
        # step at which it last changed.
        self.path = logits.detach().argmax(dim=-1)
        self.path_since = torch.zeros_like(self.path)

    # --- one step

    def step(self, step: int) -> tuple[Tensor | None, int]:
        if not self.supernet.training:  # setting the mode of every module takes time
            self.supernet.train()
        self.temperature = self.temperature_of(step)
        stream = self.arch_stream if self.arch_stream and self.logits_learn(step) else self.stream
        batch = stream.next()
        if not self.logits_learn(step):
            nll = self.weights_step(step, batch)
        elif self.arch_stream:
            nll, self.heldout_nll = None, self.heldout_logits_step(step, batch)
        else:
            nll = self.shared_step(step, batch)
        return nll, batch.targets.numel() * ranks.world_size()

    @cached_property
    def first_logits_step(self) -> int | None:
        return next(filter(self.logits_learn, range(1, self.total_steps + 1)), None)

    def logits_learn(self, step: int) -> bool:
        """Every step after the warm-up where batches are shared; else the share arch_fraction of them."""
        fraction = self.options.arch_fraction if self.options.split == "heldout" else 1.0
        return step > self.warmup_steps and math.floor(step * fraction) > math.floor((step - 1) * fraction)

    def temperature_of(self, step: int) -> float:
        schedule = self.options.temperature
        return temperature_at(self.progress(step), schedule.start, schedule.end, schedule.schedule)

    def progress(self, step: int) -> float:
        """Of the steps after the warm-up: 0 at its end (below it before), 1 at the last step."""
        return (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)

    def weights_step(self, step: int, batch: Batch) -> Tensor:
        """Weights alone, along a sample that no gradient follows back to the logits."""
        begin = self.draw_for_weights(step)
        return self.weights(step, batch, self.stream, begin, kind="weights")

    def shared_step(self, step: int, batch: Batch) -> Tensor:
        """Weights and logits on the same batch; where the estimator has no backward pass, the paths come first."""
        if self.scores_paths:
            self.score_paths(batch, self.stream)
            nll = self.weights_step(step, batch)
        else:
            sample, begin = self.draw(self.supernet.logits)
            nll = self.weights(step, batch, self.stream, begin, kind="both")
            self.follow_to_logits(sample)
        self.update_logits(step)
        return nll

    def heldout_logits_step(self, step: int, batch: Batch) -> Tensor:
        """Logits alone, on text that the weights never see, without dropout."""
        self.supernet.eval()
        if self.scores_paths:
            nll = self.score_paths(batch, self.arch_stream)
        else:
            sample, begin = self.draw(self.supernet.logits)
            begin()
            nll, memories = run_batch(self.supernet, batch, self.config, self.context, self.follow_to_leaf)
            self.arch_stream.memories = memories
            self.follow_to_logits(sample)
        self.update_logits(step)
        return nll

    def follow_to_leaf(self, loss: Tensor) -> None:
        """Backward, but to the sample alone."""
        self.leaf.grad += torch.autograd.grad(loss, [self.leaf])[0]

    def follow_to_logits(self, sample: Tensor) -> None:
        """From the sample's gradient on, wherever the logits are."""
        sample.backward(self.leaf.grad.to(sample.device))

    @property
    def scores_paths(self) -> bool:
        return self.options.sampling == "hard" and self.options.estimator == "leave_one_out"

    def draw(self, logits: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """A fresh sample, as a function of the logits; and what sets the SuperNet to its values, which self.leaf
        holds, and through which the loss gives it a gradient.

        The two meet outside of the network's graph: logits may be on another device, a batch may be read in parts, and
        a CUDA graph knows one place for the values."""
        noise, path = gumbel_like(logits, self.generator), None
        if self.options.sampling == "soft":
            sample = relax(logits, noise, self.temperature)
        else:
            path, sample = straight_through(logits, noise, self.temperature)
        with torch.no_grad():
            self.leaf.copy_(sample)

        def begin() -> None:
            self.leaf.grad.zero_()
            values = self.leaf if logits.requires_grad else self.leaf.detach()
            if path is None:
                self.supernet.set_mixture(values)
            else:
                self.supernet.set_path(path, values)

        return sample, begin

    def draw_for_weights(self, step: int) -> Callable[[], None]:
        """What sets the SuperNet to a fresh sample that no gradient follows back to the logits."""
        logits = self.supernet.logits.detach()
        uniform = step <= self.warmup_steps or self.options.weights_paths == "uniform"
        if uniform:
            logits = torch.zeros_like(logits)
        if self.options.sampling == "soft":
            return self.draw(logits)[1]
        if uniform and self.options.fair_warmup:
            self.fair_queue = self.fair_queue or fair_paths(*logits.shape, self.generator)
            path = self.fair_queue.pop()
        else:
            path = sample_path(logits, self.generator)
        return partial(self.supernet.set_path, path)

    @torch.no_grad()
    def score_paths(self, batch: Batch, stream: ContextBatches) -> Tensor:
        """Evaluate K sampled paths on one batch, forward only and without dropout, and set the logits' gradient.

        Returns the paths' mean nll. A path that was drawn twice is run once. The stream keeps the memories of the first
        path: they are distributed as pi, which those of the last new one are not.
        """
        was_training, logits = self.supernet.training, self.supernet.logits
        self.supernet.eval()
        paths = [sample_path(logits, self.generator) for _ in range(self.options.paths)]
        known: dict[tuple[int, ...], Tensor] = {}
        memories = None
        for path in paths:
            if tuple(path) not in known:
                self.supernet.set_path(path)
                known[tuple(path)], after = run_batch(self.supernet, batch, self.config, self.context)
                memories = memories or after
        stream.memories = memories
        losses = torch.stack([known[tuple(path)] for path in paths]).to(logits.device)
        logits.grad = leave_one_out_gradient(logits, paths, losses)
        self.supernet.train(was_training)
        return losses.double().mean()

    def update_logits(self, step: int) -> None:
        """Add the gradient of what is charged beside the nll, then step."""
        logits = self.supernet.logits
        logits.grad = ranks.all_reduce_mean(logits.grad)
        charges = self.charges(logits, step)
        if charges.requires_grad:  # by default nothing is charged
            (gradient,) = torch.autograd.grad(charges, [logits])
            logits.grad = logits.grad + gradient
        finite = logits.grad.isfinite()
        if logits.is_cuda:  # nobody waits: what is not finite changes nothing, and Trainer.check_finite() will see it
            self.nonfinite = self.nonfinite + 0.0 * logits.grad.sum()
            logits.grad = torch.where(finite, logits.grad, 0)
        elif not finite.all():
            raise FloatingPointError("the gradient of the logits is not finite")
        self.logits_optimizer.step()
        self.logits_optimizer.zero_grad(set_to_none=True)
        self.note_changes(step)

    def charges(self, logits: Tensor, step: int) -> Tensor:
        """The price of the expected cost, and of the mean entropy of pi, in nats: exact functions of the logits."""
        latency, entropy, total = self.options.latency, self.options.entropy, logits.new_zeros(())
        weight = entropy.start + (entropy.end - entropy.start) * self.progress(step)
        if weight:
            total = total + weight * entropy_of(logits.softmax(dim=-1)).mean()
        if latency.source != "none":
            ratio = self.price.expected_ratio(logits.softmax(dim=-1), self.supernet.operations)
            above = ratio if latency.mode == "penalty" else (ratio - latency.target).clamp_min(0)
            total = total + latency.weight * above
        return total

    def note_changes(self, step: int) -> None:
        path = self.supernet.logits.detach().argmax(dim=-1)
        self.path_since = torch.where(path == self.path, self.path_since, step)
        self.path = path

    # --- what is seen of it

    def replicated_state(self) -> dict[str, Tensor]:
        return {
            "the logits": self.supernet.logits,
            "the state of the sampling": self.generator.get_state(),
            "the sums of the weights": self.weights.optimizer.sums(),
        }

    def expected(self) -> dict[str, float | None]:
        """Expected cost of a pattern drawn from pi: FLOPs over the interleaved pattern's, and, if measured,
        milliseconds."""
        pi, names = self.supernet.pi().double(), self.supernet.operations
        return {
            "expected_latency_ms": None if self.latency is None else self.latency.expected(pi, names).item(),
            "expected_flops_ratio": self.flops.expected_ratio(pi, names).item(),
        }

    def scalars(self) -> dict[str, float]:
        heldout = {} if self.heldout_nll is None else {"heldout_nll": float(self.heldout_nll)}
        expected = self.expected()
        latency = {} if self.latency is None else {"latency_ms": expected["expected_latency_ms"]}
        return {
            **heldout,
            "lr": self.weights.optimizer.lr,
            "temperature": self.temperature,
            "entropy": entropy_of(self.supernet.pi()).mean().item(),
            "flops_ratio": expected["expected_flops_ratio"],
            **latency,
        }

    def record(self, run: RunFolder, step: int) -> None:
        run.append(
            "pi.jsonl",
            {
                "step": step,
                "of_steps": self.total_steps,
                "temperature": self.temperature,
                "operations": self.supernet.operations,
                "pi": self.supernet.pi().double().tolist(),
                **self.expected(),
            },
        )

    def evaluate(self, run: RunFolder, step: int) -> dict:
        """Along the likeliest path, without noise."""
        path = self.supernet.argmax_path()
        self.supernet.set_path(path)
        return evaluate_with(self.config, self.supernet, self.supernet.operations_on(path), self.corpus, "valid")

    def finished(self, step: int) -> str | None:
        share, steps = self.options.stable_share, self.options.stable_steps
        if not share:
            return None
        stable = int((step - self.path_since.clamp_min(self.first_logits_step) >= steps).sum())
        if stable >= share * len(self.path_since):
            return f"{stable} of {len(self.path_since)} blocks kept their choice for {steps} steps"
        return None

    def warnings(self, step: int) -> list[str]:
        """What makes the outcome doubtful, one sentence each."""
        limits, found = self.options.warnings, []
        names = self.supernet.names(self.supernet.argmax_path())
        if names.count("identity") > limits.identity_share * len(names):
            found.append(f"identity has taken over {names.count('identity')} of {len(names)} blocks")
        ranked = self.supernet.pi().topk(min(2, len(self.supernet.operations)))
        for number, (pi, order) in enumerate(zip(ranked.values.tolist(), ranked.indices.tolist(), strict=True), 1):
            if len(pi) > 1 and pi[0] - pi[1] < limits.margin:
                found.append(undecided_message(number, *self.supernet.names(order), pi[0] - pi[1]))
        recent = [i + 1 for i, since in enumerate(self.path_since.tolist()) if since > (1 - limits.late_share) * step]
        if recent:
            late = f"changed in the last {limits.late_share:.0%} of the steps"
            found.append(f"the pattern has not settled: block {', '.join(map(str, recent))} {late}")
        return found

    def state_dict(self) -> dict:
        return {
            "supernet": self.supernet.state_dict(),
            "weights_optimizer": self.weights.optimizer.state_dict(),
            "logits_optimizer": self.logits_optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "arch_stream": self.arch_stream.state_dict() if self.arch_stream else None,
            "generator": self.generator.get_state(),
            "fair_queue": list(self.fair_queue),
            "path": [self.path.tolist(), self.path_since.tolist()],
            "temperature": self.temperature,
            "heldout_nll": None if self.heldout_nll is None else float(self.heldout_nll),
        }

    def load_state_dict(self, state: dict) -> None:
        if "fair_queue" not in state and self.options.warmup_steps is None:  # from before half was the default
            self.warmup_steps = self.total_steps // 4
            del self.first_logits_step
        self.supernet.load_state_dict(state["supernet"])
        self.weights.optimizer.load_state_dict(state["weights_optimizer"])
        self.logits_optimizer.load_state_dict(state["logits_optimizer"])
        self.stream.load_state_dict(state["stream"])
        if self.arch_stream:
            self.arch_stream.load_state_dict(state["arch_stream"])
        self.generator.set_state(state["generator"])
        self.fair_queue = list(state.get("fair_queue", []))
        self.path, self.path_since = (torch.tensor(values, device=self.path.device) for values in state["path"])
        self.temperature, self.heldout_nll = state["temperature"], state["heldout_nll"]
