"""The end of a search: warnings, outcome.yaml, and the commands to run next."""

from nas.core.run_folder import OUTCOME
from nas.search.phase import SearchPhase
from nas.training.trainer import Trainer


def report_outcome(phase: SearchPhase, trainer: Trainer) -> None:
    """Write outcome.yaml, the last file of a finished search, and print warnings and its content."""
    run, supernet = trainer.run, phase.supernet
    for warning in phase.convergence.warnings(trainer.step):
        trainer.say(f"WARNING: {warning}")
    valid = trainer.valid  # the loop always evaluates at the last step
    pattern = supernet.names(supernet.argmax_path())
    outcome = {
        "format": "par-outcome/1",
        "pattern": pattern,
        "valid": valid,
        "train_steps": trainer.step,
        "train_tokens": trainer.tokens,
        "wall_time_s": trainer.wall_seconds,
    }
    run.write(OUTCOME, outcome)
    trainer.say(f"likeliest pattern: {', '.join(pattern)}")
    trainer.say(
        f"{trainer.step} steps, {trainer.tokens:,} training tokens, {trainer.wall_seconds:,.0f} s; "
        f"SuperNet on valid: nll {valid['nll_per_token']:.4f}, perplexity {valid['perplexity']:.2f}"
    )
    trainer.say(f"next: python derive.py {run.path}; python animate.py {run.path}")
