"""The end of a search: warnings, outcome.yaml, and the commands to run next."""

from nas.core.files import read_yaml
from nas.core.run_folder import OUTCOME, can_evaluate_patterns
from nas.search.phase import SearchPhase
from nas.search.schedule import retraining_steps
from nas.training.trainer import Trainer


def report_outcome(phase: SearchPhase, trainer: Trainer, latency_seconds: float = 0.0) -> None:
    """Write outcome.yaml, the last file of a finished search, and print warnings and its content.

    latency_seconds: the time that this process took to measure latencies.
    """
    run, supernet = trainer.run, phase.supernet
    pi, seed = phase.paths.marginals(supernet.logits), "last seed of pi: " if phase.learned else ""
    for warning in phase.convergence.warnings(trainer.step, phase.schedule.first_step_of_last_seed, pi):
        trainer.say(f"WARNING: {seed}{warning}")
    if (run.path / OUTCOME).exists():  # an earlier call has finished the run
        outcome = read_yaml(run.path / OUTCOME)
    else:
        outcome = make_outcome(phase, trainer, trainer.wall_seconds + latency_seconds)
        run.write(OUTCOME, outcome)
    valid = outcome["valid"]
    trainer.say(f"likeliest pattern: {', '.join(outcome['pattern'])}")
    trainer.say(
        f"{trainer.step} steps, {trainer.tokens:,} training tokens, {outcome['wall_time_s']:,.0f} s; "
        f"SuperNet on valid: nll {valid['nll_per_token']:.4f}, perplexity {valid['perplexity']:.2f}"
    )
    if outcome["cost_in_trainings"]:
        trainer.say(f"cost: the wall time of {outcome['cost_in_trainings']:.2f} trainings of an average pattern")
    trials = " --trials" if can_evaluate_patterns(run.path) else ""
    trainer.say(f"next: python derive.py {run.path}{trials}; python animate.py {run.path}")


def make_outcome(phase: SearchPhase, trainer: Trainer, seconds: float) -> dict:
    """The content of outcome.yaml. seconds: the wall time of the search."""
    return {
        "format": "par-outcome/1",
        "pattern": phase.supernet.names(phase.chosen),
        "valid": trainer.valid,  # the loop always evaluates at the last step
        "train_steps": trainer.step,
        "train_tokens": trainer.tokens,
        "wall_time_s": seconds,
        "cost_in_trainings": cost_in_trainings(phase, trainer, seconds),
    }


def cost_in_trainings(phase: SearchPhase, trainer: Trainer, seconds: float) -> float | None:
    """`seconds` divided by the time of training one pattern of average cost.

    A step of the weights trains one path, so its mean time is that of an average pattern. None if no weights were
    trained, or if the search was soft, because each of its steps trains all operations.
    """
    if not trainer.weights_seconds or phase.options.sampling == "soft":
        return None
    steps = retraining_steps(phase.config, phase.schedule.weights_steps)
    return seconds / (steps * trainer.weights_seconds / trainer.weights_steps)
