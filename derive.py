"""Stage 2: derive one fixed layer pattern from the probabilities pi of a search, and show how certain it is.

Several RUN_DIRs must be seeds of one search. pi is averaged over them, and the table shows for each block the
share of the seeds that agree with the choice.

With --blocks, the command makes a pattern for a deeper model from a pattern file instead.
"""

import argparse
from functools import partial
from pathlib import Path

from nas.core.errors import InputError, run_command
from nas.core.files import write_text
from nas.core.pattern import ATTENDING, RESIZINGS, abbreviate, network, read_pattern
from nas.core.run_folder import LATENCY, PATTERN
from nas.costs.budget import likeliest_path, read_budgets
from nas.costs.cost_table import CostTable, latency_report
from nas.derivation.choosing import AUTO, choose, judge, plan
from nas.derivation.confidence import confidence_warnings
from nas.derivation.pattern_record import (
    SHARED_WEIGHTS_TIE,
    TRIALS_TIE,
    Choice,
    candidates_table,
    confidence_table,
    pareto_table,
    pattern_record,
    perturbation_table,
    refuse_existing,
    resized_record,
    write_patterns,
)
from nas.derivation.runs import (
    UNIFORM_WEIGHTS,
    SearchRun,
    check_seeds,
    costs_of_origin,
    describe_spread,
    read_run,
    target_notice,
)

METHODS = ("argmax", "budget", "relearn", "perturbation")

