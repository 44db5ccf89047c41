"""Compare a searched pattern with baselines: train all under one recipe with several seeds, and test the differences.

The command searches, derives the searched pattern, draws random patterns of its latency, and trains every pattern. It
writes comparison.csv, .md and .png and claims.yaml to RUN_DIR. Repeat it after an interruption, or with more seeds or
patterns: finished runs are not repeated. Paths in COMPARISON.yaml are relative to that file. Only `retrain` is
required. The values below are examples unless a comment calls them the default:

  format: par-comparison/1
  retrain: retrain.yaml      # the recipe that trains every pattern; its seed is ignored
  search: search.yaml        # default: no search; compares the given patterns only
  search_seeds: [1]          # default [1]; several seeds average pi; fixed once a run has begun
  budgets: [0.5, 0.65]       # default []; latency budgets; a searched pattern for each, such as searched-0.65.
                             # Without budgets there is one, searched, which derive.py derives without a budget
  trials: 3000               # default 0: no trials; steps of derive.py --trials, half of the recipe's steps or more
  patterns: [interleaved]    # the default; from interleaved, sandwich, par, attention-only, dense-only, pattern files,
                             # and parameters: the most parameters within the smallest searched latency, predicted
  random: 5                  # default 0; patterns drawn at the measured latency of each searched pattern, within 3%:
                             # random-1 and so on for searched, random-0.65-1 and so on for searched-0.65
  seeds: [1, 2, 3]           # the default; the seeds of each pattern's training
  random_seeds: [1]          # default: seeds; the seeds of the random patterns' trainings

Patterns by rule have model.blocks blocks. A claim about quality is `yes` or `NO` if its t-test has p < 0.05, and else
`not shown`. A claim without a test, such as latency, is `yes` or `NO`. docs/compare.md explains each claim.
"""

import argparse
import os
import signal
from pathlib import Path

from nas.comparison.spec import MATCHED, UNMATCHED, contenders_file, given_contenders, read_settings
from nas.comparison.tasks import unfinished
from nas.core.config_loading import load_config
from nas.core.errors import InputError, Interrupted, RunError, run_command

HELP = {
    "overrides": "options of both searches and trainings, except seed",
    "--run": "folder of the comparison",
    "--workers": "number of runs at a time, each on the next GPU (default: the number of GPUs, or 1 without GPUs); "
    "on the CPU more than 1 needs train.threads",
    "--random": "number of random patterns for each searched pattern; replaces the value in the file",
    "--seeds": "seeds of the trainings; replaces the value in the file",
    "--match-parameters": "train each pattern at the d_ffn that gives it the interleaved pattern's parameters; writes "
    "comparison-matched.csv and so on",
    "--report": "train nothing; report the finished runs",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nas.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", metavar="COMPARISON.yaml", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=HELP["overrides"])
    parser.add_argument("--run", required=True, metavar="RUN_DIR", type=Path, help=HELP["--run"])
    parser.add_argument("--workers", type=int, metavar="N", help=HELP["--workers"])
    parser.add_argument("--random", type=int, metavar="N", help=HELP["--random"])
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help=HELP["--seeds"])
    parser.add_argument("--match-parameters", action="store_true", help=HELP["--match-parameters"])
    parser.add_argument("--report", action="store_true", help=HELP["--report"])
    arguments = parser.parse_intermixed_args()
    if arguments.workers is not None and arguments.workers < 1:
        raise InputError(f"--workers {arguments.workers} must be at least 1")
    for override in arguments.overrides:
        if override.startswith("seed="):
            raise InputError(f"{override}: every pattern is trained with several seeds; give them with --seeds")
    return arguments


