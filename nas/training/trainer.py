"""The training loop: steps, logs, evaluations, checkpoints, interruption and exact resume.

The phases are in nas/retraining/phase.py and nas/gumbel/gumbel_phase.py. Checkpoints are dictionaries of tensors and
plain values, written atomically and read without running code.
"""

import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from nas.core.config import Config
from nas.core.errors import InputError, Interrupted, RunError, StopSignal
from nas.core.files import atomic_write, read_jsonl
from nas.core.run_folder import METRICS, RunFolder
from nas.training import distributed
from nas.training.device import Runtime
from nas.training.evaluation import perplexity
from nas.training.passes import rising_warning
from nas.training.train_step import TrainStep

FORMAT = "par-checkpoint/6"


def save_checkpoint(path: Path, state: dict) -> None:
    """Write a state to `path` atomically. Raises RunError if the file cannot be written, on a full disk for example."""
    try:
        with atomic_write(path) as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as error:
        causes = error, error.__context__  # PyTorch hides the error of the disk behind its own
        reason = next((one.strerror for one in causes if isinstance(one, OSError)), str(error).splitlines()[0])
        kept = "the previous one is unchanged" if path.exists() else "there is no earlier one"
        raise RunError(f"cannot write {path}: {reason}; {kept}; free space and continue with --resume") from None


