"""The choice of a pattern, by trials or by pi, its latency at the settings of the search, and what derive.py prints."""

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from nas.core.config_loading import load_config
from nas.core.errors import InputError, RunError
from nas.core.pattern import abbreviate, abbreviate_network, kind_of
from nas.core.run_folder import CONFIG, LATENCY, TRIALS, check_text, data_digests
from nas.costs.budget import likeliest_pattern
from nas.costs.cost_table import CostTable, for_text, latency_report, least_ratio
from nas.costs.flops import with_latency
from nas.costs.measurement import measure_pattern
from nas.data.corpus import Corpus, prepare
from nas.derivation.runs import Choice, SearchRun, confidence_warnings
from nas.search.candidate_costs import candidates_of, find_costs
from nas.search.network_search import block_probabilities
from nas.search.space import NetworkCosts, cheapest, first_candidates, read_network, within_budget
from nas.search.strategy import with_neighbours
from nas.search.surrogate import Point, Surrogate, Text, prior_for
from nas.training.device import set_up_device

TARGET_TOLERANCE = 0.1  # relative distance from the target of search.method=gumbel that needs no notice


def tried_choice(run: SearchRun, content: dict, costs: CostTable, budget: float | None) -> Choice:
    """The network that trials chose or, for another budget, the predicted best of its sizes. content: choice.yaml."""
    own, trials = content["network"], content["trials"]
    if budget is None or (math.isclose(budget, run.budget or 0) and costs.unit == run.costs.unit):
        return Choice(read_network(own).pattern, budget, [run], trials=trials, trial=Path(content["trial"]["folder"]))
    shape, config = (own["vocab_size"], own["d_model"]), load_config(run.path / CONFIG, [])
    tried = [read_network(one) for one in trials]
    limit = budget * costs.reference(len(run.pi))
    affordable = within_budget(costs, limit)
    fitting = [one for one in tried if one[:2] == shape and affordable(one.blocks)]
    networks = list(dict.fromkeys([*first_candidates(config, {shape: costs}, limit), *fitting]))
    if not networks:
        least = least_ratio(cheapest(config, costs) / costs.reference(len(run.pi)))
        raise InputError(f"no network is within {budget:.4g} of the reference's cost; give at least {least}")
    points = [Point(one, trial["share"], trial["bits_per_byte"]) for one, trial in zip(tried, trials, strict=True)]
    known = config.model.d_ffn, prior_for(config), Text(**content["text"])
    surrogate = Surrogate(points, [*networks, *tried], *known)
    networks = with_neighbours(networks, surrogate, config, {shape: costs}, limit)
    pi = block_probabilities(networks, surrogate.probability_best(networks), run.operations, len(run.pi))
    best = networks[int(np.argmin(surrogate.predict(networks)))]
    return Choice(best.pattern, budget, [replace(run, pi=pi)], trials=trials)


def likeliest_choice(runs: list[SearchRun], costs: CostTable, budget: float | None) -> Choice:
    """The likeliest pattern by pi, averaged over the runs."""
    pi = np.mean([run.pi for run in runs], axis=0)
    return Choice(likeliest_pattern(pi, runs[0].operations, costs, budget), budget, runs)


class RunLatency:
    """The table of a search run, which predicts patterns, and measurements, if its text and device are these here."""

    def __init__(self, run: Path):
        self.config, self.corpus = load_config(run / CONFIG, []), None
        self.runtime = set_up_device(self.config.seed, self.config.train)
        self.measured: dict[tuple[str, ...], dict] = {}
        sizes, file = (self.config.data.vocab_size, self.config.model.d_model), run / LATENCY
        try:
            corpus = Corpus(prepare(self.config.data))
            check_text(run, data_digests(corpus.meta))
            trials = run / TRIALS / CONFIG  # its values of auto are for any size
            config = load_config(trials if trials.exists() else run / CONFIG, [])
            if not config.search.latency.in_milliseconds:
                config = with_latency(config, source="measured")
            # They are measured again if they are from another device or for other sizes.
            costs = find_costs(candidates_of(config, sizes[0] or corpus.vocab_size, sizes[1]), file, self.runtime)
            self.table = costs.table(*sizes)
            self.corpus = None if self.config.search.latency.table else corpus
        except (InputError, RunError) as error:
            print(f"NOTICE: latencies come from {file} and are not measured again: {error}")
            self.table = NetworkCosts.read(file).table(*sizes)

    def of(self, pattern: list[str]) -> dict:
        """Predicted and measured latency, and the conditions of both, in the form of pattern files."""
        key = tuple(pattern)
        if key not in self.measured:
            latency = {
                "predicted_ms_per_1000_bytes": self.table.cost(pattern),
                "predicted_ratio_to_interleaved": self.table.ratio_to_interleaved(pattern),
            }
            if self.corpus:
                latency = measure_pattern(pattern, self.config, self.corpus, self.runtime, latency)
            self.measured[key] = latency | {"holds_for": self.table.holds_for}
        return dict(self.measured[key])


def print_choice(choice: Choice, pattern: dict, costs: CostTable) -> None:
    print(confidence_table(pattern))
    for warning in confidence_warnings(pattern):
        print(f"WARNING: {warning}")
    if len(choice.runs) > 1:
        patterns = [likeliest_pattern(run.pi, run.operations, costs, choice.budget) for run in choice.runs]
        for run, likeliest in zip(choice.runs, patterns, strict=True):
            print(f"{run.path}: {abbreviate(likeliest)}")
        differing = [sum(a != b for a, b in zip(one, two, strict=True)) for one, two in combinations(patterns, 2)]
        print(f"{np.mean(differing):.1f} of {len(choice.runs[0].pi)} blocks differ between two of these patterns")
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
    if record["undecided"]:
        return f"undecided: {record['as_good']} as good"
    if record["margin"] < 0:
        return f"pi prefers {record['second']}"
    return "decided" if "agreement" in record else ""


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
        cells = [
            f"{pattern['derived_from']['latency_budget']:.4g}",
            abbreviate(blocks),
            str(sum(kind_of(name).reaches_far for name in blocks)),
            f"{costs.ratio(blocks):.3f}",
            *(f"{latency[key]:.3f}" if key in latency else "" for key in ("ms_per_1000_bytes", "ratio_to_interleaved")),
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
