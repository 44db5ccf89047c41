"""Compare networks: train all under one recipe with several seeds, and test the first one against each other.

The command writes comparison.csv, .md and .png and claims.yaml to RUN_DIR. Repeat it after an interruption, or with
more seeds or patterns: finished runs are not repeated. Paths in COMPARISON.yaml are relative to that file. The values
below are examples unless a comment calls them the default:

  format: par-comparison/2
  retrain: retrain.yaml      # the recipe that trains every network; its seed is ignored
  patterns: [found.yaml, interleaved]    # pattern files, or rules of docs/compare.md, such as sandwich and par
  seeds: [1, 2, 3]           # the default; the seeds of each network's training
  once: [random-1.yaml]      # default []; further patterns, which are trained with the first seed only
  margin: 0.01               # the default; a difference up to this share is no worse

Rules have model.blocks blocks. A pattern file may have its own vocabulary, width and number of blocks.
docs/compare.md explains the test and the verdicts.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from nas.comparison.spec import read_contenders, read_settings
from nas.core.config_loading import load_config
from nas.core.errors import InputError, Interrupted, RunError, interrupt_on_signals, run_command
from nas.jobs.tasks import run_tasks, unfinished


def parse_arguments() -> Namespace:
    parser = ArgumentParser("python -m nas.compare", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("comparison", metavar="COMPARISON.yaml", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="options of the trainings, but seed")
    parser.add_argument("--run", required=True, metavar="RUN_DIR", type=Path, help="folder of the comparison")
    parser.add_argument("--seeds", type=seed_of, nargs="+", metavar="SEED", help="replaces seeds in the file")
    parser.add_argument("--report", action="store_true", help="train nothing; report the finished runs")
    arguments = parser.parse_intermixed_args()
    for override in arguments.overrides:
        if override.startswith("seed="):
            raise InputError(f"{override}: every network is trained with several seeds; give them with --seeds")
    return arguments


def seed_of(text: str) -> int:
    if not text.isdecimal():
        moved = "; section.key=value comes before --seeds" if "=" in text else ""
        raise ArgumentTypeError(f"{text!r} is not a whole number from 0{moved}")
    return int(text)


def open_comparison(arguments: Namespace):
    """The Comparison in RUN_DIR. Raises InputError if an option is invalid or differs from that of the run."""
    settings = read_settings(arguments.comparison, {} if arguments.seeds is None else {"seeds": arguments.seeds})
    recipe = load_config(settings.retrain, [*arguments.overrides, "seed=1"])
    contenders = read_contenders(settings, arguments.comparison, arguments.overrides)
    # Imported here because torch is slow to import, and --help and the errors above do not need it.
    from nas.comparison.comparison import Comparison

    return Comparison(settings, contenders, recipe, arguments.run, arguments.overrides)


def report(comparison, measure: bool) -> None:
    """Write and print the table, the plot and the claims of the finished runs."""
    from nas.reporting.comparison_report import write_report

    tasks = comparison.tasks()
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
    if arguments.report and not comparison.run.recorded:
        raise InputError(f"--report: {arguments.run} holds no comparison yet; leave --report out to begin one")
    interrupt_on_signals()
    try:
        if not arguments.report:
            failed = run_tasks(comparison.tasks(), comparison.start())
        report(comparison, measure=not arguments.report)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; progress is saved: repeat the command to continue") from None
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise RunError(f"{len(failed)} of the runs failed; the others are reported: {reasons}")


if __name__ == "__main__":
    run_command(main)
