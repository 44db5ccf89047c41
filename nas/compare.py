"""Is the searched pattern better? Train it and its rivals under one recipe, with several seeds, and see what comes out.

Searches, derives, draws random patterns of the searched one's latency, trains every pattern, and writes
comparison.csv, .md and .png and claims.yaml to RUN_DIR. Repeat the command after an interruption, or with more seeds or
patterns: what has finished is not done again. COMPARISON.yaml, whose paths are relative to it; only `retrain` must be
there, and these are examples where no default is named:

  format: par-comparison/1
  retrain: retrain.yaml      # the recipe under which every pattern is trained; its seed does not count
  search: search.yaml        # without it, given patterns alone are compared
  search_seeds: [1]          # default [1]; from the mean pi of several; cannot change once a run has begun
  pareto: [0.5, 0.65]        # default []; a searched pattern for each of these budgets, beside that of argmax,
  method: budget             # default budget; or evolution: how derive.py chooses those of the budgets,
  trials: 0                  # default 0; with evolution: how many of the best it trains for a while to choose
  patterns: [interleaved]    # the default; of interleaved, sandwich, par, attention-only, dense-only, parameters (the
                             # most within the searched pattern's predicted latency), and pattern files
  random: 5                  # default 0; patterns drawn at the searched pattern's measured latency, within 3%
  seeds: [1, 2, 3]           # the default; of the training of every pattern

Rules make patterns of model.blocks blocks. In claims, yes and NO say what the means say, p whether it may be chance.

Over a cluster that shares its files, N processes do it together, with --share 0/N, 1/N and so on, as in
experiments/compare/slurm.sh. Share 0 also derives, times and reports. They wait for each other's files and say for
which. A share of which a part fails does the rest and ends with exit status 1; those that need the part wait until the
cluster's time limit ends them. Repeat all to go on.
"""

import argparse
import os
import re
import signal
from pathlib import Path

from nas.comparison.spec import MATCHED, UNMATCHED, contenders_file, given_contenders, read_settings
from nas.comparison.tasks import ALONE, Share, Task, run_tasks, unfinished, wait_for
from nas.core.config_loading import load_config
from nas.core.errors import InputError, Interrupted, RunError, run_command

HELP = {
    "overrides": "options for searches and training alike, but for seed",
    "--run": "folder for all of it",
    "--workers": "runs at a time, each on the next GPU (default: as many as there are GPUs); without GPUs default 1, "
    "and more need train.threads",
    "--share": "do the I-th of N shares of the searches and of the training, I from 0 to N-1",
    "--random": "so many random patterns, instead of what the file says",
    "--seeds": "seeds of training, instead of what the file says",
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
    parser.add_argument("--workers", type=int, metavar="N", help=HELP["--workers"])
    parser.add_argument("--share", metavar="I/N", help=HELP["--share"])
    parser.add_argument("--random", type=int, metavar="N", help=HELP["--random"])
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help=HELP["--seeds"])
    parser.add_argument("--match-parameters", action="store_true", help=HELP["--match-parameters"])
    parser.add_argument("--report", action="store_true", help=HELP["--report"])
    arguments = parser.parse_intermixed_args()
    if arguments.workers is not None and arguments.workers < 1:
        raise InputError(f"--workers {arguments.workers} must be at least 1")
    if arguments.share and arguments.report:
        raise InputError("--report is of all shares; leave --share out")
    arguments.share = read_share(arguments.share) if arguments.share else ALONE
    for override in arguments.overrides:
        if override.startswith("seed="):
            raise InputError(f"{override}: every pattern is trained with several seeds; give them as --seeds")
    return arguments


def read_share(text: str) -> Share:
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise InputError(f"--share {text} must be I/N, I from 0 to N-1: 0/8, 1/8 ... 7/8 of eight processes")
    return Share(int(found[1]), int(found[2]))


