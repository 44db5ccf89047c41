"""Stage 2: write the network that a search by trials chose, or the likeliest pattern of pi, and show how certain it is.

Several RUN_DIRs must be seeds of one search with search.method=gumbel. pi is averaged over them, and the table shows
for each block the share of the seeds that agree with the choice.
"""

import argparse
import shlex
from pathlib import Path

from nas.core.errors import InputError, run_command
from nas.core.files import check_parent, read_yaml, write_text, write_yaml
from nas.core.pattern import FORMAT
from nas.core.run_folder import CHOICE, LATENCY, PATTERN, PLAN
from nas.costs.budget import as_ratio, read_budgets
from nas.derivation.runs import check_seeds, pattern_record, read_run

HELP = {
    "runs": "the --run folder of a search; several folders must be seeds of one search",
    "--out": "output file (default: RUN_DIR/pattern.yaml; for several seeds pattern-of-SEEDS-seeds.yaml in the first)",
    "--latency-budget": "highest cost, as a ratio R to the reference's: in milliseconds if the run has a latency.yaml "
    "(see python -m nas.latency), else in FLOPs; or a time for 1,000 bytes of text, such as 2.5ms. For other budgets "
    "than the search's, predictions from the trials decide, or pi",
    "--pareto": "derive a pattern for each of these budgets into PATTERN-R.yaml, and a table into PATTERN-pareto.md",
    "--force": "replace existing pattern files",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help=HELP["runs"])
    parser.add_argument("--out", metavar="PATTERN.yaml", type=Path, help=HELP["--out"])
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument("--latency-budget", metavar="R", help=HELP["--latency-budget"])
    budgets.add_argument("--pareto", metavar="R,R,...", help=HELP["--pareto"])
    parser.add_argument("--force", action="store_true", help=HELP["--force"])
    arguments = parser.parse_args()
    given = arguments.pareto if arguments.latency_budget is None else arguments.latency_budget
    arguments.budgets = [] if given is None else read_budgets(given)
    if arguments.latency_budget and len(arguments.budgets) > 1:
        raise InputError(f"--latency-budget {arguments.latency_budget} must be one ratio; --pareto takes several")
    return arguments


def check_files(files: list[Path], force: bool) -> None:
    """Raises InputError if a pattern cannot be written, before minutes are spent on it."""
    check_parent(files[0])
    for file in filter(Path.exists, files):
        if not force:
            raise InputError(f"{file} exists; give another file with --out, or replace it with --force")
        if not file.is_file() or (file.stat().st_size and FORMAT.encode() not in file.read_bytes()):
            raise InputError(f"{file} is not a pattern file; --force replaces only those; give another file with --out")


def main() -> None:
    arguments = parse_arguments()
    runs = [read_run(path) for path in arguments.runs]
    for notice in check_seeds(runs):
        print(f"NOTICE: {notice}")
    out = arguments.out or runs[0].path / (PATTERN if len(runs) == 1 else f"pattern-of-{len(runs)}-seeds.yaml")
    names = [str(budget).removesuffix(".0") for budget in arguments.budgets]
    files = [out.with_stem(f"{out.stem}-{name}") for name in names] if arguments.pareto else [out]
    check_files(files, arguments.force)

    from nas.derivation import selection  # only now, because it needs torch

    measured = next((run.path for run in runs if (run.path / LATENCY).exists()), None)
    latency = selection.RunLatency(measured) if measured else None
    if arguments.budgets:
        costs = latency.table if latency else runs[0].flops
        budgets = [as_ratio(budget, costs, len(runs[0].pi)) for budget in arguments.budgets]
    else:
        budgets, costs = [runs[0].budget], runs[0].costs  # those of the search
    choice_file = runs[0].path / CHOICE
    tried = read_yaml(choice_file) if choice_file.exists() else None
    if runs[0].options["search.method"] == "trials" and not tried:
        raise InputError(f"{choice_file} is missing: continue the search with search.py --resume, which writes it")

    patterns = []
    if tried:
        from nas.reporting.figures import networks_figure

        picture = out.with_name(f"{out.stem}-networks.png")
        networks_figure(tried, [], picture)  # before the pattern, which marks the end of this stage
        print(f"written to {picture}")
        print(selection.trials_table(tried["trials"]))
    for budget, file in zip(budgets, files, strict=True):
        choice = (
            selection.tried_choice(runs[0], tried, costs, budget)
            if tried
            else selection.likeliest_choice(runs, costs, budget)
        )
        pattern = pattern_record(choice, costs)
        if latency:
            pattern["latency"] = latency.of(pattern["blocks"])
        write_yaml(file, pattern)
        patterns.append(pattern)
        if arguments.pareto:
            print(f"\nbudget {budget:.4g}:")
        selection.print_choice(choice, pattern, costs)
        print(f"written to {file}")
    if arguments.pareto:
        table = selection.pareto_table(patterns, costs)
        write_text(out.with_name(f"{out.stem}-pareto.md"), table)
        print(f"\n{table}")
    selection.print_notices(runs, budgets[0], costs.ratio(patterns[0]["blocks"]))
    if tried and not (runs[0].path.parent / PLAN).exists():
        given = files[0], runs[0].path / "config.yaml", "--run", f"{runs[0].path}-trained"
        print(f"next: python retrain.py {shlex.join(map(str, given))}")


if __name__ == "__main__":
    run_command(main)
