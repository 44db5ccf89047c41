"""All stages in one command: search, derive, train, animate and report.

The search finds the best network within the budget. Beside it, the usual network is trained: interleaved attention and
dense blocks of the sizes in CONFIG.yaml, as many as the budget allows. At the end both are timed in the same rounds.
The last line names the model to use: the usual one if it is better on valid, or cache and counts alone. The lines
before are text that it generates, with a fixed seed.
Repeat the command after an interruption: finished stages are not repeated.
"""

import math
import textwrap
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path

from nas.core.config import Config
from nas.core.config_loading import REPORT, check_search, load_config, open_plan
from nas.core.errors import CannotSearch, InputError, Interrupted, RunError, interrupt_on_signals, run_command
from nas.core.files import write_yaml
from nas.core.run_folder import (
    NO_NETWORK,
    OUTCOME,
    PATTERN,
    PLAN,
    RESULTS,
    SEARCH,
    SUMMARY,
    TRIALS,
    check_resume,
    run_options,
)


def parse_arguments() -> Namespace:
    parser = ArgumentParser("python -m nas.run", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--run", required=True, metavar="RUN_DIR", type=Path, help="folder for the files of all stages")
    minutes = "for everything; sets train.epochs (default: trainings as in CONFIG.yaml)"
    parser.add_argument("--minutes", type=float, metavar="N", help=minutes)
    parser.add_argument("--resume", action="store_true", help="only continue a run, do not start one")
    arguments = parser.parse_intermixed_args()
    if arguments.resume:
        check_resume(arguments.run, lambda folder: (folder / PLAN).exists())
    if arguments.minutes is not None and not 0 < arguments.minutes < math.inf:
        raise InputError(f"--minutes {arguments.minutes:g} must be above 0")
    return arguments


def make_plan(folder: Path, minutes: float | None, config: Config) -> Config:
    """Write the configuration of all stages."""
    from nas.search.network_search import forget_estimate, plan_minutes
    from nas.training.device import set_up_device

    trials = folder / SEARCH / TRIALS
    if minutes:
        config = plan_minutes(config, minutes, trials, set_up_device(config.seed, config.train))
    else:
        forget_estimate(trials)
    write_yaml(folder / PLAN, {"minutes": minutes, **asdict(config)})
    return config


def run_stage(result: Path, command: str, *arguments) -> None:
    """Run a script of the four stages, or a module of nas, unless it has written its result. Hands on Ctrl-C.

    Raises RunError if it fails.
    """
    from nas.jobs.processes import start_command, wait_for
    from nas.jobs.tasks import ROOT

    given = [ROOT / command] if command.endswith(".py") else ["-m", command]
    if not result.exists() and wait_for(start_command([*given, *arguments])):
        raise RunError(f"{command} failed; its message stands above")


def count_alone(folder: Path, arguments: Namespace, config: Config) -> None:
    """Make a model of cache and counts, and print its figures."""
    from nas.comparison.found_and_usual import no_network_pattern

    pattern, run = folder / f"{NO_NETWORK}.yaml", folder / NO_NETWORK
    write_yaml(pattern, no_network_pattern(config))
    run_stage(run / RESULTS, "retrain.py", pattern, arguments.config, *run_options(run), *arguments.overrides)


ROWS, WIDTH = 4, 110  # of text that the model to use generates
TOP_P = 0.95  # at a lower temperature or top-p, the cache of the text so far makes it repeat itself
TOKENS, LINES = 500, 12  # enough for the rows: a byte each, or some empty lines
PROMPT = 200  # tokens at the end of valid


def generated_rows(run: Path, plan: Config) -> list[str]:
    """The first rows that a model writes after the end of valid. Empty lines are left out, and long ones are wrapped.

    There are none for images. run: of its training.
    """
    from nas import load_model
    from nas.data.corpus import Corpus, prepare
    from nas.inference.language_model import escape

    if plan.model.grid:
        return []
    corpus = Corpus(prepare(plan.data))
    prompt = corpus.vocabulary.decode(corpus.tokens("valid")[-PROMPT:]).decode(errors="ignore")
    text = load_model(run, plan.train.device).generate(prompt, TOKENS, top_p=TOP_P, seed=1, lines=LINES)
    return [row for line in text.split("\n") for row in textwrap.wrap(escape(line), WIDTH)][:ROWS]


def main() -> None:
    arguments = parse_arguments()
    folder, minutes, config = arguments.run, arguments.minutes, load_config(arguments.config, arguments.overrides)
    if config.search.method != "trials":
        raise InputError(f"nas.run needs search.method=trials, not {config.search.method}; run its stages one by one")
    check_search(config, minutes)
    interrupt_on_signals()
    search = folder / SEARCH
    try:
        try:
            plan = open_plan(folder, minutes, config) or make_plan(folder, minutes, config)
        except CannotSearch as error:
            if not minutes or not config.beside.counts:
                raise
            count_alone(folder, arguments, config)
            print(f"NOTICE: no network was searched: {error}")
            print(f"the model to use has only cache and counts: {folder / NO_NETWORK}")
            return
        run_stage(search / OUTCOME, "search.py", folder / PLAN, *run_options(search))
        run_stage(search / PATTERN, "derive.py", search)
        # Only now, because it needs torch.
        from nas.comparison.found_and_usual import describe, summarize, train_networks

        train_networks(folder, plan)
        if not (folder / SUMMARY).exists():
            summary = summarize(folder, plan)
            rows = generated_rows(folder / summary["use"], plan)
            write_yaml(folder / SUMMARY, summary | {"text": rows})
        run_stage(search / "pi.gif", "animate.py", search)
        run_stage(folder / REPORT, "nas.report", folder, "--out", folder / REPORT)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; what has finished is kept: repeat the command to continue") from None
    print(describe(folder, plan))


if __name__ == "__main__":
    run_command(main)