def check_threads(threads: int | None, workers: int) -> None:
    cores = os.cpu_count() or 1
    if workers > 1 and threads is None:
        fair = max(1, cores // workers)
        raise InputError(f"--workers {workers} needs the threads of each: add train.threads={fair}")
    if (threads or 1) * workers > cores:
        print(f"NOTICE: {workers} workers of {threads} threads share {cores} cores, and slow each other down")


def report(folder: Path, mark: str) -> None:
    """Write the table, the plot and the claims of what has finished, and print them."""
    from nas.comparison.claims import CLAIMS_FORMAT, make_claims
    from nas.comparison.results import csv_text, markdown, read_rows
    from nas.core.files import write_text, write_yaml
    from nas.reporting.comparison_figures import comparison_plot

    rows = read_rows(contenders_file(folder, mark))
    claims = make_claims(rows)
    write_text(folder / f"comparison{mark}.csv", csv_text(rows))
    write_text(folder / f"comparison{mark}.md", markdown(rows))
    comparison_plot(rows, folder / f"comparison{mark}.png")
    write_yaml(folder / f"claims{mark}.yaml", {"format": CLAIMS_FORMAT, "claims": claims})
    print(markdown(rows))
    print("yes and NO are what the means say; p, how easily chance alone would give such a difference")
    for claim in claims:
        print(f"{'yes' if claim['holds'] else 'NO':<4}{claim['pattern']}: {claim['claim']}. {claim['sentence']}")
    print(f"written to {folder}: comparison{mark}.csv, .md, .png and claims{mark}.yaml")


def main() -> None:
    arguments = parse_arguments()
    instead = {key: getattr(arguments, key) for key in ("random", "seeds") if getattr(arguments, key) is not None}
    settings = read_settings(arguments.comparison, instead)
    recipe = load_config(settings.retrain, [*arguments.overrides, "seed=1"])
    search = load_config(settings.search, arguments.overrides) if settings.search else None
    given = given_contenders(settings, arguments.comparison, (search or recipe).model.blocks)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # how clusters end a job: as Ctrl-C, runs save first
    try:
        compare(arguments, settings, given, recipe, search)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what was saved is whole: the same command goes on") from None


def compare(arguments, settings, given, recipe, search) -> None:
    """Search, derive, choose rivals, train, report. Raises RunError where a part failed, once the rest is done."""
    # Imported only now: --help and errors of the configuration need not wait for torch.
    from nas.comparison.runner import Comparison, visible_gpus

    gpus, share = visible_gpus(recipe), arguments.share
    workers = arguments.workers or max(1, len(gpus))
    if not gpus:
        check_threads(recipe.train.threads, workers)
    if not share.leads:  # until share 0 has begun, there is nothing to check against
        begun = arguments.run / "config.yaml"
        wait_for("share 0", lambda: [] if begun.exists() else [str(begun)])

    def run(tasks: list[Task]) -> dict[str, str]:
        return run_tasks([task for task in tasks if share.has(task)], workers, gpus)

    comparison = Comparison(settings, given, recipe, search, arguments.run, arguments.overrides, share)
    mark, train = MATCHED if arguments.match_parameters else UNMATCHED, not arguments.report
    if not train and not comparison.run.begun:
        raise InputError(f"--report: {arguments.run} holds no comparison yet; leave --report out to begin one")
    failed = {}
    if train:
        comparison.start(arguments.comparison.read_text(encoding="utf-8"))
        failed |= comparison.find_patterns(run, early=given if mark == UNMATCHED else [])
    contenders = comparison.known() if mark == UNMATCHED else comparison.matched(comparison.known())
    training = comparison.training(contenders)
    if train:
        # Where something has failed here the others lack patterns: there is no use in waiting for what they train.
        others = [task for task in training if not share.has(task)] if share.leads and not failed else []
        failed |= run([task for task in training if task.name not in failed])
        wait_for("other shares", lambda: unfinished(others))
    if share.leads and any(task.result.exists() for task in training):
        comparison.record(contenders, contenders_file(arguments.run, mark), measure=train)
        report(arguments.run, mark)
    if failed:
        rest = "reported" if share.leads else "done"
        raise RunError(f"{len(failed)} failed, the rest is {rest}: " + "; ".join(map(": ".join, failed.items())))
    missing = unfinished(training)
    if not share.leads:
        print(f"share {share.index} of {share.count} is done; share 0 reports")
    elif missing:
        print(f"NOTICE: {len(missing)} of {len(training)} runs have not finished: {', '.join(missing)}")


if __name__ == "__main__":
    run_command(main)
