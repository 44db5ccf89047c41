"""All stages in one command: search, derive, train, animate and report.

The search finds the best network within the budget. Beside it, the usual network is trained: interleaved attention and
dense blocks of the sizes in CONFIG.yaml, as many as the budget allows. At the end both are timed in the same rounds.
The last line names the network to use: the usual one if it is better on valid.
Repeat the command after an interruption: finished stages are not repeated.
"""

import argparse
import math
from dataclasses import asdict
from pathlib import Path

from nas.core.config import Config, flat_config
from nas.core.config_checks import check_same_text, check_search_budget
from nas.core.config_loading import load_config
from nas.core.errors import InputError, Interrupted, RunError, interrupt_on_signals, run_command
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import FORMAT, abbreviate, interleaved
from nas.core.provenance import check_text, data_digests
from nas.core.run_folder import (
    CHECKPOINT,
    CHOICE,
    CONFIG,
    FOUND,
    LOCK,
    OUTCOME,
    PATTERN,
    PLAN,
    RESULTS,
    SEARCH,
    SUMMARY,
    TRIALS,
    USUAL,
    check_resume,
    lock_folder,
    run_options,
    try_writing,
)
from nas.costs.printing import TOLERANCE

REPORT = "report.html"
NAMES = FOUND, USUAL
PLANNED = "train.epochs", "train.steps", "train.warmup_steps", "train.evaluate_every"  # --minutes sets them


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nas.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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


def open_plan(arguments: argparse.Namespace, config: Config) -> Config:
    """Lock the folder, and write the configuration of all stages, or check that an earlier call had the same.

    Returns it. Before the first trial has begun, another configuration replaces that of an earlier call.
    """
    folder, file, trials = arguments.run, arguments.run / PLAN, arguments.run / SEARCH / TRIALS
    if file.exists() and (trials / CONFIG).exists():
        lock_folder(folder)
        plan = load_config(file, [])
        given, recorded = flat_config(asdict(config)), flat_config(asdict(plan))
        if arguments.minutes != (minutes := read_yaml(file)["minutes"]):
            planned = "without --minutes" if minutes is None else f"with --minutes {minutes:g}"
            raise InputError(f"--run {folder} was begun {planned}: repeat the command so, or use another folder")
        free = PLANNED if minutes else ()
        changed = [key for key in given if given[key] != recorded[key] and key not in free]
        if listed := ", ".join(f"{key} ({recorded[key]} -> {given[key]})" for key in changed):
            raise InputError(f"--run {folder} has another configuration: {listed}; use another folder")
        return plan
    if folder.exists() and {entry.name for entry in folder.iterdir()} - {SEARCH, LOCK, PLAN}:
        if file.exists():
            raise InputError(f"{trials / CONFIG} is missing, so the search cannot go on; use another folder")
        raise InputError(f"--run {folder} is not empty, but holds no {PLAN} of this command; use another folder")
    try_writing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock_folder(folder)
    if arguments.minutes:
        from nas.search.time_budget import plan_minutes
        from nas.training.device import set_up_device

        context = set_up_device(config.seed, config.train)
        config = plan_minutes(config, arguments.minutes, trials, context)
    else:
        from nas.search.time_budget import forget_estimate

        forget_estimate(trials)
    write_yaml(file, {"minutes": arguments.minutes, **asdict(config)})
    return config


def run_stage(command: str, *arguments) -> None:
    """Run a script of the four stages, or a module of nas, and hand on Ctrl-C. Raises RunError if it fails."""
    from nas.jobs.forks import start_command, wait_for
    from nas.jobs.tasks import ROOT

    given = [ROOT / command] if command.endswith(".py") else ["-m", command]
    if wait_for(start_command([*given, *arguments])):
        raise RunError(f"{command} failed; its message stands above")


def usual_blocks(folder: Path, plan: Config) -> list[str] | None:
    """The blocks of the deepest interleaved network within the budget; None if there is none."""
    from nas.costs.baselines import deepest
    from nas.search.network_costs import NetworkCosts
    from nas.search.network_search import COSTS
    from nas.search.space import within

    choice = read_yaml(folder / SEARCH / CHOICE)
    costs = NetworkCosts.read(folder / SEARCH / TRIALS / COSTS)
    fits = within(costs.tables[costs.reference[:2]], choice["budget"] * costs.reference_cost)
    return deepest(interleaved, plan.model.blocks, fits)


def write_usual(folder: Path, plan: Config) -> Path:
    """Write the pattern of the usual network."""
    from nas.core.config_checks import simplify

    file, blocks = folder / f"{USUAL}.yaml", usual_blocks(folder, plan)
    if not blocks:
        print("NOTICE: no interleaved network of the given sizes is within the budget; the usual one has one block")
    write_yaml(file, {"format": FORMAT, "blocks": simplify(blocks or interleaved(1), plan, "interleaved")})
    return file


def train_networks(folder: Path, plan: Config) -> None:
    """Train the found network, from its trial on, and the usual one, side by side if there are cores."""
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.jobs.tasks import run_tasks, script_task, unfinished, workers
    from nas.retraining.phase import BEST
    from nas.training.device import set_up_device

    tasks = []
    check_text(folder / SEARCH / TRIALS, data_digests(Corpus(prepare(plan.data)).meta))
    for name, pattern in zip(NAMES, (folder / SEARCH / PATTERN, write_usual(folder, plan)), strict=True):
        run, log = folder / name, folder / "logs" / f"{name}.txt"
        arguments = [pattern, folder / PLAN, *run_options(run)]
        tasks.append(script_task(name, "retrain.py", arguments, run / RESULTS, log))
    for task in tasks:
        if task.result.with_name(CHECKPOINT).exists() and not task.result.with_name(BEST).exists():
            for file in (task.result, folder / SUMMARY, folder / REPORT):  # retrain.py writes best.pt again
                file.unlink(missing_ok=True)
    if unfinished(tasks):
        print(f"training the {' and the '.join(NAMES)} network", flush=True)
    if failed := run_tasks(tasks, workers(set_up_device(plan.seed, plan.train))):
        raise RunError("; ".join(f"the training of the {name} network failed: {why}" for name, why in failed.items()))


