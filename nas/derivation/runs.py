"""Search runs: how derivation reads them, how certain a choice from them is, and the pattern file that it becomes.

S runs (seeds of one search), N blocks, O candidate operations.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.special import entr, stdtrit

from nas.core.config import SEEDS, Config, config_of, flat_config, marked
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.outcome import MARGIN, TIED_MARGIN, read_pi, undecided_message
from nas.core.pattern import FORMAT, read_pattern, resolve_block, shape_of
from nas.core.run_folder import CHOICE, CONFIG, FLOPS_TABLE, LATENCY, OUTCOME, PATTERN
from nas.costs.budget import as_ratio, likeliest_pattern, log_pi, patterns_within
from nas.costs.cost_table import CostTable
from nas.search.space import read_table

SIGNIFICANCE = 0.05  # of the one-tailed t-tests


@dataclass(frozen=True)
class SearchRun:
    """The results of a search. content: of config.yaml. pi: [N, O] at the last logged step."""

    path: Path
    content: dict
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
    def config(self) -> Config:
        return config_of(self.options)

    @property
    def target(self) -> float | None:
        """search.latency.target as a ratio to the reference's cost; None if cost played no role."""
        if self.options["search.latency.source"] == "none":
            return None
        return as_ratio(self.options["search.latency.target"], self.costs, len(self.pi))

    @property
    def budget(self) -> float | None:
        """The budget of a search by trials; None: none."""
        return self.target if self.options["search.method"] != "gumbel" else None

    @property
    def costs(self) -> CostTable:
        """The costs that the search used: milliseconds if it measured them, else FLOPs."""
        measured = self.config.search.latency.in_milliseconds
        return read_table(self.path / LATENCY, self.options, self.operations) if measured else self.flops


def read_run(path: Path) -> SearchRun:
    """Read a search run. Raises InputError if it is none, or is damaged, or if its logits have not learned."""
    last = read_pi(path)[-1]
    pi, of_steps = np.array(last["pi"]), last.get("of_steps", 0)
    finished = (path / OUTCOME).exists()  # then a uniform pi has learned that no pattern is better than another
    if pi.shape[-1] > 1 and np.ptp(pi) < TIED_MARGIN and not finished:
        raise InputError(
            f"{path}: pi is still uniform at step {last['step']} of {of_steps}, because the logits have not learned; "
            "continue the search with --resume"
        )
    content, names = read_yaml(path / CONFIG), last["operations"]
    flops = read_table(path / FLOPS_TABLE, flat_config(content), names)
    return SearchRun(path, content, names, pi, last["step"], of_steps, flops)


def current_pattern(run: Path) -> list[str]:
    """The pattern of pattern.yaml, else the network that trials chose, else the likeliest pattern."""
    if (run / PATTERN).exists():
        return read_pattern(run / PATTERN)["blocks"]
    if (run / CHOICE).exists():
        return read_yaml(run / CHOICE)["network"]["blocks"]
    search = read_run(run)
    return likeliest_pattern(search.pi, search.operations, search.costs, search.budget)


def check_seeds(runs: list[SearchRun]) -> list[str]:
    """Notices about unfinished runs and options that differ. Raises InputError if these are not seeds of one search."""
    first = runs[0]
    if len(runs) > 1 and any(run.options["search.method"] == "trials" for run in runs):
        raise InputError("each search by trials chooses a network of its own: give one RUN_DIR")
    notices = [
        f"{run.path} is not finished: it is at step {run.step} of {run.of_steps}; derive its pattern again at the end"
        for run in runs
        if run.step < run.of_steps
    ]
    for run in runs[1:]:
        if run.path.resolve() == first.path.resolve():
            raise InputError(f"{run.path} is given twice")
        if (run.operations, run.pi.shape) != (first.operations, first.pi.shape):
            raise InputError(
                f"{run.path} searched {len(run.pi)} blocks of {', '.join(run.operations)}, and {first.path} "
                f"{len(first.pi)} of {', '.join(first.operations)}; give seeds of one search"
            )
        for key, value in run.options.items():
            if key in marked(SEEDS) or value == first.options[key]:
                continue
            difference = f"{key} is {value} in {run.path} and {first.options[key]} in {first.path}"
            if key.startswith(("model.", "data.", "search.method")):
                raise InputError(f"{difference}; give seeds of one search")
            notices.append(f"{difference}; the pattern combines two different searches")
        if run.options["seed"] == first.options["seed"]:
            notices.append(f"{run.path} has the same seed as {first.path}, so it adds no evidence")
    return notices


