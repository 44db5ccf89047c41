"""What derive.py prints: tables, warnings and notices."""

from itertools import combinations

import numpy as np

from nas.core.blocks import kind_of
from nas.core.pattern import abbreviate, abbreviate_network
from nas.costs.budget import likeliest_path
from nas.costs.cost_table import CostTable, for_text, latency_report
from nas.derivation.runs import Choice, SearchRun, confidence_warnings

TARGET_TOLERANCE = 0.1  # relative distance from the target of search.method=gumbel that needs no notice


def print_choice(choice: Choice, pattern: dict, costs: CostTable) -> None:
    """Print a choice and the content of its pattern file."""
    print(confidence_table(pattern))
    for warning in confidence_warnings(pattern):
        print(f"WARNING: {warning}")
    print_spread(choice, costs)
    blocks = pattern["blocks"]
    same = f" (the network {abbreviate_network(blocks)}, because identity does nothing)" if "identity" in blocks else ""
    print(f"pattern {abbreviate(blocks)}: {', '.join(blocks)}{same}")
    print(f"{pattern['flops_ratio_to_interleaved']:.2f} of the interleaved pattern's FLOPs per token")
    print(f"{costs.ratio(blocks):.3f} of the reference's cost; {for_text(costs.cost(blocks), costs.unit)}")
    for line in latency_report(pattern.get("latency") or {}):
        print(line)
    offered = any(kind_of(name).reaches_far for name in choice.runs[0].operations)
    if offered and not any(kind_of(name).reaches_far for name in blocks):
        print(
            "WARNING: the pattern has no attention, so it predicts from the last few tokens alone: give a larger "
            "budget, or model.cutoffs=auto if embedding and output layer take most of the time"
        )


def trials_table(trials: list[dict]) -> str:
    """Bits per byte after each trial, a line per network, the longest trials first. trials: of choice.yaml."""
    shares, losses = sorted({one["share"] for one in trials}), {}
    for one in trials:
        losses.setdefault(one["name"], {})[one["share"]] = one["bits_per_byte"]
    width = max(map(len, losses))
    head = f"  {'trials, bits per byte on valid after':<{width}}" + "".join(f"{share:>9.3g}" for share in shares)
    order = sorted(losses, key=lambda name: (-max(losses[name]), losses[name][max(losses[name])]))
    rows = [
        f"  {name:<{width}}"
        + "".join(f"{losses[name][share]:>9.4f}" if share in losses[name] else " " * 9 for share in shares)
        for name in order
    ]
    return "\n".join([head, *map(str.rstrip, rows)])


def confidence_table(pattern: dict) -> str:
    """A line per block: choice, pi of each operation, margin, agreement of several seeds, entropy, decision."""
    records = pattern["confidence"]
    names, seeds = list(records[0]["pi"]), "agreement" in records[0]
    width = max(map(len, names)) + 1
    head = f"{'block':>5}  {'choice':<{width}}" + "".join(f"{name:>{len(name) + 2}}" for name in names)
    head += f"{'margin':>8}" + (f"{'± error':>9}{'agree':>7}" if seeds else "") + f"{'entropy':>9}"
    rows = [head]
    for number, record in enumerate(records, start=1):
        row = f"{number:>5}  {record['operation']:<{width}}"
        row += "".join(f"{record['pi'][name]:>{len(name) + 2}.3f}" for name in names) + f"{record['margin']:>8.3f}"
        if seeds:
            row += f"{record.get('margin_error', 0.0):>9.3f}{record['agreement']:>7.0%}"
        rows.append(f"{row}{record['entropy']:>9.3f}  {decision(record)}".rstrip())
    return "\n".join(rows)


def decision(record: dict) -> str:
    """Whether pi decides a block, as text."""
    if record["undecided"]:
        return f"undecided: {record['as_good']} as good"
    if record["margin"] < 0:
        return f"pi prefers {record['second']}"
    return "decided" if "agreement" in record else ""


def print_spread(choice: Choice, costs: CostTable) -> None:
    """Print the likeliest pattern of each run, and how much they differ, if there are several."""
    operations, paths = choice.runs[0].operations, {}
    if len(choice.runs) == 1:
        return
    for run in choice.runs:
        paths[run.path] = likeliest_path(run.pi, operations, costs, choice.budget)
        print(f"{run.path}: {abbreviate([operations[index] for index in paths[run.path]])}")
    differing = [sum(a != b for a, b in zip(one, two, strict=True)) for one, two in combinations(paths.values(), 2)]
    print(f"{np.mean(differing):.1f} of {len(choice.runs[0].pi)} blocks differ between two of these patterns")


def pareto_table(patterns: list[dict], costs: CostTable) -> str:
    """Markdown: a row per budget, with the predicted cost of its pattern and, if there is one, the measured time."""
    rows = [
        f"Budgets and predicted ratios are relative to the reference's cost, in {costs.unit}.",
        "",
        "| budget | pattern | attending blocks | predicted ratio | ms for 1,000 bytes | ms, of interleaved |",
        "|---|---|---|---|---|---|",
    ]
    for pattern in patterns:
        latency, blocks = pattern.get("latency") or {}, pattern["blocks"]
        values = {"ms_per_1000_bytes": ".3f", "ratio_to_interleaved": ".3f"}
        cells = [
            f"{pattern['derived_from']['latency_budget']:.4g}",
            abbreviate(blocks),
            str(sum(kind_of(name).reaches_far for name in blocks)),
            f"{costs.ratio(blocks):.3f}",
            *(format(latency[key], digits) if key in latency else "" for key, digits in values.items()),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def print_notices(runs: list[SearchRun], budget: float | None, ratio: float) -> None:
    """Print what limits the evidence of the runs. ratio: the cost of the derived pattern, within a budget."""
    target = runs[0].target
    if budget is None and target and abs(ratio / target - 1) >= TARGET_TOLERANCE:
        print(
            f"NOTICE: the search's target is {target:.4g} of the reference's cost, and this pattern costs "
            f"{ratio:.2f}. The target applies to the average over pi; give --latency-budget for the pattern itself."
        )
    if len(runs) == 1 and runs[0].options["search.method"] != "trials":
        print("One run does not show whether other seeds agree: search with seed=2 and seed=3, and pass all RUN_DIRs.")