def check_threads(threads: int | None, workers: int) -> None:
    """Raises InputError if several workers lack a number of threads; prints a notice if they exceed the cores."""
    cores = os.cpu_count() or 1
    if workers > 1 and threads is None:
        share = max(1, cores // workers)
        raise InputError(f"--workers {workers} needs a number of threads for each run: add train.threads={share}")
    if (threads or 1) * workers > cores:
        print(f"NOTICE: {workers} workers of {threads} threads share {cores} cores and slow each other down")


def open_comparison(arguments: argparse.Namespace):
    """The Comparison in RUN_DIR. Raises InputError if an option is invalid or differs from that of the run."""
    changed = {key: getattr(arguments, key) for key in ("random", "seeds") if getattr(arguments, key) is not None}
    settings = read_settings(arguments.comparison, changed)
    recipe = load_config(settings.retrain, [*arguments.overrides, "seed=1"])
    search = load_config(settings.search, arguments.overrides) if settings.search else None
    given = given_contenders(settings, arguments.comparison, (search or recipe).model.blocks)
    # Imported here because torch is slow to import, and --help and the errors above do not need it.
    from nas.comparison.comparison import Comparison
    from nas.comparison.runner import visible_gpus

    arguments.gpus = visible_gpus(recipe)
    arguments.workers = arguments.workers or max(1, len(arguments.gpus))
    if not (arguments.gpus or arguments.report):
        check_threads(recipe.train.threads, arguments.workers)
    return Comparison(settings, given, recipe, search, arguments.run, arguments.overrides)


def report(comparison, suffix: str, measure: bool) -> None:
    """Write and print the table, the plot and the claims of the finished runs."""
    from nas.comparison.runner import find_contenders, record_contenders

    contenders, folder = find_contenders(comparison, suffix), comparison.path
    matched = {contender.name for contender in contenders}
    for contender in comparison.known_contenders():
        if contender.name not in matched:
            print(f"NOTICE: no d_ffn gives {contender.name} the interleaved pattern's parameters; it is left out")
    tasks = comparison.training_tasks(contenders)
    missing = [task.name for task in unfinished(tasks)]
    if len(missing) < len(tasks):
        record_contenders(comparison, contenders, suffix, measure)
        write_report(folder, suffix)
    if missing:
        print(f"NOTICE: {len(missing)} of {len(tasks)} runs have not finished: {', '.join(missing)}")


def write_report(folder: Path, suffix: str) -> None:
    from nas.comparison.claims import CLAIMS_FORMAT, claims_markdown, make_claims, training_warning
    from nas.comparison.results import csv_text, markdown, read_results
    from nas.core.files import write_text, write_yaml
    from nas.reporting.comparison_figures import comparison_plot

    results = read_results(contenders_file(folder, suffix))
    claims = make_claims(results)
    write_text(folder / f"comparison{suffix}.csv", csv_text(results))
    text = f"{markdown(results)}\n{claims_markdown(claims, training_warning(results))}"
    write_text(folder / f"comparison{suffix}.md", text)
    comparison_plot(results, folder / f"comparison{suffix}.png")
    write_yaml(folder / f"claims{suffix}.yaml", {"format": CLAIMS_FORMAT, "claims": claims})
    print(text)
    print(f"written to {folder}: comparison{suffix}.csv, .md, .png and claims{suffix}.yaml")


def main() -> None:
    arguments = parse_arguments()
    comparison, suffix = open_comparison(arguments), MATCHED if arguments.match_parameters else UNMATCHED
    if arguments.report and not comparison.run.begun:
        raise InputError(f"--report: {arguments.run} holds no comparison yet; leave --report out to begin one")
    text, failed = arguments.comparison.read_text(encoding="utf-8"), {}
    for number in (signal.SIGINT, signal.SIGTERM):  # runs save on both, also in a job that starts with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        if not arguments.report:
            from nas.comparison.runner import run_stages

            comparison.start(text)
            failed = run_stages(comparison, suffix, arguments.workers, arguments.gpus)
        report(comparison, suffix, measure=not arguments.report)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; progress is saved: repeat the command to continue") from None
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise RunError(f"{len(failed)} of the runs failed; the others are reported: {reasons}")


if __name__ == "__main__":
    run_command(main)
