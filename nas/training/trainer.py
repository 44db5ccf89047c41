"""The one training loop, for both phases: steps, logs, evaluations, checkpoints, interruption and exact resume.

The loop knows nothing of what a step does; nas/searching.py and nas/retraining.py do.
"""

import math
import signal
import sys
import time
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from nas.core.config import Config, TrainOptions
from nas.core.errors import InputError, Interrupted, RunError
from nas.core.metrics import perplexity
from nas.core.run_folder import RunFolder
from nas.training import distributed as ranks
from nas.training.checkpoint import load_checkpoint, save_checkpoint
from nas.training.device import DeviceContext


class Phase(Protocol):
    """What the loop drives. Its state_dict holds all that an exact continuation needs."""

    total_steps: int
    config: Config
    context: DeviceContext
    nonfinite: Tensor | float  # 0; on a GPU NaN, once something was not finite that no nll tells of

    def step(self, step: int) -> tuple[Tensor | None, int]:
        """Train step number `step` (from 1); returns the mean nll in nats that the weights trained on (None where they
        did not) and the tokens read, of all ranks. Raises FloatingPointError on a loss or gradient that is not finite,
        before any weight has changed; on a GPU, for which nobody waits, weights stay as they were, and the nll is NaN.
        """

    def scalars(self) -> dict[str, float]:
        """What a log line shows beside the loss."""

    def record(self, run: RunFolder, step: int) -> None:
        """Write what this phase logs of its own, at step 0, every log_every steps and at the last."""

    def evaluate(self, run: RunFolder, step: int) -> dict:
        """Figures on the validation split; `nll_per_token`, `perplexity` and `tokens` among them."""

    def finished(self, step: int) -> str | None:
        """Why to stop before the last step, or None."""

    def replicated_state(self) -> dict[str, Tensor]:
        """What every rank must hold alike, bit by bit, by name."""

    def state_dict(self) -> dict:
        """Called on all ranks; complete on rank 0."""

    def load_state_dict(self, state: dict) -> None: ...


class StopSignal:
    """Ctrl-C and SIGTERM as a flag that the loop reads between steps; a second signal interrupts at once."""

    def __init__(self):
        self.received: int | None = None

    def __enter__(self) -> "StopSignal":
        self.before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number, frame) -> None:
        if (
            self.received is not None and ranks.world_size() == 1
        ):  # torchrun sends a second one itself, and kills at last
            raise KeyboardInterrupt
        self.received = number

    def on_any_rank(self) -> bool:
        """All ranks have to stop after the same step."""
        return ranks.any_rank(self.received is not None)


