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
    from nas.claims import CLAIMS_FORMAT, collect, csv_text, make_claims, markdown
    from nas.comparing import Comparison
    from nas.figures import comparison_plot
    from nas.jobs import run_tasks
    from nas.record import write_text, write_yaml

    comparison, failed = Comparison(settings, given, recipe, search, arguments.run, arguments.overrides), {}
    if not arguments.report:
        comparison.start()
        early = [] if arguments.match_parameters else comparison.training(given, settings.seeds)
        tasks = comparison.searches() + early  # the patterns that wait for nothing train beside the searches
        failed |= run_tasks(tasks, arguments.workers)
        if any(task.name in failed for task in comparison.searches()):
            print("NOTICE: a search failed, so there is no searched pattern, nor any that is chosen by its latency")
        elif search:
            comparison.choose_rivals(comparison.derive())

    contenders, out = comparison.known(), arguments.run / "comparison"
    if arguments.match_parameters:
        contenders, out = comparison.matched(contenders), arguments.run / "comparison-matched"
    if not arguments.report:
        tasks = comparison.training(contenders, settings.seeds)
        failed |= run_tasks([task for task in tasks if task.name not in failed], arguments.workers)

    latencies = comparison.latencies(contenders, out.with_name(f"{out.name}-latency.yaml"), not arguments.report)
    rows = collect(contenders, arguments.run / "runs", settings.seeds, latencies, comparison.search_hours())
    if not rows:
        raise RunError("no run has finished: " + "; ".join(f"{name}: {words}" for name, words in failed.items()))
    claims = make_claims(rows)
    write_text(out.with_suffix(".csv"), csv_text(rows))
    write_text(out.with_suffix(".md"), markdown(rows))
    write_yaml(
        out.with_name(out.name.replace("comparison", "claims") + ".yaml"), {"format": CLAIMS_FORMAT, "claims": claims}
    )
    comparison_plot(rows, out.with_suffix(".png"))
    print(markdown(rows))
    for claim in claims:
        print(f"{'yes' if claim['holds'] else 'NO':<4} {claim['claim']}: {claim['sentence']}")
    print(f"written to {out}.csv, .md, .png")
    missing = len(settings.seeds) * len(contenders) - sum(len(row.seeds) for row in rows)
    if failed:
        raise RunError(
            f"{len(failed)} runs failed, the rest is reported: " + "; ".join(f"{n}: {w}" for n, w in failed.items())
        )
    if missing:
        print(f"NOTICE: {missing} of {len(settings.seeds) * len(contenders)} runs are not there yet")


if __name__ == "__main__":
    run_command(main)
