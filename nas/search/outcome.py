"""The record of a search: outcome.yaml."""

from nas.core.config import Config
from nas.core.files import read_yaml
from nas.core.pattern import abbreviate
from nas.core.run_folder import CHOICE, OUTCOME, RunFolder, read_pi
from nas.search.history import pi_warnings
from nas.training.trainer import Trainer, say


def make_outcome(config: Config, pattern: list[str], seconds: float, trainer: Trainer) -> dict:
    """The content of outcome.yaml after the paper's method.

    Args:
        pattern: the likeliest one; the trainer has its figures on valid, with the SuperNet's weights.
        seconds: of the search before the training.
    """
    return {
        "format": "par-outcome/2",
        "pattern": pattern,
        "valid": trainer.valid,
        "train_steps": trainer.step,
        "train_tokens": trainer.step * config.train.batch_size * config.train.segment,
        "wall_time_s": seconds + trainer.wall_seconds,
        "cost_in_trainings": None,
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
    outcome, trials = read_yaml(run.path / OUTCOME), (run.path / CHOICE).exists()
    for warning in [] if trials else pi_warnings(read_pi(run.path)):
        say(run, f"WARNING: {warning}")
    valid = outcome["valid"]
    figures = f"nll {valid['nll_per_token']:.4f}, perplexity {valid['perplexity']:.2f}"
    seconds = f"{outcome['wall_time_s']:,.0f} s" + " of one process" * trials
    say(run, f"{outcome['train_steps']} steps, {outcome['train_tokens']:,} tokens, {seconds}")
    what, weights = ("pattern", "after its trial") if trials else ("likeliest pattern", "with the SuperNet's weights")
    say(run, f"{what} {abbreviate(outcome['pattern'])}, {weights} on valid: {figures}")
    if outcome["cost_in_trainings"]:
        say(run, f"cost: the steps of {outcome['cost_in_trainings']:.2f} trainings")
    say(run, f"next: python derive.py {run.path}; python animate.py {run.path}")
