"""The records of a search, pi.jsonl and outcome.yaml, and warnings. N blocks, O candidate operations."""

import math
import shlex
from pathlib import Path

import numpy as np

from nas.core.errors import InputError
from nas.core.files import read_jsonl, read_yaml
from nas.core.pattern import abbreviate
from nas.core.run_folder import CHOICE, CONFIG, OUTCOME, PI, PLAN, SEARCH, TRIALS, RunFolder


def make_outcome(pattern: list[str], valid: dict, steps: int, tokens: int, seconds: float, trainings=None) -> dict:
    """The content of outcome.yaml. valid: metrics of the pattern. trainings: that all trials took; None: no trials."""
    metrics = {"train_steps": steps, "train_tokens": tokens, "wall_time_s": seconds, "cost_in_trainings": trainings}
    return {"format": "par-outcome/2", "pattern": pattern, "valid": valid, **metrics}


def size_line(choice: dict) -> str:
    """What search.size.target leaves for the counts. choice: the content of choice.yaml."""
    size = choice["size"]
    return (
        f"size: at most {size['target']:,} bytes; network ({size['weights']}), vocabulary and other files take up to "
        f"{size['others']:,}, which leaves {size['counts']:,} for counts"
    )


def print_outcome(run: RunFolder) -> None:
    """Print warnings, the content of outcome.yaml, and the commands to run next."""
    outcome, trials = read_yaml(run.path / OUTCOME), (run.path / CHOICE).exists()
    for warning in [] if trials else pi_warnings(read_pi(run.path)):
        run.say(f"WARNING: {warning}")
    valid = outcome["valid"]
    metrics = f"{valid['bits_per_byte']:.4f} bits per byte"
    seconds = f"{outcome['wall_time_s']:,.0f} s" + " of one process" * trials
    run.say(f"{outcome['train_steps']} steps, {outcome['train_tokens']:,} tokens, {seconds}")
    what, weights = ("pattern", "after its trial") if trials else ("likeliest pattern", "with the SuperNet's weights")
    run.say(f"{what} {abbreviate(outcome['pattern'])}, {weights} on valid: {metrics}")
    if outcome["cost_in_trainings"]:
        run.say(f"cost: the steps of {outcome['cost_in_trainings']:.2f} trainings")
    if not (run.path.parent / PLAN).exists():  # nas.run calls the next stages itself
        run.say(f"next: python derive.py {shlex.quote(str(run.path))}; python animate.py {shlex.quote(str(run.path))}")


def mixture_ms(results: dict) -> float:
    """The measured milliseconds that a mixture adds for 1,000 bytes of text; 0 without one. results: of results.yaml"""
    return results["mixture"]["ms_per_1000_bytes"] if results["mixture"] else 0.0


def predictor_ms(results: dict) -> float:
    """The measured milliseconds for 1,000 bytes of text: of the network, and of the mixture beside it."""
    return results["latency"].get("ms_per_1000_bytes", 0.0) + mixture_ms(results)


TIED_MARGIN = 1e-6  # smaller margins are ties
MARGIN = 0.1  # smaller margins are undecided
IDENTITY_SHARE = 0.5  # a larger share of blocks that choose identity causes a warning
LATE = 0.1  # last share of the steps, in which the choices should not change


def read_pi(run: Path) -> list[dict]:
    """Lines of pi.jsonl. Raises InputError if the folder holds no search run, or a line is damaged."""
    if not (lines := read_jsonl(run / PI)):
        config = run / CONFIG
        searching = (run / TRIALS).is_dir() or (config.is_file() and read_yaml(config).get("stage") == "search")
        advice = "continue this search with --resume" if searching else "give the --run folder of a search"
        inner = run / SEARCH  # of nas.run
        advice = f"give {inner}" if (inner / PI).is_file() else advice
        raise InputError(f"{run} holds no {PI} with a logged step; {advice}")
    for number, line in enumerate(lines, start=1):
        if not is_pi_line(line, lines[0]):
            lacks = "lacks step, temperature, operations or a pi of the same shape"
            raise InputError(f"{run / PI} is damaged: line {number} {lacks}")
    return lines


def is_pi_line(line, first) -> bool:
    """Whether a line has all keys, and its probabilities have the shape [blocks, operations] of the first line."""
    try:
        shape = np.shape(line["pi"])
        same = line["operations"] == first["operations"] and shape == np.shape(first["pi"])
        return same and {"step", "temperature"} <= line.keys() and 0 < len(line["operations"]) == shape[-1]
    except (IndexError, KeyError, TypeError, ValueError):
        return False


def pi_warnings(history: list[dict]) -> list[str]:
    """Warnings about a doubtful outcome, one sentence each. history: the lines of pi.jsonl."""
    pi, operations, warnings = np.array(history[-1]["pi"]), history[-1]["operations"], []
    chosen = [operations[index] for index in pi.argmax(axis=1)]
    if chosen.count("identity") > IDENTITY_SHARE * len(chosen):
        warnings.append(f"{chosen.count('identity')} of {len(chosen)} blocks choose identity")
    for number, row in enumerate(pi if len(operations) > 1 else [], start=1):
        second, first = np.argsort(row, kind="stable")[-2:]
        if (margin := row[first] - row[second]) < MARGIN:
            warnings.append(undecided_message(number, operations[first], operations[second], margin))
    late = np.array([np.argmax(line["pi"], axis=1) for line in history[-max(2, math.ceil(LATE * len(history))) :]])
    if changed := [str(number) for number in 1 + np.flatnonzero(np.ptp(late, axis=0))]:
        blocks = f"block{'s' if len(changed) > 1 else ''} {', '.join(changed)}"
        warnings.append(f"the pattern has not settled: {blocks} changed in the last {LATE:.0%} of the steps of pi")
    return warnings


def undecided_message(block: int, first: str, second: str, margin: float) -> str:
    """The message that a block has no clear choice. margin: probability of `first`, the likelier, less `second`'s."""
    if margin < TIED_MARGIN:
        return f"block {block} is a TIE between {first} and {second}: its operation is arbitrary"
    return f"block {block} is UNDECIDED: {first} leads {second} by only {margin:.3f}; {second} may be as good"
