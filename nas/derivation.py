"""From pi to a pattern, with the figures that say how far to trust it. Imports no torch."""

import math
from pathlib import Path

from nas.errors import InputError
from nas.pattern import FORMAT, interleaved
from nas.record import read_yaml

TIE = 1e-6  # margins below this are a tie
NEAR_UNIFORM_MARGIN = 0.1  # first minus second probability


def block_confidence(operations: list[str], pi: list[float]) -> dict:
    """The choice for one block: operation, pi, margin (first minus second) and entropy in nats."""
    order = sorted(range(len(pi)), key=lambda index: -pi[index])
    first, second = pi[order[0]], pi[order[1]] if len(pi) > 1 else 0.0
    return {
        "operation": operations[order[0]],
        "pi": {name: round(p, 6) for name, p in zip(operations, pi, strict=True)},
        "margin": round(first - second, 6),
        "entropy": round(-sum(p * math.log(p) for p in pi if p > 0), 6),
    }


def read_costs(path: Path, operations: list[str]) -> dict:
    """FLOPs per token of the operations and of the output layer, as the search left them. Raises InputError."""
    costs = read_yaml(path)
    blocks = costs.get("blocks")
    if not isinstance(blocks, dict) or not {*operations, *interleaved(2)} <= blocks.keys() or "output" not in costs:
        raise InputError(f"{path} is damaged: it must give `output` and, in `blocks`, each of {', '.join(operations)}")
    return costs


def derive_argmax(history: list[dict], config: dict, costs: dict) -> dict:
    """The pattern file's mapping: the likeliest operation of every block at the last logged step.

    history: lines of pi.jsonl; config: the run's; costs: FLOPs per token of each operation and of the output layer.
    """
    last = history[-1]
    confidence = [block_confidence(last["operations"], pi) for pi in last["pi"]]
    blocks = [about["operation"] for about in confidence]

    def flops(names: list[str]) -> float:
        return costs["output"] + sum(costs["blocks"][name] for name in names)

    return {
        "format": FORMAT,
        "blocks": blocks,
        "confidence": confidence,
        "flops_per_token": round(flops(blocks)),
        "flops_ratio_to_interleaved": round(flops(blocks) / flops(interleaved(len(blocks))), 4),
        "model": config.get("model"),
        "data": {key: config.get("data", {}).get(key) for key in ("source", "tokenizer", "vocab_size")},
    }


def doubts(pattern: dict) -> list[str]:
    """What a reader must not overlook, one sentence each: ties and near-uniform blocks."""
    found = []
    for index, about in enumerate(pattern["confidence"], start=1):
        ranked = sorted(about["pi"], key=lambda name: -about["pi"][name])
        if len(ranked) > 1 and about["margin"] < TIE:
            found.append(f"block {index} is a TIE between {ranked[0]} and {ranked[1]}: its operation is arbitrary")
        elif len(ranked) > 1 and about["margin"] < NEAR_UNIFORM_MARGIN:
            found.append(
                f"block {index} is UNDECIDED: {ranked[0]} leads {ranked[1]} by only {about['margin']:.3f}; "
                f"{ranked[1]} may be as good"
            )
    return found


def confidence_table(pattern: dict) -> str:
    """A line per block: choice, pi of every operation, margin, entropy."""
    names = list(pattern["confidence"][0]["pi"])
    rows = [f"{'block':>5}  {'choice':<10}" + "".join(f"{name:>11}" for name in names) + f"{'margin':>9}{'entropy':>9}"]
    for index, about in enumerate(pattern["confidence"], start=1):
        figures = "".join(f"{about['pi'][name]:>11.3f}" for name in names)
        rows.append(f"{index:>5}  {about['operation']:<10}{figures}{about['margin']:>9.3f}{about['entropy']:>9.3f}")
    return "\n".join(rows)
