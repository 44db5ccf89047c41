"""From pi to a pattern, with the figures that say how far to trust it. Imports no torch.

S runs (seeds of one search), N blocks, O candidate operations.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nas.costs import CostTable, read_costs
from nas.errors import InputError
from nas.pattern import ATTENDING, FORMAT, abbreviate, dump_pattern, interleaved
from nas.record import flat_config, read_pi, read_yaml, write_text

TIE = 1e-6  # margins below this are a tie
# A mean of S that is below so many of its standard errors may be chance: quantiles of Student's t at 0.95, one tail,
# for S - 1 = 1, 2, ... degrees of freedom; the normal quantile beyond.
T_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
NORMAL_QUANTILE = 1.645
MAY_DIFFER = ("seed", "data.cache", "train.threads")  # between seeds of one search


@dataclass(frozen=True)
class SearchRun:
    """What a search left in its folder: pi [N, O] at the last logged step, and what it ran with."""

    path: Path
    content: dict  # of config.yaml
    operations: list[str]
    pi: np.ndarray
    step: int
    of_steps: int
    flops: CostTable

    @cached_property
    def options(self) -> dict:
        """{dotted key: value}"""
        return flat_config(self.content)

    @property
    def target(self) -> float | None:
        """The ratio to the interleaved pattern's cost that the search aimed at; None where it had no such aim."""
        aimed = self.options["search.latency.source"] != "none" and self.options["search.latency.mode"] == "target"
        return self.options["search.latency.target"] if aimed else None


def read_run(path: Path) -> SearchRun:
    """Raises InputError where the folder is no search run, or damaged."""
    last = read_pi(path)[-1]
    content, names = read_yaml(path / "config.yaml"), last["operations"]
    flops = read_costs(path / "flops.yaml", names)
    return SearchRun(path, content, names, np.array(last["pi"]), last["step"], last.get("of_steps", 0), flops)


def check_seeds(runs: list[SearchRun]) -> list[str]:
    """That runs are seeds of one search: notices of what else differs between them.

    Raises InputError where their operations, blocks, models or texts differ, naming the first difference.
    """
    first, found = runs[0], []
    for run in runs[1:]:
        if run.path.resolve() == first.path.resolve():
            raise InputError(f"{run.path} is given twice")
        if (run.operations, run.pi.shape) != (first.operations, first.pi.shape):
            raise InputError(
                f"{run.path} searched {len(run.pi)} blocks of {', '.join(run.operations)}, and {first.path} "
                f"{len(first.pi)} of {', '.join(first.operations)}: give seeds of one search"
            )
        for key, value in run.options.items():
            if key in MAY_DIFFER or value == first.options[key]:
                continue
            difference = f"{key} is {value} in {run.path} and {first.options[key]} in {first.path}"
            if key.startswith(("model.", "data.")):
                raise InputError(f"{difference}: give seeds of one search")
            found.append(f"{difference}: what follows mixes two ways to search")
        if run.options["seed"] == first.options["seed"]:
            found.append(f"{run.path} has the seed of {first.path}: it adds no evidence")
    return found


class Frontier:
    """The patterns that nothing beats: for every cost the greatest sum of scores, by dynamic programming over blocks.

    scores [N, O]; costs [O] of an operation in any block. Exact: a partial pattern is dropped only where another of at
    most its cost has at least its score, whatever follows. Costs are counted in whole units of 2^-40 of the largest, so
    that their sums have no rounding and there are never more partial patterns than multisets of operations.
    """

    def __init__(self, scores: np.ndarray, costs: list[float]):
        self.unit = max(costs) / 2**40
        units = np.rint(np.array(costs) / (self.unit or 1.0)).astype(np.int64)
        cost, score, self.choices = np.zeros(1, dtype=np.int64), np.zeros(1), []
        for row in scores:
            total, value = (cost[:, None] + units).ravel(), (score[:, None] + row).ravel()
            order = np.lexsort((-value, total))
            best_before = np.concatenate([[-np.inf], np.maximum.accumulate(value[order])[:-1]])
            kept = order[value[order] > best_before]
            self.choices.append(np.divmod(kept, len(costs)))  # (where it came from, operation)
            cost, score = total[kept], value[kept]
        self.cost = cost * self.unit

    def best(self, budget: float) -> list[int] | None:
        """The operation of each block in the pattern of greatest score that costs at most `budget`, within 1e-9 of the
        dearest operation; None where no pattern does."""
        place = int(np.searchsorted(self.cost, budget + 2**10 * self.unit, side="right")) - 1
        if place < 0:
            return None
        path = []
        for origins, operations in reversed(self.choices):
            path.append(int(operations[place]))
            place = origins[place]
        return path[::-1]


