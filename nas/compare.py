"""Is the searched pattern better? Train it and its rivals under one recipe, with several seeds, and see what comes out.

Searches, derives, draws random patterns of the searched one's latency, trains every pattern, and writes
comparison.csv, .md and .png and claims.yaml to RUN_DIR. Repeat the command after an interruption, or with more seeds or
patterns: what has finished is not done again. COMPARISON.yaml, whose paths are relative to it, holds:

  format: par-comparison/1
  retrain: retrain.yaml      # the recipe under which every pattern is trained
  search: search.yaml        # leave it out to compare given patterns alone
  search_seeds: [1]          # searches, from whose mean pi the searched pattern is derived
  pareto: [0.5, 0.65]        # a searched pattern for each of these budgets, too
  patterns: [interleaved]    # of interleaved, sandwich, par, attention-only, dense-only, parameters (the most
                             # parameters within the searched pattern's latency), and pattern files
  random: 5                  # patterns drawn at the searched pattern's latency
  seeds: [1, 2, 3]           # of the training of every pattern
"""

import argparse
import os
from pathlib import Path

from nas.comparison import given_contenders, read_settings
from nas.config import load_config
from nas.errors import InputError, RunError, run_command

HELP = {
    "overrides": "options for searches and training alike",
    "--run": "folder for all of it",
    "--workers": "runs at a time (default 1)",
    "--random": "instead of what the file says",
    "--seeds": "instead of what the file says",
    "--match-parameters": "train every pattern with d_ffn such that all have the interleaved one's parameters; "
    "writes comparison-matched.csv and so on",
    "--report": "train nothing, report what is there",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nas.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comparison", metavar="COMPARISON.yaml", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=HELP["overrides"])
    parser.add_argument("--run", required=True, metavar="RUN_DIR", type=Path, help=HELP["--run"])
    parser.add_argument("--workers", type=int, default=1, metavar="N", help=HELP["--workers"])
    parser.add_argument("--random", type=int, metavar="N", help=HELP["--random"])
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help=HELP["--seeds"])
    parser.add_argument("--match-parameters", action="store_true", help=HELP["--match-parameters"])
    parser.add_argument("--report", action="store_true", help=HELP["--report"])
    arguments = parser.parse_intermixed_args()
    if arguments.workers < 1:
        raise InputError(f"--workers {arguments.workers} must be at least 1")
    return arguments


def report(folder: Path, mark: str) -> None:
    """Write the table, the plot and the claims of what has finished, and print them."""
    from nas.claims import CLAIMS_FORMAT, csv_text, make_claims, markdown, read_rows
    from nas.figures import comparison_plot
    from nas.record import write_text, write_yaml

    rows = read_rows(folder / f"comparison{mark}.yaml")
    claims = make_claims(rows)
    write_text(folder / f"comparison{mark}.csv", csv_text(rows))
    write_text(folder / f"comparison{mark}.md", markdown(rows))
    comparison_plot(rows, folder / f"comparison{mark}.png")
    write_yaml(folder / f"claims{mark}.yaml", {"format": CLAIMS_FORMAT, "claims": claims})
    print(markdown(rows))
    for claim in claims:
        print(f"{'yes' if claim['holds'] else 'NO':<4}{claim['pattern']}: {claim['claim']}. {claim['sentence']}")
    print(f"written to {folder}: comparison{mark}.csv, .md, .png and claims{mark}.yaml")


def main() -> None:
    arguments = parse_arguments()
    instead = {key: getattr(arguments, key) for key in ("random", "seeds") if getattr(arguments, key) is not None}
    settings = read_settings(arguments.comparison, instead)
    recipe = load_config(settings.retrain, arguments.overrides)
    search = load_config(settings.search, arguments.overrides) if settings.search else None
    given = given_contenders(settings, arguments.comparison, (search or recipe).model.blocks)
    threads, cores = recipe.train.threads or 1, os.cpu_count() or 1
    if threads * arguments.workers > cores:
        print(f"NOTICE: {arguments.workers} workers of {threads} threads share {cores} cores, and slow each other down")

    # Imported only now: --help and errors of the configuration need not wait for torch.
    from nas.comparing import Comparison
    from nas.jobs import run_tasks

    comparison = Comparison(settings, given, recipe, search, arguments.run, arguments.overrides)
    if arguments.report and not comparison.run.begun:
        raise InputError(f"--report: {arguments.run} holds no comparison yet; leave --report away to begin one")
    mark, failed = "-matched" if arguments.match_parameters else "", {}
    if not arguments.report:
        comparison.start()
        early = [] if mark else comparison.training(given, settings.seeds)
        # The patterns that wait for nothing train beside the searches; when latencies are measured, nothing else runs.
        failed |= run_tasks([*comparison.searches(), *early], arguments.workers)
        if any(task.name in failed for task in comparison.searches()):
            print("NOTICE: a search failed, so there is no searched pattern, nor any that is chosen by its latency")
        elif search:
            comparison.choose_rivals(comparison.derive())

    contenders = comparison.matched(comparison.known()) if mark else comparison.known()
    training = comparison.training(contenders, settings.seeds)
    if not arguments.report:
        failed |= run_tasks([task for task in training if task.name not in failed], arguments.workers)
    comparison.record(contenders, arguments.run / f"comparison{mark}.yaml", measure=not arguments.report)
    report(arguments.run, mark)
    if failed:
        raise RunError(f"{len(failed)} failed, the rest is reported: " + "; ".join(map(": ".join, failed.items())))
    missing = [task.name for task in training if not task.result.exists()]
    if missing:
        print(f"NOTICE: {len(missing)} of {len(training)} runs have not finished: {', '.join(missing)}")


if __name__ == "__main__":
    run_command(main)
