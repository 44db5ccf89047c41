"""Stage 1: train a SuperNet and the probabilities pi of each block's operations on a text."""

import argparse

from nas.core.config_loading import add_arguments, load_config
from nas.core.errors import run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config, arguments.overrides)

    # Imported only now: --help and errors of the configuration need not wait for torch.
    from nas.core.run_folder import open_run
    from nas.training.device import set_up
    from nas.training.distributed import process_group

    run = open_run(arguments.run, config, "search", arguments.resume)
    context = set_up(config.seed, config.train)
    with process_group(context.device):
        search(config, run, context)


def search(config, run, context) -> None:
    """On each rank of the run."""
    from nas.core.provenance import provenance
    from nas.core.run_folder import OUTCOME
    from nas.costs.latency import current_costs
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.search.phase import Search, cut_streams
    from nas.search.supernet import build_supernet
    from nas.training.build import resolve_cutoffs
    from nas.training.distributed import broadcast_from_main, first_on_each_node
    from nas.training.trainer import Trainer

    corpus = Corpus(first_on_each_node(lambda: prepare(config.data)))
    resolve_cutoffs(config, corpus)
    cut_streams(corpus, config)  # text that is too short is told before anything is measured
    latency = None
    if config.search.latency.source == "measured":
        file = run.path / "latency.yaml"
        latency = broadcast_from_main(lambda: current_costs(config, corpus.counts(), context, file))
    phase = Search(build_supernet(config, corpus), corpus, config, latency)
    trainer = Trainer(phase, run, config.train)

    run.start(provenance(config, corpus.meta, context))
    run.write("flops.yaml", phase.flops.to_dict())
    if latency:
        run.write("latency.yaml", latency.to_dict())
        print(latency.text(config.model.blocks))
    trainer.fit()

    for warning in phase.warnings(trainer.step):
        trainer.say(f"WARNING: {warning}")
    valid = phase.evaluate(run, trainer.step) if trainer.valid is None else trainer.valid
    pattern = phase.supernet.names(phase.supernet.argmax_path())
    outcome = {
        "format": "par-outcome/1",
        "pattern": pattern,
        "valid": valid,
        "train_steps": trainer.step,
        "train_tokens": trainer.tokens,
        "wall_time_s": trainer.wall_seconds,
    }
    run.write(OUTCOME, outcome)
    trainer.say(f"likeliest pattern: {', '.join(pattern)}")
    trainer.say(
        f"{trainer.step} steps, {trainer.tokens:,} training tokens, {trainer.wall_seconds:,.0f} s; "
        f"SuperNet on valid: nll {valid['nll_per_token']:.4f}, perplexity {valid['perplexity']:.2f}"
    )
    trainer.say(f"next: python derive.py {run.path}; python animate.py {run.path}")


if __name__ == "__main__":
    run_command(main)