def summarize(folder: Path, plan: Config) -> dict:
    """The content of summary.yaml: both networks on test, and their times for a text beside that of the reference.

    All times are from the same rounds. use: the usual network if it is better on valid and within the budget, else the
    found one.
    """
    from nas.costs.measurement import ROUNDS, SECONDS, text_times
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.search.halving import TIE
    from nas.training.auto import resolve_auto
    from nas.training.device import set_up_device

    networks, summary, valid = {}, {}, {}
    context, corpus = set_up_device(plan.seed, plan.train), Corpus(prepare(plan.data))
    for name in reversed(NAMES):  # ratios are to the first one
        results, config = read_yaml(folder / name / RESULTS), load_config(folder / name / CONFIG, [])
        valid[name] = results["valid"]["bits_per_byte"]
        networks[name] = results["pattern"], config, Corpus(prepare(config.data))
        summary[name] = {
            "vocab_size": networks[name][2].vocab_size,
            "d_model": config.model.d_model,
            "blocks": results["pattern"],
            "dropout": config.model.dropout,
            **{key: results["test"][key] for key in ("bits_per_byte", "word_perplexity", "word_perplexity_comparable")},
        }
    if (whole := interleaved(plan.model.blocks)) != networks[USUAL][0]:
        networks["reference"] = whole, resolve_auto(plan, corpus), corpus
    times = text_times(networks, context, ROUNDS, SECONDS)
    for name in NAMES:
        summary[name] |= {
            "ms_per_1000_bytes": times[name]["ms_per_1000_bytes"],
            "time_ratio_to_usual": times[name]["ratio"],
            "time_ratio_to_reference": times[name]["ratio"] / times.get("reference", times[USUAL])["ratio"],
        }
    better = (1 + TIE) * valid[USUAL] < valid[FOUND] and usual_blocks(folder, plan)
    return summary | {"use": USUAL if better else FOUND}


def describe(folder: Path, plan: Config) -> str:
    """The last lines: both networks, and how they differ."""
    summary, choice, lines = read_yaml(folder / SUMMARY), read_yaml(folder / SEARCH / CHOICE), []
    for name in NAMES:
        one = summary[name]
        sizes = f"{one['vocab_size']:,} pieces, width {one['d_model']}, {abbreviate(one['blocks'])}"
        sizes += f", dropout {one['dropout']:g}" if one["dropout"] else ""
        quality = f"{one['bits_per_byte']:.4f} bits per byte on test"
        if one["word_perplexity_comparable"]:
            quality += f", word perplexity {one['word_perplexity']:,.1f}"
        lines.append(f"{name} network: {sizes}: {quality}, {one['ms_per_1000_bytes']:.3g} ms for 1,000 bytes")
    found, usual = (summary[name] for name in NAMES)
    bits, same = found["bits_per_byte"] / usual["bits_per_byte"] - 1, usual["blocks"] == interleaved(plan.model.blocks)
    time, to_reference = found["time_ratio_to_usual"], found["time_ratio_to_reference"]
    budget = "" if same else f"; {to_reference:.2f} of the reference's time"
    if choice["unit"].startswith("ms"):
        budget += f", and the budget is {choice['budget']:.3g}"
    comparison = f"found against usual{' (the reference)' if same else ''}: {bits:+.1%} bits per byte"
    lines.append(f"{comparison}, at {time:.2f} of the time{budget}")
    if table := plan.search.latency.table:
        lines.append(f"NOTICE: the budget counts costs of {table}; the times above are of this device")
    elif choice["unit"].startswith("ms") and to_reference > (1 + TOLERANCE) * choice["budget"]:
        again = f"remove {folder / SUMMARY} and {folder / REPORT}, and repeat the command on an idle machine"
        lines.append(f"NOTICE: the found network takes longer than the budget; to time it again, {again}")
    if summary["use"] == USUAL:
        lines.append("NOTICE: the usual network is better on valid, so use that one")
    lines.append(f"report, with pictures: {folder / REPORT}; the network to use: {folder / summary['use']}")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    folder, config = arguments.run, load_config(arguments.config, arguments.overrides)
    if config.search.method != "trials":
        raise InputError(f"nas.run needs search.method=trials, not {config.search.method}; run its stages one by one")
    check_search_budget(config)
    if not arguments.minutes:
        check_same_text(config)
    interrupt_on_signals()
    search = folder / SEARCH
    try:
        plan = open_plan(arguments, config)
        if not (search / OUTCOME).exists():
            run_stage("search.py", folder / PLAN, *run_options(search))
        if not (search / PATTERN).exists():
            run_stage("derive.py", search)
        train_networks(folder, plan)
        if not (folder / SUMMARY).exists():
            write_yaml(folder / SUMMARY, summarize(folder, plan))
        if not (search / "pi.gif").exists():
            run_stage("animate.py", search)
        if not (folder / REPORT).exists():
            run_stage("nas.report", folder, "--out", folder / REPORT)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; progress is saved: repeat the command to continue") from None
    print(describe(folder, plan))


if __name__ == "__main__":
    run_command(main)