def read_budgets(text: str) -> list[float]:
    """0.5,0.65,1 -> increasing ratios to the interleaved pattern's cost. Raises InputError where they are none."""
    try:
        budgets = sorted({round(float(part), 4) for part in text.split(",")})  # files are named by them
    except ValueError:
        budgets = []
    if not budgets or not all(0 < budget < math.inf for budget in budgets):
        raise InputError(f"{text!r} is no budget: give ratios to the interleaved pattern's cost, such as 0.5,0.65,1")
    return budgets


def choose_within(budgets: list[float], pi: np.ndarray, operations: list[str], costs: CostTable) -> list[list[int]]:
    """For each budget, a ratio to the interleaved pattern's cost, the pattern of greatest sum of log pi within it.

    Raises InputError where no pattern is so cheap, with the least that one is.
    """
    usual = costs.pattern(interleaved(len(pi)))
    scores = np.log(np.maximum(pi, np.finfo(float).tiny))
    frontier = Frontier(scores, [costs.blocks[name] for name in operations])
    paths = [frontier.best(budget * usual - costs.rest) for budget in budgets]
    if None in paths:
        least = math.ceil(1000 * (costs.rest + frontier.cost[0]) / usual) / 1000
        raise InputError(
            f"no pattern is within a budget of {budgets[0]:g}: the cheapest costs {least:.3f} of the interleaved "
            "pattern's; give at least that"
        )
    return paths


def entropy(pi: np.ndarray) -> np.ndarray:
    """Entropy in nats over the last axis."""
    return -np.where(pi > 0, pi * np.log(np.where(pi > 0, pi, 1)), 0).sum(axis=-1)


def least_sure(seeds: int) -> float:
    """How many standard errors a margin over so many seeds must reach to be no chance (5%)."""
    if seeds < 2:
        return 0.0
    return T_QUANTILES[seeds - 2] if seeds - 2 < len(T_QUANTILES) else NORMAL_QUANTILE


def block_confidence(operations: list[str], pi: np.ndarray, chosen: int, least_margin: float) -> dict:
    """How sure pi is of the choice for one block. pi [S, O], a row per seed; chosen: index of the operation.

    margin: of the mean pi, the chosen operation's minus that of the likeliest other, `second`; margin_error: its
    standard error over the seeds; agreement: the share of the seeds whose own likeliest operation is the chosen one. A
    lead is doubtful where it is below least_margin, or may be chance by its error. The block is undecided where that
    over some other operation is, which is then `as_good`, unless another is clearly likelier than the chosen one.
    """
    mean, seeds = pi.mean(axis=0), len(pi)
    about = {
        "operation": operations[chosen],
        "pi": {name: round(float(p), 6) for name, p in zip(operations, mean, strict=True)},
        "margin": round(float(mean[chosen]), 6),
        "entropy": round(float(entropy(mean)), 6),
    }
    if seeds > 1:
        about["agreement"] = round(float((pi.argmax(axis=1) == chosen).mean()), 4)
    others = sorted((index for index in range(len(operations)) if index != chosen), key=lambda index: -mean[index])
    if not others:
        return about | {"undecided": False}
    leads = pi[:, [chosen]] - pi[:, others]  # [S, O - 1], over the likeliest first
    margins = leads.mean(axis=0)
    errors = leads.std(axis=0, ddof=1) / math.sqrt(seeds) if seeds > 1 else np.zeros(len(others))
    doubtful = np.abs(margins) < np.maximum(least_margin, least_sure(seeds) * errors)
    about |= {"margin": round(float(margins[0]), 6), "second": operations[others[0]]}
    if seeds > 1:
        about["margin_error"] = round(float(errors[0]), 6)
    if not doubtful.any() or (margins[0] < 0 and not doubtful[0]):
        return about | {"undecided": False}
    return about | {"undecided": True, "as_good": operations[others[int(doubtful.argmax())]]}