def block_confidence(operations: list[str], pi: np.ndarray, chosen: int) -> dict:
    """How certain pi [S, O] is about the chosen operation of a block, in the form of pattern files.

    margin: mean pi of the chosen operation minus that of the likeliest other, `second`. margin_error: its standard
    error over the seeds. agreement: share of the seeds whose likeliest operation is the chosen one. A lead is doubtful
    if it is below MARGIN, or not significant over the seeds. The block is undecided if the lead over some operation,
    `as_good`, is doubtful, unless pi clearly prefers another operation to the chosen one.
    """
    mean, seeds = pi.mean(axis=0), len(pi)
    record = {
        "operation": operations[chosen],
        "pi": {name: round(float(p), 6) for name, p in zip(operations, mean, strict=True)},
        "margin": round(float(mean[chosen]), 6),
        "entropy": round(float(entr(mean).sum()), 6),  # in nats
    }
    if seeds > 1:
        record["agreement"] = round(float((pi.argmax(axis=1) == chosen).mean()), 4)
    others = sorted((index for index in range(len(operations)) if index != chosen), key=lambda index: -mean[index])
    if not others:
        return record | {"undecided": False}
    leads = pi[:, [chosen]] - pi[:, others]  # [S, O - 1], over the likeliest first
    margins = leads.mean(axis=0)
    errors = leads.std(axis=0, ddof=1) / math.sqrt(seeds) if seeds > 1 else np.zeros(len(others))
    critical = stdtrit(seeds - 1, 1 - SIGNIFICANCE) if seeds > 1 else 0.0  # standard errors, by Student's t
    doubtful = np.abs(margins) < np.maximum(MARGIN, critical * errors)
    record |= {"margin": round(float(margins[0]), 6), "second": operations[others[0]]}
    if seeds > 1:
        record["margin_error"] = round(float(errors[0]), 6)
    if not doubtful.any() or (margins[0] < 0 and not doubtful[0]):
        return record | {"undecided": False}
    return record | {"undecided": True, "as_good": operations[others[int(doubtful.argmax())]]}


def confidence_warnings(pattern: dict) -> list[str]:
    """One message for each undecided block of a pattern file."""
    messages = []
    for number, record in enumerate(pattern["confidence"], start=1):
        if not record["undecided"]:
            continue
        first, second = sorted([record["operation"], record["as_good"]], key=lambda name: -record["pi"][name])
        message = undecided_message(number, first, second, record["pi"][first] - record["pi"][second])
        error = record.get("margin_error", 0.0)
        if error > 0 and record["as_good"] == record["second"]:
            message += f" (standard error of the lead over the seeds: {error:.3f})"
        messages.append(message)
    return messages


@dataclass(frozen=True)
class Choice:
    """The chosen pattern. budget: a ratio to the reference's cost; None: none. runs: with the pi of this budget.

    trials: of choice.yaml. trial: the run folder of the pattern's trial, which retrain.py continues; None: it had none.
    """

    blocks: list[str]
    budget: float | None
    runs: list[SearchRun]
    trials: list[dict] = field(default_factory=list)
    trial: Path | None = None


def pattern_record(choice: Choice, costs: CostTable) -> dict:
    """The content of the pattern file. The certainty is that of patterns drawn from pi within the budget of costs."""
    first, blocks = choice.runs[0], choice.blocks
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
    origin |= {"latency_budget": choice.budget, "trials": choice.trials, "trial": choice.trial and str(choice.trial)}
    shape = shape_of(first.options)
    if counts := costs.counts_bytes(first.options["mixture.size"], blocks):
        shape["counts_bytes"] = counts
    return {
        "format": FORMAT,
        **shape,
        "blocks": blocks,
        "sizes": {name: resolve_block(name, first.config.shape)[1] for name in dict.fromkeys(blocks)},
        "confidence": confidence,
        "flops_ratio_to_interleaved": round(first.flops.ratio_to_interleaved(blocks), 4),
        "model": first.content.get("model"),
        "data": {key: first.content.get("data", {}).get(key) for key in ("source", "tokenizer", "vocab_size")},
        "derived_from": {key: value for key, value in origin.items() if value},
    }