HELP = {
    "runs": "the --run folder of a search; several folders must be seeds of one search; with --blocks: a pattern file",
    "--out": "output file (default: RUN_DIR/pattern.yaml; for several seeds pattern-of-SEEDS-seeds.yaml in the first)",
    "--method": "argmax: the likeliest operations. budget: the highest sum of log pi within --latency-budget. relearn: "
    "the same, with pi learned anew for each budget (default for other budgets than the search's, if the search was "
    "sequential). perturbation: the operations whose removal hurts the SuperNet most on valid",
    "--latency-budget": "highest cost, as a ratio R to the interleaved pattern's: in milliseconds if the run has a "
    "latency.yaml (see python -m nas.latency), else in FLOPs",
    "--pareto": "derive a pattern for each of these budgets into PATTERN-R.yaml, and a table into PATTERN-pareto.md",
    "--trials": "train the pattern of pi, the best patterns with fewer attention blocks, and rules from the literature "
    "from scratch for STEPS steps each (default: half of search.retrain_steps), and derive the best on valid; "
    "give it after RUN_DIR",
    "--blocks": "number of blocks of a deeper model; needs --by. The output is PATTERN-N-BY.yaml, unless --out sets it",
    "--by": "stretch: each block keeps its place in the depth. stack: the pattern is repeated",
    "--force": "replace existing pattern files that differ",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR|PATTERN.yaml", nargs="+", type=Path, help=HELP["runs"])
    parser.add_argument("--out", metavar="PATTERN.yaml", type=Path, help=HELP["--out"])
    parser.add_argument("--method", choices=METHODS, help=HELP["--method"])
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument("--latency-budget", metavar="R", help=HELP["--latency-budget"])
    budgets.add_argument("--pareto", metavar="R,R,...", help=HELP["--pareto"])
    parser.add_argument("--trials", metavar="STEPS", type=int, nargs="?", const=AUTO, help=HELP["--trials"])
    parser.add_argument("--blocks", metavar="N", type=int, help=HELP["--blocks"])
    parser.add_argument("--by", choices=tuple(RESIZINGS), help=HELP["--by"])
    parser.add_argument("--force", action="store_true", help=HELP["--force"])
    arguments = parser.parse_args()
    given = arguments.pareto if arguments.latency_budget is None else arguments.latency_budget
    arguments.budgets = [] if given is None else read_budgets(given)
    check_arguments(arguments)
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises InputError if the options do not fit together."""
    method, budgets = arguments.method, arguments.budgets
    if method in ("budget", "relearn") and not budgets:
        raise InputError(f"--method {method} needs --latency-budget or --pareto")
    if method in ("argmax", "perturbation") and budgets:
        raise InputError(f"--method {method} takes no budget; use --method relearn or budget")
    if arguments.latency_budget and len(budgets) > 1:
        raise InputError(f"--latency-budget {arguments.latency_budget} must be one ratio; --pareto takes several")
    if method == "perturbation" and arguments.trials:
        raise InputError("--method perturbation takes no --trials")
    if arguments.trials is not None and arguments.trials < 1:
        raise InputError(f"--trials {arguments.trials} must be at least 1")
    if (arguments.blocks is None) != (arguments.by is None):
        raise InputError(f"--blocks and --by belong together: --blocks 24 --by {' or '.join(RESIZINGS)}")
    files = [path for path in arguments.runs if path.is_file()]
    if arguments.blocks is not None and (method or budgets or arguments.trials or len(arguments.runs) > 1):
        raise InputError("--blocks takes one pattern file, --by, --out and --force only")
    if files and arguments.blocks is None:
        raise InputError(
            f"{files[0]} is a file; give the --run folder of a search, or --blocks N --by {'|'.join(RESIZINGS)}"
        )


def main() -> None:
    arguments = parse_arguments()
    if arguments.blocks is not None:
        resize(arguments.runs[0], arguments)
        return
    runs = [read_run(path) for path in arguments.runs]
    for notice in check_seeds(runs):
        print(f"NOTICE: {notice}")
    latency = measured_latency(runs)
    method, budgets, costs = plan(
        arguments.method, arguments.budgets, runs, latency.table if latency else runs[0].flops
    )

    can_judge = method != "perturbation" and all(run.can_evaluate_patterns for run in runs)
    if arguments.trials and not can_judge:
        raise InputError(f"--trials needs {UNIFORM_WEIGHTS.format('each run')}")
    out = arguments.out or runs[0].path / (PATTERN if len(runs) == 1 else f"pattern-of-{len(runs)}-seeds.yaml")
    files = [out.with_stem(f"{out.stem}-{budget:g}") for budget in budgets] if arguments.pareto else [out]
    if (arguments.trials or method == "relearn") and not arguments.force:
        refuse_existing(files)
    choices = choose(method, runs, costs, budgets)
    if can_judge:
        choices = judge(choices, runs, costs, arguments.trials)
    patterns = [pattern_record(choice, runs, method, costs) for choice in choices]
    if latency:
        for pattern in patterns:
            pattern["latency"] = latency.of(pattern["blocks"])

    write_patterns(dict(zip(files, patterns, strict=True)), arguments.force)
    if arguments.pareto:
        table = pareto_table(patterns, costs.unit)
        write_text(out.with_name(f"{out.stem}-pareto.md"), table)
        print(table)
    for file, choice, pattern in zip(files, choices, patterns, strict=True):
        if arguments.pareto:
            print(f"\nbudget {choice.budget:g}:")
        print_candidates(pattern)
        if choice.from_pi:
            print_confidence(pattern)
            print_spread(choice, runs, costs)
        print_pattern(pattern)
        print(f"written to {file}")
    print_notices(runs, None if budgets else target_notice(runs[0], costs.ratio(patterns[0]["blocks"])))


def resize(file: Path, arguments: argparse.Namespace) -> None:
    """Write the pattern of a file with more blocks, and print what that changes."""
    content, count = read_pattern(file), arguments.blocks
    record = resized_record(file, content, count, arguments.by)
    out = arguments.out or file.with_stem(f"{file.stem}-{count}-{arguments.by}")
    write_patterns({out: record}, arguments.force)
    old, new = content["blocks"], record["blocks"]
    print(f"pattern {abbreviate(new)}: {count} blocks, {arguments.by}ed from the {len(old)} blocks {abbreviate(old)}")
    for name in dict.fromkeys(old):
        counts = (f"{part.count(name):>3} of {len(part)} ({part.count(name) / len(part):.0%})" for part in (old, new))
        print(f"{name:<16}{' -> '.join(counts)}")
    if costs := costs_of_origin(content):
        print(f"predicted from the costs of the search, in {costs.unit}, at its sizes:")
        for blocks in (old, new):
            ratio = f"{costs.ratio(blocks):.2f} of the interleaved pattern with {len(blocks)} blocks"
            print(f"{abbreviate(blocks)}: {costs.cost(blocks):.4g}, {ratio}")
    print(f"written to {out}\nnext: python retrain.py {out} CONFIG.yaml --run RUN_DIR")


def measured_latency(runs: list[SearchRun]):
    """The latencies of the first run that has a table in milliseconds; None if no run has one."""
    for run in runs:
        if (run.path / LATENCY).exists():
            from nas.costs.run_latency import RunLatency  # imported here because it needs torch

            return RunLatency(run.path)
    return None


def print_notices(runs: list[SearchRun], notice: str | None) -> None:
    """Print what limits the evidence of the runs, and another notice."""
    for run in runs:
        if run.step < run.of_steps:
            print(f"NOTICE: the last logged step of {run.path} is {run.step} of {run.of_steps}")
    if notice:
        print(f"NOTICE: {notice}")
    if len(runs) == 1:
        print("One run does not show whether other seeds agree: search with seed=2 and seed=3, and pass all RUN_DIRs.")


def print_confidence(pattern: dict) -> None:
    """Print how certain each block is, and warnings about blocks that are undecided."""
    if "removal" in pattern["confidence"][0]:
        print(perturbation_table(pattern))
    print(confidence_table(pattern))
    for warning in confidence_warnings(pattern):
        print(f"WARNING: {warning}")


def print_spread(choice: Choice, runs: list[SearchRun], costs: CostTable) -> None:
    """Print what each seed of pi and each SuperNet choose, if there are several."""
    runs = choice.runs or runs
    if len(runs) > 1 or len(runs[0].seed_pi) > 1:
        limits = {"costs": costs, "budget": choice.budget, "attentions": choice.attentions}
        choose = partial(likeliest_path, operations=runs[0].operations, **limits)
        print("\n".join(describe_spread(runs, choose)))


def print_candidates(pattern: dict) -> None:
    """Print the losses of the pattern of pi and of others that cost no more, and warnings."""
    origin = pattern["derived_from"]
    rules, chosen = origin.get("candidates"), origin.get("chosen", "pi")
    if rules:
        print(candidates_table(rules))
        if chosen != "pi":
            lead = rules["pi"]["trial_nll"] - rules[chosen]["trial_nll"]
            chance = ", which may be chance" if lead < TRIALS_TIE else ""
            print(f"NOTICE: {chosen!r} is derived: after trials it is {lead:.4f} ahead of the pattern of pi{chance}")
        best = min(rules, key=lambda name: rules[name]["nll"])
        if "trials" not in origin and rules[best]["nll"] < rules["pi"]["nll"] - SHARED_WEIGHTS_TIE:
            print(f"WARNING: the SuperNet prefers {best!r} to pi's pattern: use --trials or more search.logits_steps")


def print_pattern(pattern: dict) -> None:
    """Print the pattern and its costs, and a warning if it has no attention."""
    blocks = pattern["blocks"]
    same = f" (the network {network(blocks)}, because identity does nothing)" if "identity" in blocks else ""
    print(f"pattern {abbreviate(blocks)}: {', '.join(blocks)}{same}")
    print(f"{pattern['flops_ratio_to_interleaved']:.2f} of the interleaved pattern's FLOPs per token")
    for line in latency_report(pattern.get("latency") or {}):
        print(line)
    offered = [name for name in pattern["confidence"][0]["pi"] if name in ATTENDING]
    if offered and not set(offered) & set(blocks):
        print(
            "WARNING: the pattern has no attention, so it predicts from the last token alone: give a larger budget, "
            "or model.cutoffs=auto if embedding and output layer take most of the time"
        )


if __name__ == "__main__":
    run_command(main)
