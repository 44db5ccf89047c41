"""nas.derivation.pattern_record."""

from pathlib import Path

import numpy as np

from nas.core.errors import InputError
from nas.core.files import to_yaml, write_yaml
from nas.core.pattern import FORMAT
from nas.derivation.confidence import block_confidence, removal_confidence
from nas.derivation.runs import SearchRun


def pattern_record(
    path: list[int],
    runs: list[SearchRun],
    method: str,
    budget: float | None = None,
    removal_losses: list[np.ndarray] | None = None,
) -> dict:
    """The pattern file's mapping: operations by index, and what a reader needs in order to trust them.

    removal_losses: as nas.perturbation.choose_by_perturbation gives them, where the method is perturbation.
    """
    first = runs[0]
    blocks = [first.operations[index] for index in path]
    pi = np.stack([run.pi for run in runs], axis=1)  # [N, S, O]
    least = first.options["search.warnings.margin"]
    confidence = [block_confidence(first.operations, row, i, least) for row, i in zip(pi, path, strict=True)]
    for about, losses in zip(confidence, removal_losses or [], strict=removal_losses is not None):
        about["removal"] = removal_confidence(first.operations, losses)
    origin = {"runs": [str(run.path) for run in runs], "steps": [run.step for run in runs], "method": method}
    return {
        "format": FORMAT,
        "blocks": blocks,
        "confidence": confidence,
        "flops_per_token": round(first.flops.pattern(blocks)),
        "flops_ratio_to_interleaved": round(first.flops.ratio(blocks), 4),
        "model": first.content.get("model"),
        "data": {key: first.content.get("data", {}).get(key) for key in ("source", "tokenizer", "vocab_size")},
        "derived_from": origin if budget is None else {**origin, "latency_budget": budget},
    }


def write_patterns(patterns: dict[Path, dict], force: bool) -> None:
    """Write pattern files, all or none. Raises InputError where one exists and says something else, unless `force`;
    its `latency`, the last key, may differ, since no two measurements are the same."""
    for path, content in patterns.items():
        before = path.read_text("utf-8") if path.exists() else None
        if before and without_latency(before) != without_latency(to_yaml(content)) and not force:
            raise InputError(f"{path} exists and differs; name another file with --out, or replace it with --force")
    for path, content in patterns.items():
        write_yaml(path, content)


def without_latency(text: str) -> str:
    return text.partition("\nlatency:")[0].rstrip()