class Trainer:
    """Drives a phase to its last step, or on from its checkpoint."""

    def __init__(self, phase: Phase, run: RunFolder, options: TrainOptions):
        self.phase, self.run, self.options = phase, run, options
        self.step = 0
        self.tokens = 0
        self.train_seconds, self.wall_seconds = 0.0, 0.0  # of steps alone, and with evaluations, over all resumptions
        self.window_nll, self.window_tokens = 0.0, 0  # since the last log line
        self.rate_tokens, self.rate_seconds = 0, 0.0  # the same, since this process began
        self.stopped: str | None = None
        self.saved_step: int | None = None
        self.valid: dict | None = None

    def fit(self) -> None:
        """Raises RunError on a non-finite loss, Interrupted on a signal; the last checkpoint stays usable."""
        self.say(f"{self.phase.context}, {ranks.world_size()} process{'es' if ranks.world_size() > 1 else ''}")
        self.restore()
        steps = self.phase.total_steps
        shown = sys.stderr.isatty() and ranks.is_main()
        bar = tqdm(total=steps, initial=self.step, unit="step", disable=not shown, dynamic_ncols=True)
        with StopSignal() as stop, bar, self.open_board() as board:
            self.board, self.bar = board, bar
            if self.step == 0:
                self.phase.record(self.run, 0)
            while self.step < steps and not self.stopped:
                started = time.perf_counter()
                self.train_step()
                bar.update()
                last = self.step == steps
                self.stopped = self.phase.finished(self.step)
                if self.due(self.options.evaluate_every) or last or self.stopped:
                    self.log_valid()
                    self.stopped = self.stopped or self.phase.finished(self.step)
                if self.due(self.options.log_every) or last or self.stopped:
                    self.log_train()
                self.wall_seconds += time.perf_counter() - started
                stopping = stop.on_any_rank()
                if self.due(self.options.checkpoint_every) or last or self.stopped or stopping:
                    self.save()
                if stopping:
                    raise Interrupted(
                        f"stopped at step {self.step} of {steps}; saved; go on with the same command and --resume"
                    )
        if self.stopped:
            self.say(f"stopped early at step {self.step}: {self.stopped}")

    def open_board(self):
        """TensorBoard's writer, of rank 0."""
        if not ranks.is_main():
            return nullcontext()
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.run.path / "tensorboard", purge_step=self.step + 1)

    def due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def train_step(self) -> None:
        started = time.perf_counter()
        try:
            nll, tokens = self.phase.step(self.step + 1)
        except FloatingPointError as error:
            raise self.failure(self.step + 1, str(error)) from None
        self.step += 1
        self.tokens += tokens
        if nll is not None:
            self.window_nll = self.window_nll + (nll.double() if nll.is_cuda else nll.item()) * tokens
            self.window_tokens += tokens
        if self.due(self.options.log_every):
            self.phase.context.synchronize()  # else the time of what still runs would count for nobody
        seconds = time.perf_counter() - started
        self.rate_tokens += tokens
        self.rate_seconds += seconds
        self.train_seconds += seconds

    def check_finite(self) -> float:
        """The window's nll as a number. Where the GPU met one that is not finite, this is where it comes to light."""
        self.window_nll = float(self.window_nll + self.phase.nonfinite)
        if not math.isfinite(self.window_nll):
            raise self.failure(self.step, "since the last line of the log a loss or gradient was not finite")
        return self.window_nll

    def failure(self, step: int, what: str) -> RunError:
        saved = f"the checkpoint of step {self.saved_step} is usable" if self.saved_step else "no checkpoint yet"
        return RunError(
            f"step {step}: {what}; {saved}; start another run with a smaller train.lr or more train.warmup_steps"
        )

    def log_train(self) -> None:
        window_nll = self.check_finite()
        if ranks.world_size() > 1:
            ranks.check_replicated(self.phase.replicated_state())
        self.phase.record(self.run, self.step)
        if not self.window_tokens:  # the weights have not trained since the last line
            return
        nll, tokens_per_s = window_nll / self.window_tokens, self.rate_tokens / self.rate_seconds
        scalars = self.phase.scalars()
        self.run.metrics(self.step, self.tokens, "train", nll, **scalars)
        self.write_board("train", {"nll": nll, **scalars, "tokens_per_s": tokens_per_s})
        shown = "  ".join(f"{name} {value:.4g}" for name, value in scalars.items())
        left = (self.phase.total_steps - self.step) * self.train_seconds / self.step
        text = (
            f"step {self.step}/{self.phase.total_steps}  nll {nll:.4f}  perplexity {perplexity(nll):.2f}  "
            f"{shown}  {tokens_per_s:,.0f} tokens/s  {tqdm.format_interval(left)} left"
        )
        if self.bar.disable:
            self.say(text)
        else:  # on a terminal the bar shows it, and the lines are in train.log
            self.run.log(text)
            self.bar.set_postfix_str(f"nll {nll:.3f}")
        self.window_nll, self.window_tokens, self.rate_tokens, self.rate_seconds = 0.0, 0, 0, 0.0

    def log_valid(self) -> None:
        self.valid = self.phase.evaluate(self.run, self.step)
        nll = self.valid["nll_per_token"]
        if not math.isfinite(nll):
            raise self.failure(self.step, f"the validation loss is {nll}")
        self.run.metrics(self.step, self.tokens, "valid", nll, evaluated_tokens=self.valid["tokens"])
        self.write_board("valid", {"nll": nll, "perplexity": self.valid["perplexity"]})
        self.say(
            f"step {self.step}/{self.phase.total_steps}  valid nll {nll:.4f}  perplexity {self.valid['perplexity']:.2f}"
        )

    def write_board(self, split: str, scalars: dict[str, float]) -> None:
        if not ranks.is_main():
            return
        for name, value in scalars.items():
            self.board.add_scalar(f"{split}/{name}", value, self.step)

    def say(self, text: str) -> None:
        """To the terminal and the log, once for all ranks."""
        self.run.log(text)
        tqdm.write(text)

    def save(self) -> None:
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": [self.train_seconds, self.wall_seconds],
            "window": [self.check_finite(), self.window_tokens],
            "stopped": self.stopped,
            "valid": self.valid,
            "random": ranks.all_gather(self.phase.context.random_state()),
            "phase": self.phase.state_dict(),
        }
        if ranks.is_main():
            save_checkpoint(self.run.checkpoint, state)
        ranks.barrier()  # a rank that ends now would have torchrun end the one that writes
        self.saved_step = self.step

    def restore(self) -> None:
        """Go back to the checkpoint, if there is one, and drop what was logged after it. Raises InputError where only
        some of the ranks see it."""
        found = self.run.checkpoint.exists()
        if any(other != found for other in ranks.all_gather(found)):
            raise InputError(
                f"{self.run.checkpoint} is there for some processes only; all machines must see the run folder"
            )
        if not found:
            self.run.cut_after(-1)
            self.draw_apart(ranks.rank())
            return
        state = load_checkpoint(self.run.checkpoint, "phase")
        self.step, self.tokens = state["step"], state["tokens"]
        self.train_seconds, self.wall_seconds = state["seconds"]
        self.window_nll, self.window_tokens = state["window"]
        self.stopped, self.valid, self.saved_step = state["stopped"], state["valid"], state["step"]
        self.restore_random(state["random"])
        self.phase.load_state_dict(state["phase"])
        self.run.cut_after(self.step)
        self.say(f"going on from step {self.step} of {self.phase.total_steps}")

    def draw_apart(self, number: int) -> None:
        """The network began alike on all ranks; from now on each draws dropout of its own. 0: as one process does."""
        if number:
            torch.manual_seed(hash((torch.initial_seed(), number)))

    def restore_random(self, states: list | Tensor) -> None:
        """Of dropout. Where there were other ranks, or another device, it is drawn anew, from this step on."""
        states = [{"cpu": states}] if isinstance(states, Tensor) else states  # from before there were ranks
        if len(states) == ranks.world_size() and self.phase.context.set_random_state(states[ranks.rank()]):
            return
        self.draw_apart(1 + self.step * ranks.world_size() + ranks.rank())
        if self.phase.config.model.dropout:
            self.say(
                "NOTICE: other processes, or another device, saved this run: dropout goes on from new random numbers"
            )
