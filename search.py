"""Stage 1: search the best network within a budget, and the probabilities pi of each block's operations."""

import argparse
import time
from pathlib import Path

from nas.core.config_loading import add_arguments, check_search, load_config
from nas.core.errors import run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    config, folder = load_config(arguments.config, arguments.overrides), Path(arguments.run)
    check_search(config)

    # Import torch only now, so that --help and configuration errors do not wait for it.
    from nas.core.run_folder import check_folder
    from nas.training.device import set_up_device
    from nas.training.distributed import process_group

    check_folder(folder, arguments.resume, "search")
    runtime = set_up_device(config.seed, config.train)
    if config.search.method == "trials":
        search_by_trials(config, folder, runtime)
        return
    with process_group(runtime.device):
        search_by_gumbel(config, folder, runtime)


def search_by_trials(config, folder: Path, runtime) -> None:
    """Choose a network by the first parts of trainings."""
    from nas.core.errors import interrupt_on_signals
    from nas.core.outcome import make_outcome, print_outcome
    from nas.core.run_folder import OUTCOME, RunFolder
    from nas.data.corpus import Corpus, prepare
    from nas.search.network_search import choose_network, chosen_costs
    from nas.training.passes import auto_lines, resolve_auto

    interrupt_on_signals()
    given, (sized, choice) = config, choose_network(config, folder, runtime)
    run, corpus = RunFolder(folder, sized, "search"), Corpus(prepare(sized.data))
    config = resolve_auto(sized, corpus)
    for line in auto_lines(sized, config, corpus):
        print(line)
    start(run, config, corpus, runtime, chosen_costs(given, folder, choice))
    if not (run.path / OUTCOME).exists():
        about = (choice[key] for key in ("train_steps", "train_tokens", "wall_time_s", "trainings"))
        run.write(OUTCOME, make_outcome(choice["network"]["blocks"], choice["trial"]["valid"], *about))
    print_outcome(run)


def search_by_gumbel(given, folder: Path, runtime) -> None:
    """Train the weights of a SuperNet and pi in turn, on each rank."""
    from nas.core.outcome import make_outcome, print_outcome
    from nas.core.run_folder import LATENCY, OUTCOME, RunFolder
    from nas.costs.cost_table import cost_text
    from nas.data.corpus import Corpus, prepare
    from nas.gumbel.gumbel_phase import GumbelPhase
    from nas.training.build import open_streams
    from nas.training.distributed import broadcast_from_main, first_on_each_node, is_main
    from nas.training.passes import auto_lines, resolve_auto
    from nas.training.trainer import Trainer

    run = RunFolder(folder, given, "search")
    began = time.monotonic()
    corpus = Corpus(first_on_each_node(lambda: prepare(given.data, print)))
    print(f"{len(corpus.tokens('train')):,} training tokens, a vocabulary of {corpus.vocab_size:,}")
    config = resolve_auto(given, corpus)
    for line in auto_lines(given, config, corpus):
        print(line)
    open_streams(corpus, config, runtime)  # report a text that is too short before anything is measured
    files, costs = broadcast_from_main(lambda: gumbel_costs(config, runtime, folder))
    target = read_target(config, costs)
    start(run, config, corpus, runtime, files)
    if LATENCY in files:
        print(cost_text(costs, config.model.blocks))
    seconds = time.monotonic() - began
    if not (run.path / OUTCOME).exists():  # else an earlier call has finished the run
        phase = GumbelPhase(corpus, config, runtime, costs, target)
        trainer = Trainer(phase, run)
        trainer.fit()
        tokens = trainer.step * config.train.batch_size * config.train.segment
        cost = trainer.step, tokens, seconds + trainer.wall_seconds
        run.write(OUTCOME, make_outcome(phase.pattern, trainer.valid, *cost))
    if is_main():
        print_outcome(run)


def gumbel_costs(config, runtime, folder: Path) -> tuple:
    """({name: content} of the cost files, the table that the search uses)."""
    from nas.core.run_folder import FLOPS_TABLE, LATENCY
    from nas.search.candidate_costs import count_costs, find_costs, open_candidates

    name = LATENCY if config.search.latency.in_milliseconds else FLOPS_TABLE
    candidates = open_candidates(config, runtime)
    costs = find_costs(candidates, folder / name, runtime)
    files = {FLOPS_TABLE: count_costs(candidates), name: costs}
    return files, costs.table(config.data.vocab_size, config.model.d_model)


def read_target(config, costs) -> float | None:
    """The highest expected cost, as a ratio to the reference's; None if cost plays no role. Tells what it leaves."""
    from nas.costs.budget import as_ratio, describe_budget

    latency, blocks = config.search.latency, config.model.blocks
    if latency.source == "none":
        return None
    target = as_ratio(latency.target, costs, blocks)
    print("\n".join(describe_budget(target, blocks, config.search.operations, costs)))
    return target


def start(run, config, corpus, runtime, files: dict) -> None:
    """Write configuration, provenance, vocabulary and costs into the run folder. files: {name: costs}."""
    from nas.core.run_folder import provenance
    from nas.data.vocabulary import VOCABULARY

    run.start(config, provenance(config, corpus.meta, runtime))
    run.save(VOCABULARY, corpus.vocabulary)
    for name, costs in files.items():
        run.write(name, costs.to_dict())


if __name__ == "__main__":
    run_command(main)
