"""The record of a search: the lines of pi while it learns, and outcome.yaml."""

import time

from tqdm import tqdm

from nas.core.config import Config
from nas.core.files import read_jsonl, read_yaml
from nas.core.pattern import abbreviate
from nas.core.run_folder import CHOICE, OUTCOME, PATHS, PI, RunFolder, read_pi
from nas.search.history import drawn_pi, entropy, likeliest, pi_warnings
from nas.search.maturity import retraining_steps
from nas.training.trainer import Trainer, say


class PiWriter:
    """Writes each step of learn_pi() to the run folder.

    Every train.log_every steps it also writes to the terminal, metrics.jsonl and TensorBoard.
    """

    def __init__(self, run: RunFolder, config: Config, weights_steps: int, board):
        """weights_steps: the steps in the files are counted on from these. board: the TensorBoard writer, or None."""
        self.run, self.offset, self.log_every, self.board = run, weights_steps, config.train.log_every, board
        self.tokens_per_step = config.train.batch_size * config.train.segment
        self.known, self.began = read_jsonl(run.path / PATHS) if (run.path / PATHS).exists() else [], time.monotonic()
        self.steps = weights_steps
        run.cut_after(weights_steps)
        run.write_lines(PI, [])  # learn_pi() reports all its lines, also those of an interrupted call

    def __call__(self, line: dict, evaluated: dict | None) -> None:
        if evaluated is None:
            self.run.append(PI, line | {"of_steps": self.offset + line["of_steps"]})
            return
        step, steps, nll = line["step"], line["of_steps"], sum(evaluated["nll"]) / len(evaluated["nll"])
        self.steps = at = self.offset + step
        self.run.append(PI, line | {"step": at, "of_steps": self.offset + steps})
        if step > len(self.known):
            self.run.append(PATHS, evaluated)
        if step % self.log_every and step < steps:
            return
        scalars = {"entropy": float(entropy(drawn_pi(line)).mean()), "cost_ratio": line["expected_cost_ratio"]}
        self.run.metrics(at, at * self.tokens_per_step, "heldout", nll, **scalars)
        for name, value in {"nll": nll, **scalars}.items() if self.board else ():
            self.board.add_scalar(f"heldout/{name}", value, at)
        left = tqdm.format_interval((steps - step) * (time.monotonic() - self.began) / step)
        say(
            self.run,
            f"pi {step}/{steps}  heldout nll {nll:.4f}  likeliest of each block {likeliest(line)}  {left} left",
        )


def make_outcome(
    config: Config, pattern: list[str], valid: dict, steps: int, seconds: float, trainer: Trainer | None
) -> dict:
    """The content of outcome.yaml.

    Args:
        pattern: the likeliest one; valid: its figures on valid, with the SuperNet's weights.
        steps: of the whole search.
        seconds: of the search, without those of the trainer.
        trainer: of the weights, or None if another search trained them.
    """
    seconds += trainer.wall_seconds if trainer else 0.0
    cost = None
    if trainer and config.search.method == "single_path":  # a step of the weights costs as much as one of a pattern
        cost = seconds * trainer.step / (retraining_steps(config, trainer.step) * trainer.train_seconds)
    return {
        "format": "par-outcome/2",
        "pattern": pattern,
        "valid": valid,
        "train_steps": steps,
        "train_tokens": steps * config.train.batch_size * config.train.segment,
        "wall_time_s": seconds,
        "cost_in_trainings": cost,
    }


def trials_outcome(choice: dict) -> dict:
    """The content of outcome.yaml after trials. choice: the content of choice.yaml."""
    return {
        "format": "par-outcome/2",
        "pattern": choice["network"]["blocks"],
        "valid": choice["trial"]["valid"],
        "train_steps": choice["train_steps"],
        "train_tokens": choice["train_tokens"],
        "wall_time_s": choice["wall_time_s"],
        "cost_in_trainings": choice["trainings"],
    }


def print_outcome(run: RunFolder) -> None:
    """Print warnings, the content of outcome.yaml, and the commands to run next."""
    outcome, history = read_yaml(run.path / OUTCOME), read_pi(run.path)
    last = [line for line in history if line.get("logits_seed") == history[-1].get("logits_seed")]
    trials = (run.path / CHOICE).exists()
    for warning in [] if trials else pi_warnings(last):
        say(run, f"WARNING: {warning}")
    valid = outcome["valid"]
    figures = f"nll {valid['nll_per_token']:.4f}, perplexity {valid['perplexity']:.2f}"
    seconds = f"{outcome['wall_time_s']:,.0f} s" + " of one process" * trials
    say(run, f"{outcome['train_steps']} steps, {outcome['train_tokens']:,} tokens, {seconds}")
    what, weights = ("pattern", "after its trial") if trials else ("likeliest pattern", "with the SuperNet's weights")
    say(run, f"{what} {abbreviate(outcome['pattern'])}, {weights} on valid: {figures}")
    if outcome["cost_in_trainings"]:
        unit = "steps" if trials else "wall time"
        say(run, f"cost: the {unit} of {outcome['cost_in_trainings']:.2f} trainings of an average pattern")
    say(run, f"next: python derive.py {run.path}; python animate.py {run.path}")
