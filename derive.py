"""Stage 2: turn the probabilities pi of a search into one fixed layer pattern, with how sure it is.

Several RUN_DIRs are seeds of one search: pi is averaged, and the table says for each block how far the seeds agree.
"""

import argparse
from itertools import zip_longest
from pathlib import Path

import numpy as np

from nas.core.errors import InputError, run_command
from nas.core.files import write_text
from nas.core.pattern import abbreviate
from nas.costs.table import latency_words
from nas.derivation.budget import choose_within, read_budgets
from nas.derivation.confidence import confidence_warnings
from nas.derivation.pattern_record import pattern_record, write_patterns
from nas.derivation.runs import check_seeds, read_run, target_notice
from nas.derivation.tables import confidence_table, pareto_table, removal_table

HELP = {
    "runs": "the --run folder of a search, or those of several seeds of it",
    "--out": "default: RUN_DIR/pattern.yaml; of several seeds pattern-of-SEEDS-seeds.yaml in the first",
    "--method": "argmax (default): the likeliest operations; budget: the greatest sum of log pi within "
    "--latency-budget; perturbation: the operations whose removal hurts the SuperNet most on valid; evolution: the "
    "pattern with which the SuperNet is best on valid, within the budget or else the search's target; for "
    "searches with search.weights_paths=uniform",
    "--latency-budget": "cost at most R times the interleaved pattern's: in milliseconds where the run has a "
    "latency.yaml (python -m nas.latency makes one), else in FLOPs",
    "--pareto": "a pattern for each of these budgets, in PATTERN-R.yaml, and a table in PATTERN-pareto.md",
    "--trials": "with evolution: train the K best for a fifth of the search's steps each, and take the best of those",
    "--force": "replace files that differ",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help=HELP["runs"])
    parser.add_argument("--out", metavar="PATTERN.yaml", type=Path, help=HELP["--out"])
    parser.add_argument("--method", choices=["argmax", "budget", "perturbation", "evolution"], help=HELP["--method"])
    parser.add_argument("--trials", type=int, default=0, metavar="K", help=HELP["--trials"])
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument("--latency-budget", metavar="R", help=HELP["--latency-budget"])
    budgets.add_argument("--pareto", metavar="R,R,...", help=HELP["--pareto"])
    parser.add_argument("--force", action="store_true", help=HELP["--force"])
    arguments = parser.parse_args()
    given = arguments.pareto if arguments.latency_budget is None else arguments.latency_budget
    arguments.budgets = [] if given is None else read_budgets(given)
    arguments.method = arguments.method or ("budget" if arguments.budgets else "argmax")
    if arguments.method != "evolution" and (arguments.method == "budget") != bool(arguments.budgets):
        needs = "needs --latency-budget or --pareto" if arguments.method == "budget" else "takes no budget"
        raise InputError(f"--method {arguments.method} {needs}")
    if arguments.trials < 0 or (arguments.trials and arguments.method != "evolution"):
        raise InputError(f"--trials {arguments.trials} must be a number of patterns, with --method evolution")
    if arguments.latency_budget and len(arguments.budgets) > 1:
        raise InputError(f"--latency-budget {given} must be one ratio; --pareto takes several")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    runs = [read_run(path) for path in arguments.runs]
    first, operations = runs[0], runs[0].operations
    for notice in check_seeds(runs):
        print(f"NOTICE: {notice}")

    latency, timed = None, [run.path for run in runs if (run.path / "latency.yaml").exists()]
    if timed:
        from nas.costs.latency import RunLatency

        latency = RunLatency(timed[0])
    costs = latency.table if latency else first.flops

    pi, losses, found = np.mean([run.pi for run in runs], axis=0), None, ()
    if arguments.method == "budget":
        paths = choose_within(arguments.budgets, pi, operations, costs)
    elif arguments.method == "perturbation":
        from nas.derivation.perturbation import choose_by_perturbation

        path, losses = choose_by_perturbation(arguments.runs)
        paths = [path]
    elif arguments.method == "evolution":
        from nas.derivation.evolution import choose_by_evolution

        print("judging whole patterns with the SuperNet's weights, for some minutes", flush=True)
        paths, found = zip(
            *(choose_by_evolution(runs, pi, costs, b, arguments.trials) for b in arguments.budgets or [None]),
            strict=True,
        )
    else:
        paths = [pi.argmax(axis=1).tolist()]

    patterns = {}
    for path, budget, how in zip_longest(paths, arguments.budgets or [None], found):
        pattern = patterns[budget] = pattern_record(path, runs, arguments.method, budget, losses)
        if how:
            pattern["derived_from"]["evolution"] = how
        if latency:
            pattern["latency"] = latency.of(pattern["blocks"])

    out = arguments.out or first.path / ("pattern.yaml" if len(runs) == 1 else f"pattern-of-{len(runs)}-seeds.yaml")
    names = {budget: out.with_stem(f"{out.stem}-{budget:g}") if arguments.pareto else out for budget in patterns}
    write_patterns({names[budget]: pattern for budget, pattern in patterns.items()}, arguments.force)
    if arguments.pareto:
        table = pareto_table(patterns, costs.unit)
        write_text(out.with_name(f"{out.stem}-pareto.md"), table)
        print(table)

    last = list(patterns.values())[-1]  # that of the greatest budget, where there are several
    if losses:
        print(removal_table(last))
    print(confidence_table(last))
    for run in runs:
        if run.step < run.of_steps:
            print(f"NOTICE: the last logged step of {run.path} is {run.step} of {run.of_steps}")
    for doubt in confidence_warnings(last):
        print(f"WARNING: {doubt}")
    if len(runs) == 1:
        print("one run cannot tell whether another would choose the same: search with seed=2, ... and give all of them")
    notice = target_notice(first, costs.ratio(last["blocks"])) if not arguments.budgets else None
    if notice:
        print(f"NOTICE: {notice}")
    for budget, pattern in patterns.items():
        tell(pattern)
        print(f"written to {names[budget]}")


def tell(pattern: dict) -> None:
    """What one looks for first in a pattern file."""
    print(f"pattern {abbreviate(pattern['blocks'])}: {', '.join(pattern['blocks'])}")
    if how := pattern["derived_from"].get("evolution"):
        print(
            f"of {how['judged']} patterns within {how['budget']:g} of the interleaved pattern's cost: nll "
            f"{how['nll']:.4f} on valid with the SuperNet's weights; pi's own choice has {how['nll_of_pi']:.4f}"
        )
        for letters, nll in how.get("trials", {}).items():
            print(f"  trained alone for {how['trial_steps']} steps, {letters} has {nll:.4f}")
    print(f"{pattern['flops_ratio_to_interleaved']:.2f} of the interleaved pattern's FLOPs per token")
    for words in latency_words(pattern.get("latency") or {}):
        print(words)


if __name__ == "__main__":
    run_command(main)