def removal_confidence(operations: list[str], losses: np.ndarray) -> dict:
    """How sure a choice by perturbation is. losses [R, O]: nll per token without each operation, measured R times.

    lead: what losing the chosen operation costs more than losing the next, `second`; lead_error: its standard error
    over the R measurements.
    """
    mean = losses.mean(axis=0)
    about = {"nll_without": {name: round(float(nll), 6) for name, nll in zip(operations, mean, strict=True)}}
    if len(operations) == 1:
        return about | {"undecided": False}
    second, first = np.argsort(mean)[-2:]
    leads = losses[:, first] - losses[:, second]
    error = leads.std(ddof=1) / math.sqrt(len(leads)) if len(leads) > 1 else math.inf
    return about | {
        "second": operations[second],
        "lead": round(float(leads.mean()), 6),
        "lead_error": round(float(error), 6),
        "undecided": len(leads) < 2 or bool(leads.mean() < least_sure(len(leads)) * error),
    }


def describe(
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


def undecided_words(block: int, first: str, second: str, margin: float) -> str:
    """How a search and a derivation say that a block has no clear choice; first: the likelier."""
    if margin < TIE:
        return f"block {block} is a TIE between {first} and {second}: its operation is arbitrary"
    return f"block {block} is UNDECIDED: {first} leads {second} by only {margin:.3f}; {second} may be as good"


def doubts(pattern: dict) -> list[str]:
    """What a reader must not overlook, one sentence for each block that what chose it leaves undecided."""
    found = []
    for index, about in enumerate(pattern["confidence"], start=1):
        removal = about.get("removal")
        if removal and removal["undecided"]:
            lead = f"{removal['lead']:.4f} nats more (standard error {removal['lead_error']:.4f})"
            words = f"to lose {about['operation']} costs {lead} than to lose {removal['second']}, which may be as good"
            found.append(f"block {index} is UNDECIDED: {words}")
        elif not removal and about["undecided"]:
            names = [about["operation"], about["as_good"]]
            first, second = sorted(names, key=lambda name: -about["pi"][name])
            words = undecided_words(index, first, second, about["pi"][first] - about["pi"][second])
            error = about.get("margin_error", 0.0)
            if error > 0 and about["as_good"] == about["second"]:
                words += f" (over the seeds the lead has a standard error of {error:.3f})"
            found.append(words)
    return found


def confidence_table(pattern: dict) -> str:
    """A line per block: choice, pi of every operation, margin, entropy; over seeds their agreement; and in words."""
    names = list(pattern["confidence"][0]["pi"])
    seeds = "agreement" in pattern["confidence"][0]
    head = f"{'block':>5}  {'choice':<{width(names)}}" + "".join(f"{name:>{len(name) + 2}}" for name in names)
    head += f"{'margin':>8}" + (f"{'± error':>9}{'agree':>7}" if seeds else "") + f"{'entropy':>9}  "
    rows = [head]
    for index, about in enumerate(pattern["confidence"], start=1):
        row = f"{index:>5}  {about['operation']:<{width(names)}}"
        row += "".join(f"{about['pi'][name]:>{len(name) + 2}.3f}" for name in names) + f"{about['margin']:>8.3f}"
        if seeds:
            row += f"{about.get('margin_error', 0.0):>9.3f}{about['agreement']:>7.0%}"
        rows.append(f"{row}{about['entropy']:>9.3f}  {verdict(about)}")
    return "\n".join(row.rstrip() for row in rows)


def width(names: list[str]) -> int:
    return max(map(len, names)) + 1


def verdict(about: dict) -> str:
    """Confidence in words, by pi."""
    if about["undecided"]:
        return f"undecided: {about['as_good']} as good"
    if about["margin"] < 0:
        return f"pi prefers {about['second']}"
    return "decided" if "agreement" in about else ""


def removal_table(pattern: dict) -> str:
    """A line per block: nll per token on valid without each operation; the choice is the one that is missed most."""
    rows = [
        "nll per token on the beginning of valid, with one operation taken out of the SuperNet; the lead is over the"
    ]
    rows += [
        "next loss, with its standard error over parts of the text and runs. What pi says is in the table below it."
    ]
    for index, about in enumerate(pattern["confidence"], start=1):
        removal = about["removal"]
        row = f"{index:>5}  {about['operation']:<{width(list(about['pi']))}}"
        row += "  ".join(f"without {name} {nll:.4f}" for name, nll in removal["nll_without"].items())
        if "lead" in removal:
            row += f"  lead {removal['lead']:.4f} ± {removal['lead_error']:.4f}  "
            row += f"undecided: {removal['second']} as good" if removal["undecided"] else "decided"
        rows.append(row)
    return "\n".join(rows)


def target_notice(run: SearchRun, ratio: float) -> str | None:
    """What a user who gave a target must know of a pattern that costs something else."""
    target = run.target
    if target is None or run.options["search.latency.weight"] == 0 or abs(ratio / target - 1) < 0.1:
        return None
    return (
        f"the search aimed at {target:g} of the interleaved pattern's cost, this pattern costs {ratio:.2f}: a target "
        "holds for the expectation over pi, of which a pattern keeps one operation per block"
    )


def pareto_table(patterns: dict[float, dict], unit: str) -> str:
    """Markdown: a row per budget, with what the pattern costs, predicted and, where it was, measured."""
    rows = [
        f"Budgets and ratios are of the interleaved pattern's cost, in {unit}.",
        "",
        "| budget | pattern | attention blocks | predicted ratio | measured ratio | predicted ms | ms | log pi |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for budget, pattern in patterns.items():
        latency = pattern.get("latency") or {}
        ratio = latency.get("predicted_ratio_to_interleaved", pattern["flops_ratio_to_interleaved"])
        score = sum(math.log(max(about["pi"][about["operation"]], 1e-300)) for about in pattern["confidence"])
        seen = [latency.get(key) for key in ("ratio_to_interleaved", "predicted_ms", "median_ms")]
        shown = ["" if value is None else f"{value:.{places}f}" for value, places in zip(seen, (3, 2, 2), strict=True)]
        cells = [
            f"{budget:g}",
            abbreviate(pattern["blocks"]),
            str(sum(name in ATTENDING for name in pattern["blocks"])),
            f"{ratio:.3f}",
        ]
        rows.append("| " + " | ".join([*cells, *shown, f"{score:.2f}"]) + " |")
    return "\n".join(rows) + "\n"


def write_patterns(patterns: dict[Path, dict], force: bool) -> None:
    """Write pattern files, all or none. Raises InputError where one exists and says something else, unless `force`;
    its `latency`, the last key, may differ, since no two measurements are the same."""
    for path, content in patterns.items():
        before = path.read_text("utf-8") if path.exists() else None
        if before and without_latency(before) != without_latency(dump_pattern(content)) and not force:
            raise InputError(f"{path} exists and differs; name another file with --out, or replace it with --force")
    for path, content in patterns.items():
        write_text(path, dump_pattern(content))


def without_latency(text: str) -> str:
    return text.partition("\nlatency:")[0].rstrip()
