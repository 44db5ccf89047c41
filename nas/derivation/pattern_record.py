"""The pattern file that derive.py writes."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from models.operations.registry import Shape
from nas.core.pattern import FORMAT, resolve_block, shape_of
from nas.costs.budget import log_pi, patterns_within
from nas.costs.cost_table import CostTable
from nas.derivation.confidence import block_confidence
from nas.derivation.runs import SearchRun


@dataclass(frozen=True)
class Choice:
    """The chosen pattern, and what it was chosen from.

    Args:
        blocks: the operation of each block.
        budget: a ratio to the reference's cost; None: none.
        runs: the runs, with the pi of this budget.
        trials: of choice.yaml, if the search made trials.
        trial: the run folder of the pattern's trial, which retrain.py continues; None: it had none.
    """

    blocks: list[str]
    budget: float | None
    runs: list[SearchRun]
    trials: list[dict] = field(default_factory=list)
    trial: Path | None = None


def pattern_record(choice: Choice, costs: CostTable) -> dict:
    """The content of the pattern file: the operation of each block, how certain it is, and where it comes from.

    costs: of the budget. The certainty is that of patterns drawn from pi within the budget.
    """
    first, blocks = choice.runs[0], choice.blocks
    options = first.options
    model = (options[f"model.{key}"] for key in ("d_model", "heads", "d_ffn"))
    shape = Shape(*model, options["train.segment"], options["train.segment"] + options["train.memory"])
    drawn = [run.pi for run in choice.runs]
    if choice.budget is not None and not choice.trials:  # pi of trials is that of networks within the budget
        lattice = patterns_within(choice.budget, len(blocks), first.operations, costs)
        drawn = [lattice.marginals(log_pi(pi)) for pi in drawn]
    pi = np.stack(drawn)  # [runs, N, O]
    confidence = [
        block_confidence(first.operations, rows, first.operations.index(name))
        for rows, name in zip(pi.swapaxes(0, 1), blocks, strict=False)  # blocks leave identity out
    ]
    origin = {"runs": [str(run.path) for run in choice.runs], "steps": [run.step for run in choice.runs]}
    if choice.budget is not None:
        origin["latency_budget"] = choice.budget
    if choice.trials:
        origin["trials"] = choice.trials
    if choice.trial:
        origin["trial"] = str(choice.trial)
    return {
        "format": FORMAT,
        **shape_of(options),
        "blocks": blocks,
        "sizes": {name: resolve_block(name, shape)[1] for name in dict.fromkeys(blocks)},
        "confidence": confidence,
        "flops_ratio_to_interleaved": round(first.flops.ratio_to_interleaved(blocks), 4),
        "model": first.content.get("model"),
        "data": {key: first.content.get("data", {}).get(key) for key in ("source", "tokenizer", "vocab_size")},
        "derived_from": origin,
    }
