"""Stage 1: train the weights of a SuperNet and the probabilities pi of each block's operations."""

import argparse
import time
from pathlib import Path

from nas.core.config_loading import add_arguments, load_config
from nas.core.errors import run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config, arguments.overrides)

    # Import torch only now, so that --help and configuration errors do not wait for it.
    from nas.core.run_folder import open_run
    from nas.training.device import set_up_device
    from nas.training.distributed import process_group

    run = open_run(arguments.run, config, "search", arguments.resume)
    context = set_up_device(config.seed, config.train)
    with process_group(context.device):
        search(config, run, context)


def search(config, run, context) -> None:
    """Run the stage, on each rank."""
    from nas.core.provenance import provenance
    from nas.core.run_folder import FLOPS_TABLE, LATENCY
    from nas.costs.latency import current_costs
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.data.vocabulary import VOCABULARY
    from nas.search.objective import describe_target
    from nas.search.outcome import report_outcome
    from nas.search.phase import SearchPhase
    from nas.search.schedule import describe_maturity, make_schedule, retraining_steps
    from nas.search.supernet import build_supernet, inherit_weights
    from nas.training.build import open_streams, passes_warning, resolve_cutoffs, warmup_warning
    from nas.training.distributed import broadcast_from_main, first_on_each_node
    from nas.training.trainer import Trainer

    corpus = Corpus(first_on_each_node(lambda: prepare(config.data, print)))
    print(f"{len(corpus.tokens('train')):,} training tokens, a vocabulary of {corpus.vocab_size:,}")
    config = resolve_cutoffs(config, corpus)
    options, counts = config.search, corpus.counts()
    open_streams(corpus, config, context)  # report a text that is too short before anything is measured
    supernet = build_supernet(config, corpus)
    if options.weights_from:
        if not run.checkpoint.exists():
            inherit_weights(supernet, config, corpus)
    elif options.schedule == "sequential":
        text = len(corpus.tokens("train"))
        steps = make_schedule(config, text).weights_steps
        print(describe_maturity(config, steps))
        passes = passes_warning(config, "search.retrain_steps", retraining_steps(config, steps), text)
        for warning in filter(None, (passes, warmup_warning(config, steps))):
            print(warning)
    latency, began = None, time.monotonic()
    if options.latency.source == "measured":
        tables = [Path(folder, LATENCY) for folder in (run.path, options.weights_from) if folder]
        file = next(filter(Path.exists, tables), tables[0])
        latency = broadcast_from_main(lambda: current_costs(config, counts, context, file))
    latency_seconds = time.monotonic() - began
    phase = SearchPhase(supernet, corpus, config, context, latency)

    run.start(config, provenance(config, corpus.meta, context))
    run.save(VOCABULARY, corpus.vocabulary)
    run.write(FLOPS_TABLE, phase.flops.to_dict())
    if latency:
        run.write(LATENCY, latency.to_dict())
        print(latency.text(config.model.blocks))
    for line in describe_target(options, config.model.blocks, phase.costs):
        print(line)
    trainer = Trainer(phase, run)
    trainer.fit()
    report_outcome(phase, trainer, latency_seconds)


if __name__ == "__main__":
    run_command(main)
