"""The pattern file that derive.py writes, and the tables that it prints.

S runs (seeds of one search), N blocks, O candidate operations.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nas.core.errors import InputError
from nas.core.files import to_yaml, write_yaml
from nas.core.pattern import ATTENDING, FORMAT, RESIZINGS, abbreviate, expand, network
from nas.costs.budget import log_pi, patterns_within
from nas.costs.cost_table import CostTable
from nas.derivation.confidence import block_confidence, perturbation_confidence
from nas.derivation.runs import SearchRun

# Nats per token; smaller differences mean nothing.
TRIALS_TIE = 0.02  # about two standard deviations of a difference between two trials (experiments/ranking)
SHARED_WEIGHTS_TIE = 0.005  # of losses by a SuperNet's weights


@dataclass(frozen=True)
class Choice:
    """The choice of a method of derivation.

    Args:
        path: an operation's index for each block.
        budget: the ratio to the interleaved pattern's cost that was given.
        attentions: the highest number of limited_operations(); None: any.
        losses: with perturbation, nll per token without each operation [R, O] for each block.
        runs: with relearning, the runs with the pi of this budget.
        seconds: the time of relearning and trials.
        candidates: {name: {"pattern", "nll"}} of the pattern of pi, `pi`, and of those that it was compared with.
        trials: the steps of the trials that chose among them; chosen: the name of the best after these trials.
    """

    path: list[int]
    budget: float | None = None
    attentions: int | None = None
    losses: list[np.ndarray] | None = None
    runs: list[SearchRun] | None = None
    seconds: float | None = None
    candidates: dict[str, dict] | None = None
    trials: int | None = None
    chosen: str = "pi"

    @property
    def from_pi(self) -> bool:
        """Whether pi led to the path; otherwise a rule did."""
        return self.chosen == "pi" or self.attentions is not None


def pattern_record(choice: Choice, runs: list[SearchRun], method: str, costs: CostTable | None = None) -> dict:
    """The content of the pattern file: the operation of each block, how certain it is, and where it comes from.

    With costs and a budget, the certainty is that of patterns drawn from pi within the budget.
    """
    runs = choice.runs or runs
    first = runs[0]
    blocks = [first.operations[index] for index in choice.path]
    pi = np.stack([run.pi for run in runs])  # [S, N, O]
    if costs and choice.budget is not None:
        lattice = patterns_within(choice.budget, len(blocks), first.operations, costs, choice.attentions)
        pi = np.stack([lattice.marginals(log_pi(own)) for own in pi])
    min_margin = first.options["search.warnings.margin"]
    confidence = [
        block_confidence(first.operations, rows, index, min_margin)
        for rows, index in zip(pi.swapaxes(0, 1), choice.path, strict=True)
    ]
    if choice.losses is not None:
        for record, losses in zip(confidence, choice.losses, strict=True):
            record["removal"] = perturbation_confidence(first.operations, losses)
    origin = {"runs": [str(run.path) for run in runs], "steps": [run.step for run in runs], "method": method}
    if choice.budget is not None:
        origin["latency_budget"] = choice.budget
    if choice.seconds is not None:
        origin["seconds"] = round(choice.seconds)
    if choice.candidates is not None:
        origin["candidates"] = choice.candidates
    if choice.trials is not None:
        origin |= {"trials": choice.trials, "chosen": choice.chosen}
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
    """Raises InputError if a file exists. A derivation that takes minutes calls it first, so that no result is lost."""
    for file in filter(Path.exists, files):
        raise InputError(f"{file} exists; give another file with --out, or replace it with --force")


def write_patterns(patterns: dict[Path, dict], force: bool) -> None:
    """Write pattern files, all or none. Raises InputError if a file exists with other content, unless `force` is set.

    The latency and the time of the derivation may differ, because no two measurements are equal.
    """
    for path, content in patterns.items():
        before = path.read_text("utf-8") if path.exists() else None
        if before and without_times(before) != without_times(to_yaml(content)) and not force:
            raise InputError(f"{path} exists and differs; give another file with --out, or replace it with --force")
    for path, content in patterns.items():
        write_yaml(path, content)


def without_times(text: str) -> str:
    return re.sub(r"\bseconds: \d+", "", text.partition("\nlatency:")[0]).rstrip()


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


def perturbation_table(pattern: dict) -> str:
    """A line per block: nll per token without each operation. The choice is the one with the highest."""
    rows = ["nll per token on parts of valid, with one operation removed from the SuperNet."]
    rows += ["lead: distance to the second highest nll, ± its standard error over parts of the text and runs."]
    for number, record in enumerate(pattern["confidence"], start=1):
        removal = record["removal"]
        row = f"{number:>5}  {record['operation']:<{max(map(len, record['pi'])) + 1}}"
        row += "  ".join(f"without {name} {nll:.4f}" for name, nll in removal["nll_without"].items())
        if "lead" in removal:
            row += f"  lead {removal['lead']:.4f} ± {removal['lead_error']:.4f}  "
            row += f"undecided: {removal['second']} as good" if removal["undecided"] else "decided"
        rows.append(row)
    return "\n".join(rows)


def candidates_table(candidates: dict[str, dict]) -> str:
    """A line per network: nll by shared weights, nll after a trial if there were any, and the names of its patterns."""
    best = min(about["nll"] for about in candidates.values())
    tried = any("trial_nll" in about for about in candidates.values())
    rows = ["patterns within the same cost, nll with the SuperNet's weights on parts of valid"]
    rows[0] += f", and on valid after a trial; differences of trials below {TRIALS_TIE} may be chance" if tried else ""
    same = {}
    for name in sorted(candidates, key=lambda name: candidates[name]["nll"]):
        same.setdefault(network(expand(candidates[name]["pattern"])), []).append(name)
    for names in same.values():
        about, trial = candidates[names[0]], ""
        if tried:
            behind = f"no trial: {about['nll'] - best:.3f} behind"
            trial = f"{about['trial_nll']:.4f}" if "trial_nll" in about else behind
            trial = f"{trial:<23}"
        rows.append(f"  {about['pattern']}  {about['nll']:.4f}  {trial}{', '.join(names)}")
    return "\n".join(rows)


def pareto_table(patterns: list[dict], unit: str) -> str:
    """Markdown: a row per budget, with the predicted and, if there is one, the measured cost of its pattern."""
    rows = [
        f"Budgets and ratios are relative to the interleaved pattern's cost, in {unit}.",
        "",
        "| budget | pattern | attending blocks | predicted ratio | measured ratio | predicted ms | ms | SuperNet nll |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for pattern in patterns:
        latency = pattern.get("latency") or {}
        ratio = latency.get("predicted_ratio_to_interleaved", pattern["flops_ratio_to_interleaved"])
        short, compared = abbreviate(pattern["blocks"]), pattern["derived_from"].get("candidates", {}).values()
        nll = next((about["nll"] for about in compared if about["pattern"] == short), "")  # trials may choose a rule
        values = {"ratio_to_interleaved": ".3f", "predicted_ms": ".2f", "median_ms": ".2f"}
        cells = [
            f"{pattern['derived_from']['latency_budget']:g}",
            short,
            str(sum(name in ATTENDING for name in pattern["blocks"])),
            f"{ratio:.3f}",
            *(format(latency[key], digits) if key in latency else "" for key, digits in values.items()),
            str(nll),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"
