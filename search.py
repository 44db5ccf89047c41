"""Stage 1: train the weights of a SuperNet and the probabilities pi of each block's operations."""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path

from nas.core.config_loading import add_arguments, load_config
from nas.core.errors import run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    config, folder = load_config(arguments.config, arguments.overrides), Path(arguments.run)

    # Import torch only now, so that --help and configuration errors do not wait for it.
    from nas.core.run_folder import check_unused, open_run
    from nas.training.device import set_up_device
    from nas.training.distributed import process_group

    context, share = set_up_device(config.seed, config.train), None
    if config.search.chooses_shape:
        from nas.shapes.choice import choose_shape

        check_unused(folder, arguments.resume)
        config, share = choose_shape(config, folder, context)
    run = open_run(folder, config, "search", arguments.resume or share is not None)
    with process_group(context.device):
        search(config, run, context, share or 1.0)


def search(config, run, context, interleaved_share: float) -> None:
    """Run the stage, on each rank. interleaved_share: see CostTable."""
    from nas.core.provenance import provenance
    from nas.core.run_folder import FLOPS_TABLE, LATENCY, OUTCOME
    from nas.costs.budget import describe_budget
    from nas.costs.cost_table import read_costs
    from nas.costs.flops import count_flops
    from nas.costs.latency import search_latency
    from nas.data.corpus import Corpus, bytes_per_token
    from nas.data.preprocess import prepare
    from nas.data.vocabulary import VOCABULARY
    from nas.search.maturity import describe_steps
    from nas.search.outcome import print_outcome
    from nas.search.shared_weights import inherit_weights
    from nas.search.supernet import build_supernet
    from nas.training.build import open_streams, resolve_auto
    from nas.training.distributed import first_on_each_node, is_main

    began, options = time.monotonic(), config.search
    corpus = Corpus(first_on_each_node(lambda: prepare(config.data, print)))
    print(f"{len(corpus.tokens('train')):,} training tokens, a vocabulary of {corpus.vocab_size:,}")
    config = resolve_auto(config, corpus)
    open_streams(corpus, config, context)  # report a text that is too short before anything is measured
    supernet = build_supernet(config, corpus)
    if options.weights_from:
        inherit_weights(supernet, config, corpus)
    print_lines(describe_steps(config, len(corpus.tokens("train"))))
    flops, latency = count_flops(config, corpus.counts()), search_latency(config, corpus.counts(), context, run.path)
    if options.weights_from:
        interleaved_share = read_costs(Path(options.weights_from) / FLOPS_TABLE, []).interleaved_share
    about = {"interleaved_share": interleaved_share, "bytes_per_token": bytes_per_token(corpus)}
    flops, latency = (table and replace(table, **about) for table in (flops, latency))
    costs = latency or flops
    if options.latency.source != "none":
        budget = costs.as_ratio(options.latency.target, config.model.blocks)
        print_lines(describe_budget(budget, config.model.blocks, options.operations, costs))

    run.start(config, provenance(config, corpus.meta, context))
    run.save(VOCABULARY, corpus.vocabulary)
    if options.latency.source != "none":
        options.latency.target = budget  # now that config.yaml has it as it was given
    run.write(FLOPS_TABLE, asdict(flops))
    if latency:
        run.write(LATENCY, asdict(latency))
        print(latency.text(config.model.blocks))
    seconds = time.monotonic() - began
    if not (run.path / OUTCOME).exists():  # else an earlier call has finished the run
        method = gumbel if options.method == "gumbel" else single_path
        run.write(OUTCOME, method(supernet, corpus, config, context, costs, run, seconds))
    if is_main():
        print_outcome(run)


def single_path(supernet, corpus, config, context, costs, run, seconds: float) -> dict:
    """Train the weights along uniform paths, then learn pi with fixed weights. Returns the content of outcome.yaml.

    seconds: the time until now.
    """
    from nas.costs.budget import likeliest_path
    from nas.search.learn_pi import learn_pi
    from nas.search.outcome import PiWriter, make_outcome
    from nas.search.shared_weights import SharedWeights
    from nas.search.supernet import evaluate_path
    from nas.search.weights import WeightsPhase
    from nas.training.trainer import Trainer, open_board

    trainer = None
    if not config.search.weights_from:
        trainer = Trainer(WeightsPhase(supernet, corpus, config, context), run)
        trainer.fit()
    steps = trainer.step if trainer else 0
    began = time.monotonic()
    weights = SharedWeights(supernet, corpus, config, context)
    budget = config.search.budget
    with open_board(run, steps) as board:
        writer = PiWriter(run, config, steps, board)
        learned = learn_pi(weights, costs, budget, report=writer, known=writer.known)
    path = likeliest_path(learned.pi.mean(axis=0), supernet.operations, costs, budget)
    seconds += time.monotonic() - began
    valid = evaluate_path(supernet, path, corpus, config, context)
    return make_outcome(config, supernet.names(path), valid, writer.steps, seconds, trainer)


def gumbel(supernet, corpus, config, context, costs, run, seconds: float) -> dict:
    """Run the paper's method. Returns the content of outcome.yaml. seconds: the time until now."""
    from nas.search.gumbel import GumbelPhase
    from nas.search.outcome import make_outcome
    from nas.training.trainer import Trainer

    phase = GumbelPhase(supernet, corpus, config, context, costs)
    trainer = Trainer(phase, run)
    trainer.fit()
    return make_outcome(config, supernet.names(phase.path), trainer.valid, trainer.step, seconds, trainer)


def print_lines(lines: list[str]) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    run_command(main)