def load_checkpoint(path: Path, key: str) -> dict:
    """Read a state that has `key` onto the CPU. Raises InputError if the file is missing, damaged or something else."""
    if not path.exists():
        raise InputError(f"{path} is missing; the stage that writes it has not finished, or the file was removed")
    with open(path, "rb") as file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # what a damaged file raises has no base of its own
            raise InputError(
                f"{path} is damaged or not a checkpoint of this program; move it away and repeat the command with "
                "--resume, which writes best.pt from checkpoint.pt, and starts anew without checkpoint.pt"
            ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT or key not in state:
        raise InputError(f"{path} is not a {FORMAT} with `{key}`; another program, version or stage wrote it")
    return state


class Phase:
    """The base class of phases. parts: what has a state_dict of its own, by its name in the checkpoint."""

    total_steps: int
    config: Config
    runtime: Runtime
    train_weights: TrainStep
    parts: dict

    def step(self, step: int) -> tuple[Tensor | None, int]:
        """Run step `step`, from 1; return the mean nll in nats, or None if the weights did not train, and the number of
        tokens read by all ranks. Errors as those of TrainStep.
        """
        raise NotImplementedError

    def evaluate(self, run: RunFolder, step: int) -> dict:
        """Metrics on the validation split, with `nll_per_token`, `perplexity` and `tokens`."""
        raise NotImplementedError

    def scalars(self, step: int) -> dict[str, float]:
        """The values that the log line of a step shows in addition to the loss."""
        return {"lr": self.train_weights.optimizer.lr}

    def note(self) -> str:
        """Text at the end of a log line, such as the likeliest pattern; "" for none."""
        return ""

    def record(self, run: RunFolder, step: int) -> None:
        """Write the phase's own line about step 0, or about a step that is logged."""

    def end(self) -> None:
        """End the training, after the last step and its evaluation."""
        self.train_weights.average.replace_weights()

    def replicated_state(self) -> dict[str, Tensor]:
        """{name: tensor} of the values that must be bit-identical on all ranks."""
        parameters = self.train_weights.optimizer.parameters
        return {"the sums of the weights": torch.stack([one.detach().double().sum() for one in parameters])}

    def state_dict(self) -> dict:
        """All that an exact continuation needs, complete on rank 0; every rank calls it."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Trainer:
    """Runs a phase to its last step, from the start or from its checkpoint."""

    def __init__(self, phase: Phase, run: RunFolder):
        self.phase, self.run, self.options = phase, run, phase.config.train
        self.step, self.tokens = 0, 0
        self.train_seconds, self.wall_seconds = 0.0, 0.0  # without and with evaluations, over all resumptions
        self.window_nll, self.window_tokens = 0.0, 0  # since the last log line
        self.rate_tokens, self.rate_seconds = 0, 0.0  # since the last log line of this process
        self.saved_step: int | None = None
        self.valid: dict | None = None

    def fit(self, until: int | None = None) -> None:
        """Train to the last step, evaluate and save; or to the step `until`, without an evaluation for it. Raises
        RunError on a non-finite loss and Interrupted on a signal; the last checkpoint stays usable.
        """
        processes = distributed.world_size()
        self.run.say(f"{self.phase.runtime}, {processes} process{'es' if processes > 1 else ''}")
        self.restore()
        steps = self.phase.total_steps
        until = min(until or steps, steps)
        hidden = None if distributed.is_main() else True  # None: unless it is on a terminal
        bar = tqdm(total=until, initial=self.step, unit="step", disable=hidden, dynamic_ncols=True)
        with StopSignal() as stop, bar, open_board(self.run, self.step) as board:
            self.board = board
            if self.step == 0:
                self.phase.record(self.run, 0)
            while self.step < until:
                start = time.perf_counter()
                self.train_step()
                bar.update()
                last = self.step == until
                if self.due(self.options.evaluate_every) or self.step == steps:
                    self.log_valid()
                if self.step == steps:
                    self.phase.end()
                if self.due(self.options.log_every) or last:
                    self.log_train()
                    self.phase.record(self.run, self.step)
                self.wall_seconds += time.perf_counter() - start
                interrupted = distributed.any_rank(stop.received)  # all ranks stop after the same step
                if self.due(self.options.checkpoint_every) or last or interrupted:
                    self.save()
                if interrupted:
                    advice = "progress is saved; rerun the same command with --resume to continue"
                    raise Interrupted(f"stopped at step {self.step} of {steps}; {advice}")

    def due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def train_step(self) -> None:
        start = time.perf_counter()
        try:
            nll, tokens = self.phase.step(self.step + 1)
        except FloatingPointError as error:
            raise self.failure(self.step + 1, str(error)) from None
        self.step += 1
        self.tokens += tokens
        if nll is not None:
            # On a GPU keep a tensor: .item() would synchronize.
            self.window_nll = self.window_nll + (nll.double() if nll.is_cuda else nll.item()) * tokens
            self.window_tokens += tokens
        if self.due(self.options.log_every):
            self.phase.runtime.synchronize()
        seconds = time.perf_counter() - start
        self.rate_tokens += tokens
        self.rate_seconds += seconds
        self.train_seconds += seconds

    def log_train(self) -> None:
        self.check_window()
        if distributed.world_size() > 1:
            distributed.check_replicated(self.phase.replicated_state())
        if not self.window_tokens:  # only the logits have trained since the last line
            return
        tokens_per_s, scalars = self.rate_tokens / self.rate_seconds, self.phase.scalars(self.step)
        nll = self.window_nll / self.window_tokens
        self.run.metrics(self.step, self.tokens, "train", nll, **scalars)
        self.write_board("train", {"nll": nll, **scalars, "tokens_per_s": tokens_per_s})
        shown = [*(f"{name} {value:.4g}" for name, value in scalars.items()), self.phase.note()]
        left = (self.phase.total_steps - self.step) * self.train_seconds / self.step
        self.run.say(
            f"step {self.step}/{self.phase.total_steps}  nll {nll:.4f}  perplexity {perplexity(nll):.2f}  "
            f"{'  '.join(filter(None, shown))}  {tokens_per_s:,.0f} tokens/s  {tqdm.format_interval(left)} left"
        )
        self.window_nll, self.window_tokens, self.rate_tokens, self.rate_seconds = 0.0, 0, 0, 0.0

    def log_valid(self) -> None:
        self.valid = self.phase.evaluate(self.run, self.step)
        nll = self.valid["nll_per_token"]
        if not math.isfinite(nll):
            raise self.failure(self.step, f"the validation loss is {nll}")
        self.run.metrics(self.step, self.tokens, "valid", nll, evaluated_tokens=self.valid["tokens"])
        self.write_board("valid", {"nll": nll, "perplexity": self.valid["perplexity"]})
        metrics = f"valid nll {nll:.4f}  perplexity {self.valid['perplexity']:.2f}"
        self.run.say(f"step {self.step}/{self.phase.total_steps}  {metrics}")
        if distributed.is_main() and (warning := rising_warning(read_jsonl(self.run.path / METRICS))):
            self.run.say(warning)

    def write_board(self, split: str, scalars: dict[str, float]) -> None:
        for name, value in scalars.items() if distributed.is_main() else ():
            self.board.add_scalar(f"{split}/{name}", value, self.step)

    def check_window(self) -> None:
        """Convert the nll of the window to a float. Raises RunError if a loss or gradient on a GPU was not finite."""
        self.window_nll = float(self.window_nll)
        if not math.isfinite(self.window_nll):
            raise self.failure(self.step, "a loss or gradient since the last log line was not finite")

    def failure(self, step: int, reason: str) -> RunError:
        saved = f"the checkpoint of step {self.saved_step} is usable" if self.saved_step else "no checkpoint yet"
        advice = "start anew with a smaller train.lr or more train.warmup_steps"
        return RunError(f"step {step}: {reason}; {saved}; {advice}")

    def save(self) -> None:
        self.check_window()
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": [self.train_seconds, self.wall_seconds],
            "window": [self.window_nll, self.window_tokens],
            "valid": self.valid,
            "random": distributed.all_gather(self.phase.runtime.random_state()),
            "phase": self.phase.state_dict(),
        }
        if distributed.is_main():
            save_checkpoint(self.run.checkpoint, state)
        distributed.barrier()  # if a rank ended now, torchrun would end the one that writes
        self.saved_step = self.step

    def restore(self) -> None:
        """Load the checkpoint, if rank 0 sees one, and remove the lines that were logged after it."""
        if not distributed.all_gather(self.run.checkpoint.exists())[0]:
            self.run.cut_after(-1)
            if distributed.rank():  # all ranks built the same network; from now on each draws its own dropout
                reseed(distributed.rank())
            return
        state = load_checkpoint(self.run.checkpoint, "phase")
        self.step, self.tokens = state["step"], state["tokens"]
        self.train_seconds, self.wall_seconds = state["seconds"]
        self.window_nll, self.window_tokens = state["window"]
        self.valid, self.saved_step = state["valid"], state["step"]
        self.restore_random(state["random"])
        self.phase.load_state_dict(state["phase"])
        self.run.cut_after(self.step)
        self.run.say(f"continuing from step {self.step} of {self.phase.total_steps}")

    def restore_random(self, states: list[dict[str, Tensor]]) -> None:
        """Restore the random states of the ranks, or draw new ones if the ranks or the device have changed."""
        ranks, rank = distributed.world_size(), distributed.rank()
        if len(states) == ranks and self.phase.runtime.set_random_state(states[rank]):
            return
        reseed(1 + self.step * ranks + rank)
        if self.phase.config.model.dropout:
            self.run.say("NOTICE: the processes or the device changed, so dropout continues with new random numbers")


def reseed(number: int) -> None:
    torch.manual_seed(hash((torch.initial_seed(), number)))


def open_board(run: RunFolder, step: int):
    """The TensorBoard writer on rank 0, for the steps after `step`; a null context on other ranks."""
    if not distributed.is_main():
        return nullcontext()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(run.path / "tensorboard", purge_step=step + 1)
