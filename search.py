"""Stage 1: search the best network within a budget, and the probabilities pi of each block's operations."""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path

from nas.core.config_checks import check_same_text, check_search_budget
from nas.core.config_loading import add_arguments, load_config
from nas.core.errors import run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    config, folder = load_config(arguments.config, arguments.overrides), Path(arguments.run)
    check_same_text(config)
    check_search_budget(config)

    # Import torch only now, so that --help and configuration errors do not wait for it.
    from nas.core.run_folder import check_folder
    from nas.training.device import set_up_device
    from nas.training.distributed import process_group

    check_folder(folder, arguments.resume, "search")
    context = set_up_device(config.seed, config.train)
    if config.search.method == "trials":
        search_by_trials(config, folder, context)
        return
    with process_group(context.device):
        search_by_gumbel(config, folder, context)


def search_by_trials(config, folder: Path, context) -> None:
    """Choose a network by the first parts of trainings."""
    from nas.core.errors import interrupt_on_signals
    from nas.core.outcome import make_outcome, print_outcome
    from nas.core.run_folder import OUTCOME, open_run
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.search.network_search import choose_network, chosen_tables
    from nas.training.auto import auto_lines, resolve_auto

    interrupt_on_signals()
    given, (config, choice) = config, choose_network(config, folder, context)
    run, corpus = open_run(folder, config, "search"), Corpus(prepare(config.data))
    auto, config = config, resolve_auto(config, corpus)
    for line in auto_lines(auto, config, corpus):
        print(line)
    tables = chosen_tables(given, config, corpus, folder, choice)
    start(run, config, corpus, context, tables)
    if not (run.path / OUTCOME).exists():
        about = (choice[key] for key in ("train_steps", "train_tokens", "wall_time_s", "trainings"))
        run.write(OUTCOME, make_outcome(choice["network"]["blocks"], choice["trial"]["valid"], *about))
    print_outcome(run)


def search_by_gumbel(config, folder: Path, context) -> None:
    """Train the weights of a SuperNet and pi in turn, on each rank."""
    from nas.core.outcome import make_outcome, print_outcome
    from nas.core.run_folder import OUTCOME, open_run
    from nas.costs.budget import describe_budget
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.gumbel.gumbel_phase import GumbelPhase
    from nas.gumbel.supernet import build_supernet
    from nas.training.auto import auto_lines, resolve_auto
    from nas.training.distributed import first_on_each_node, is_main
    from nas.training.streams import open_streams
    from nas.training.trainer import Trainer

    run = open_run(folder, config, "search")
    began, options = time.monotonic(), config.search
    corpus = Corpus(first_on_each_node(lambda: prepare(config.data, print)))
    print(f"{len(corpus.tokens('train')):,} training tokens, a vocabulary of {corpus.vocab_size:,}")
    auto, config = config, resolve_auto(config, corpus)
    for line in auto_lines(auto, config, corpus):
        print(line)
    open_streams(corpus, config, context)  # report a text that is too short before anything is measured
    supernet = build_supernet(config, corpus)
    flops, latency = cost_tables(config, corpus, context, run)
    costs = latency or flops
    budget = None
    if options.latency.source != "none":
        budget = costs.as_ratio(options.latency.target, config.model.blocks)
        print("\n".join(describe_budget(budget, config.model.blocks, options.operations, costs)))
    start(run, config, corpus, context, [flops, latency])
    if latency:
        print(latency.text(config.model.blocks))
    seconds = time.monotonic() - began
    if not (run.path / OUTCOME).exists():  # else an earlier call has finished the run
        phase = GumbelPhase(supernet, corpus, config, context, costs, budget)
        trainer = Trainer(phase, run)
        trainer.fit()
        tokens = trainer.step * config.train.batch_size * config.train.segment
        cost = trainer.step, tokens, seconds + trainer.wall_seconds
        run.write(OUTCOME, make_outcome(phase.pattern, trainer.valid, *cost))
    if is_main():
        print_outcome(run)


def cost_tables(config, corpus, context, run) -> list:
    """[FLOPs, milliseconds or None] of the operations."""
    from nas.costs.flops import count_flops
    from nas.costs.measurement import search_latency
    from nas.data.corpus import bytes_per_token

    tables = count_flops(config, corpus.counts()), search_latency(config, corpus.counts(), context, run.path)
    return [table and replace(table, bytes_per_token=bytes_per_token(corpus)) for table in tables]


def start(run, config, corpus, context, tables: list) -> None:
    """Write configuration, provenance, vocabulary and costs into the run folder. tables: those of cost_tables()."""
    from nas.core.provenance import provenance
    from nas.core.run_folder import FLOPS_TABLE, LATENCY
    from nas.data.vocabulary import VOCABULARY

    run.start(config, provenance(config, corpus.meta, context))
    run.save(VOCABULARY, corpus.vocabulary)
    for name, table in zip((FLOPS_TABLE, LATENCY), tables, strict=True):
        if table:
            run.write(name, asdict(table))


if __name__ == "__main__":
    run_command(main)
