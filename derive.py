"""Stage 2: derive one fixed layer pattern from the probabilities pi of a search, and show how certain it is.

Several RUN_DIRs must be seeds of one search. pi is averaged over them, and the table shows for each block the
share of the seeds that agree with the choice.

With --blocks, the command makes a pattern for a deeper model from a pattern file instead.
"""

import argparse
from pathlib import Path

from nas.core.errors import InputError, run_command
from nas.core.files import write_text, write_yaml
from nas.core.pattern import RESIZINGS, read_pattern
from nas.core.run_folder import LATENCY, PATTERN
from nas.costs.budget import read_budgets
from nas.derivation.pattern_record import pattern_record, refuse_existing, resized_record
from nas.derivation.printing import pareto_table, print_choice, print_notices, print_resized
from nas.derivation.runs import check_seeds, read_run

AUTO = -1  # trials of enough steps

HELP = {
    "runs": "the --run folder of a search; several folders must be seeds of one search; with --blocks: a pattern file",
    "--out": "output file (default: RUN_DIR/pattern.yaml; for several seeds pattern-of-SEEDS-seeds.yaml in the first)",
    "--latency-budget": "highest cost, as a ratio R to the interleaved pattern's: in milliseconds if the run has a "
    "latency.yaml (see python -m nas.latency), else in FLOPs. pi is learned anew for other budgets than the search's",
    "--pareto": "derive a pattern for each of these budgets into PATTERN-R.yaml, and a table into PATTERN-pareto.md",
    "--trials": "train four candidates from scratch for STEPS steps each (default: half of search.retrain_steps), and "
    "derive the best on valid: pi's pattern, the best rule, and the best others; give it after RUN_DIR",
    "--blocks": "number of blocks of a deeper model; needs --by. The output is PATTERN-N-BY.yaml, unless --out sets it",
    "--by": "stretch: each block keeps its place in the depth. stack: the pattern is repeated",
    "--force": "replace existing pattern files",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR|PATTERN.yaml", nargs="+", type=Path, help=HELP["runs"])
    parser.add_argument("--out", metavar="PATTERN.yaml", type=Path, help=HELP["--out"])
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
    budgets, trials = arguments.budgets, arguments.trials
    if arguments.latency_budget and len(budgets) > 1:
        raise InputError(f"--latency-budget {arguments.latency_budget} must be one ratio; --pareto takes several")
    if trials is not None and trials != AUTO and trials < 1:
        raise InputError(f"--trials {trials} must be at least 1")
    if (arguments.blocks is None) != (arguments.by is None):
        raise InputError(f"--blocks and --by belong together: --blocks 24 --by {' or '.join(RESIZINGS)}")
    files = [path for path in arguments.runs if path.is_file()]
    if arguments.blocks is not None and (budgets or trials or len(arguments.runs) > 1):
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
    out = arguments.out or runs[0].path / (PATTERN if len(runs) == 1 else f"pattern-of-{len(runs)}-seeds.yaml")
    files = [out.with_stem(f"{out.stem}-{budget:g}") for budget in arguments.budgets] if arguments.pareto else [out]
    if not arguments.force:
        refuse_existing(files)

    from nas.costs.run_latency import RunLatency  # imported only now, because it needs torch
    from nas.derivation.choice import choose_pattern, likeliest_choice
    from nas.derivation.trials import Trials

    measured = next((run.path for run in runs if (run.path / LATENCY).exists()), None)
    latency = RunLatency(measured) if measured else None
    budgets, costs = arguments.budgets, latency.table if latency else runs[0].flops
    if not budgets:  # those of the search
        budgets, costs = [runs[0].budget], runs[0].costs
    can_judge = all(run.judges_patterns for run in runs)
    if arguments.trials and not can_judge:
        raise InputError("--trials needs searches with search.method=single_path, whose checkpoint.pt is in place")
    trials = Trials(runs[0], arguments.trials) if arguments.trials else None

    patterns = []
    for budget, file in zip(budgets, files, strict=True):
        choice = choose_pattern(runs, costs, budget, trials) if can_judge else likeliest_choice(runs, costs, budget)
        pattern = pattern_record(choice, costs)
        if latency:
            pattern["latency"] = latency.of(pattern["blocks"])
        write_yaml(file, pattern)
        patterns.append(pattern)
        if arguments.pareto:
            print(f"\nbudget {budget:g}:")
        print_choice(choice, pattern, costs)
        print(f"written to {file}")
    if arguments.pareto:
        table = pareto_table(patterns, costs.unit)
        write_text(out.with_name(f"{out.stem}-pareto.md"), table)
        print(f"\n{table}")
    print_notices(runs, costs.ratio(patterns[0]["blocks"]))


def resize(file: Path, arguments: argparse.Namespace) -> None:
    """Write the pattern of a file with more blocks, and print what that changes."""
    content, count = read_pattern(file), arguments.blocks
    record = resized_record(file, content, count, arguments.by)
    out = arguments.out or file.with_stem(f"{file.stem}-{count}-{arguments.by}")
    if not arguments.force:
        refuse_existing([out])
    write_yaml(out, record)
    print_resized(content["blocks"], record)
    print(f"written to {out}\nnext: python retrain.py {out} CONFIG.yaml --run RUN_DIR")


if __name__ == "__main__":
    run_command(main)
