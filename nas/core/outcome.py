"""The record of a search: outcome.yaml."""

from nas.core.files import read_yaml
from nas.core.pattern import abbreviate
from nas.core.pi_history import pi_warnings, read_pi
from nas.core.run_folder import CHOICE, OUTCOME, PLAN, RunFolder


def make_outcome(pattern: list[str], valid: dict, steps: int, tokens: int, seconds: float, trainings=None) -> dict:
    """The content of outcome.yaml.

    valid: figures of the pattern, with the weights of its trial or of the SuperNet. trainings: the steps of all
    trials, in whole trainings; None: no trials.
    """
    figures = {"train_steps": steps, "train_tokens": tokens, "wall_time_s": seconds, "cost_in_trainings": trainings}
    return {"format": "par-outcome/2", "pattern": pattern, "valid": valid, **figures}


def print_outcome(run: RunFolder) -> None:
    """Print warnings, the content of outcome.yaml, and the commands to run next."""
    outcome, trials = read_yaml(run.path / OUTCOME), (run.path / CHOICE).exists()
    for warning in [] if trials else pi_warnings(read_pi(run.path)):
        run.say(f"WARNING: {warning}")
    valid = outcome["valid"]
    figures = f"nll {valid['nll_per_token']:.4f}, perplexity {valid['perplexity']:.2f}"
    seconds = f"{outcome['wall_time_s']:,.0f} s" + " of one process" * trials
    run.say(f"{outcome['train_steps']} steps, {outcome['train_tokens']:,} tokens, {seconds}")
    what, weights = ("pattern", "after its trial") if trials else ("likeliest pattern", "with the SuperNet's weights")
    run.say(f"{what} {abbreviate(outcome['pattern'])}, {weights} on valid: {figures}")
    if outcome["cost_in_trainings"]:
        run.say(f"cost: the steps of {outcome['cost_in_trainings']:.2f} trainings")
    if not (run.path.parent / PLAN).exists():  # nas.run calls the next stages itself
        run.say(f"next: python derive.py {run.path}; python animate.py {run.path}")
