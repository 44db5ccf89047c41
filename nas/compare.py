"""Compare a searched pattern with baselines: train all under one recipe with several seeds, and test the differences.

The command searches, derives the searched pattern, draws random patterns of its latency, and trains every pattern. It
writes comparison.csv, .md and .png and claims.yaml to RUN_DIR. Repeat it after an interruption, or with more seeds or
patterns: finished runs are not repeated. Paths in COMPARISON.yaml are relative to that file. Only `retrain` is
required. The values below are examples unless a comment calls them the default:

  format: par-comparison/1
  retrain: retrain.yaml      # the recipe that trains every pattern; its seed is ignored
  search: search.yaml        # default: no search; compares the given patterns only
  search_seeds: [1]          # default [1]; gumbel: several average pi; fixed once a run has begun
  budgets: [0.5, 0.65]       # default []; latency budgets; a searched pattern for each, such as searched-0.65.
                             # Without budgets there is one, searched, which derive.py derives without a budget
  patterns: [interleaved]    # the default; rules of docs/compare.md by name, such as sandwich and par, or pattern files
  random: 5                  # default 0; patterns drawn at the measured latency of each searched pattern, within 3%:
                             # random-1 and so on for searched, random-0.65-1 and so on for searched-0.65
  seeds: [1, 2, 3]           # the default; the seeds of each pattern's training
  random_seeds: [1]          # default: seeds; the seeds of the random patterns' trainings

Patterns by rule have model.blocks blocks. docs/compare.md explains the claims and their verdicts.
"""

import argparse
from pathlib import Path

from nas.comparison.spec import given_contenders, read_settings
from nas.core.config_loading import load_config
from nas.core.errors import InputError, Interrupted, RunError, interrupt_on_signals, run_command
from nas.retraining.tasks import unfinished

WORKERS = "runs at a time, each on the next GPU (default: one for each GPU); on the CPU 2 or more need train.threads"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nas.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options = "options of both searches and trainings, except seed"
    parser.add_argument("comparison", metavar="COMPARISON.yaml", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=options)
    parser.add_argument("--run", required=True, metavar="RUN_DIR", type=Path, help="folder of the comparison")
    parser.add_argument("--workers", type=int, metavar="N", help=WORKERS)
    parser.add_argument("--random", type=int, metavar="N", help="replaces random in the file")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="replaces seeds in the file")
    parser.add_argument("--report", action="store_true", help="train nothing; report the finished runs")
    arguments = parser.parse_intermixed_args()
    if arguments.workers is not None and arguments.workers < 1:
        raise InputError(f"--workers {arguments.workers} must be at least 1")
    for override in arguments.overrides:
        if override.startswith("seed="):
            raise InputError(f"{override}: every pattern is trained with several seeds; give them with --seeds")
    return arguments


def open_comparison(arguments: argparse.Namespace):
    """The Comparison in RUN_DIR. Raises InputError if an option is invalid or differs from that of the run."""
    changed = {key: getattr(arguments, key) for key in ("random", "seeds") if getattr(arguments, key) is not None}
    settings = read_settings(arguments.comparison, changed)
    recipe = load_config(settings.retrain, [*arguments.overrides, "seed=1"])
    search = load_config(settings.search, arguments.overrides) if settings.search else None
    given = given_contenders(settings, arguments.comparison, (search or recipe).model.blocks, recipe)
    # Imported here because torch is slow to import, and --help and the errors above do not need it.
    from nas.comparison.comparison import Comparison
    from nas.comparison.runner import choose_workers

    if not arguments.report:
        arguments.workers, arguments.gpus = choose_workers(recipe, arguments.workers)
    return Comparison(settings, given, recipe, search, arguments.run, arguments.overrides)


def report(comparison, measure: bool) -> None:
    """Write and print the table, the plot and the claims of the finished runs."""
    from nas.reporting.comparison_report import write_report

    tasks = comparison.training_tasks(comparison.known_contenders())
    missing = [task.name for task in unfinished(tasks)]
    if len(missing) < len(tasks):
        if measure:
            comparison.measure_latencies()
        write_report(comparison.path)
    if missing:
        print(f"NOTICE: {len(missing)} of {len(tasks)} runs have not finished: {', '.join(missing)}")


def main() -> None:
    arguments = parse_arguments()
    comparison, failed = open_comparison(arguments), {}
    if arguments.report and not comparison.run.begun:
        raise InputError(f"--report: {arguments.run} holds no comparison yet; leave --report out to begin one")
    interrupt_on_signals()
    try:
        if not arguments.report:
            from nas.comparison.runner import run_stages

            comparison.start(arguments.comparison.read_text(encoding="utf-8"))
            failed = run_stages(comparison, arguments.workers, arguments.gpus)
        report(comparison, measure=not arguments.report)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; progress is saved: repeat the command to continue") from None
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise RunError(f"{len(failed)} of the runs failed; the others are reported: {reasons}")


if __name__ == "__main__":
    run_command(main)
