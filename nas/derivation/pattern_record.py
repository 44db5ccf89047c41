"""The pattern file that derive.py writes."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nas.core.errors import InputError
from nas.core.pattern import FORMAT, RESIZINGS
from nas.costs.budget import log_pi, patterns_within
from nas.costs.cost_table import CostTable
from nas.derivation.confidence import block_confidence
from nas.derivation.runs import SearchRun

PI, SEED, RUNNER_UP = "pi", "seed of pi", "runner-up of pi"  # names of patterns that no rule gives


@dataclass
class Candidate:
    """A pattern that may be chosen.

    Args:
        names: where it comes from: pi, a seed of pi, a runner-up of pi, a rule.
        pattern: abbreviated.
        nll: per token on parts of valid, with the weights that all patterns share.
        trial_nll: per token on valid, after a short training from scratch.
    """

    names: list[str]
    pattern: str
    nll: float | None = None
    trial_nll: float | None = None

    @property
    def is_rule(self) -> bool:
        return not {PI, SEED, RUNNER_UP} & {*self.names}


@dataclass(frozen=True)
class Choice:
    """The chosen pattern, and what it was chosen from.

    Args:
        blocks: the operation of each block.
        budget: a ratio to the interleaved pattern's cost; None: none.
        runs: the runs, with the pi of this budget.
        candidates: the best first; empty if there was no choice but the likeliest pattern.
        trial_steps: of each trial; None: there were no trials.
        seconds: of the choice.
    """

    blocks: list[str]
    budget: float | None
    runs: list[SearchRun]
    candidates: list[Candidate] = field(default_factory=list)
    trial_steps: int | None = None
    seconds: float = 0.0


def pattern_record(choice: Choice, costs: CostTable) -> dict:
    """The content of the pattern file: the operation of each block, how certain it is, and where it comes from.

    costs: of the budget. The certainty is that of patterns drawn from pi within the budget.
    """
    first, blocks = choice.runs[0], choice.blocks
    pi = np.stack([run.pi for run in choice.runs])  # [runs, N, O]
    if choice.budget is not None:
        lattice = patterns_within(choice.budget, len(blocks), first.operations, costs)
        pi = np.stack([lattice.marginals(log_pi(own)) for own in pi])
    confidence = [
        block_confidence(first.operations, rows, first.operations.index(name))
        for rows, name in zip(pi.swapaxes(0, 1), blocks, strict=True)
    ]
    origin = {"runs": [str(run.path) for run in choice.runs], "steps": [run.step for run in choice.runs]}
    if choice.budget is not None:
        origin["latency_budget"] = choice.budget
    if choice.candidates:
        origin["seconds"] = round(choice.seconds)
        origin["candidates"] = [candidate_record(candidate) for candidate in choice.candidates]
    if choice.trial_steps:
        origin["trials"] = choice.trial_steps
    return {
        "format": FORMAT,
        "blocks": blocks,
        "confidence": confidence,
        "flops_per_token": round(first.flops.cost(blocks)),
        "flops_ratio_to_interleaved": round(first.flops.ratio(blocks), 4),
        "model": first.content.get("model"),
        "data": {key: first.content.get("data", {}).get(key) for key in ("source", "tokenizer", "vocab_size")},
        "derived_from": origin,
    }


def candidate_record(candidate: Candidate) -> dict:
    record = {"pattern": candidate.pattern, "names": candidate.names, "nll": round(candidate.nll, 4)}
    return record if candidate.trial_nll is None else record | {"trial_nll": round(candidate.trial_nll, 4)}


def resized_record(file: Path, content: dict, count: int, by: str) -> dict:
    """The content of the pattern file for a pattern of `count` blocks, made from the content of `file`.

    by: a key of RESIZINGS. Raises InputError if there are not more blocks than before.
    """
    blocks = content["blocks"]
    if count <= len(blocks):
        raise InputError(f"--blocks {count} must be more than the {len(blocks)} blocks of {file}")
    record = {key: content[key] for key in ("format", "model", "data", "derived_from") if key in content}
    if "model" in record:
        record["model"] = record["model"] | {"blocks": count}
    resized_from = {"file": str(file), "blocks": blocks, "by": by}
    return record | {"blocks": RESIZINGS[by](blocks, count), "resized_from": resized_from}


def refuse_existing(files: list[Path]) -> None:
    """Raises InputError if a file exists, before minutes are spent on its content."""
    for file in filter(Path.exists, files):
        raise InputError(f"{file} exists; give another file with --out, or replace it with --force")
