"""Stage 1: train a SuperNet and the probabilities pi of each block's operations on a text."""

import argparse

from nas.config import add_arguments, load_config
from nas.errors import run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config, arguments.overrides)

    # Imported only now: --help and errors of the configuration need not wait for torch.
    from nas.device import set_up
    from nas.ranks import process_group
    from nas.record import open_run

    run = open_run(arguments.run, config, "search", arguments.resume)
    machine = set_up(config.seed, config.train)
    with process_group(machine.device):
        search(config, run, machine)


def search(config, run, machine) -> None:
    """On each rank of the run."""
    from nas.assembly import build_supernet, settle_cutoffs
    from nas.data import Corpus
    from nas.latency import current_costs
    from nas.prepare import prepare
    from nas.ranks import broadcast_from_main, first_on_each_machine
    from nas.record import OUTCOME, provenance
    from nas.searching import Search, cut_streams
    from nas.trainer import Trainer

    corpus = Corpus(first_on_each_machine(lambda: prepare(config.data)))
    settle_cutoffs(config, corpus)
    cut_streams(corpus, config)  # text that is too short is told before anything is measured
    latency = None
    if config.search.latency.source == "measured":
        latency = broadcast_from_main(lambda: current_costs(config, corpus.counts(), run.path / "latency.yaml"))
    phase = Search(build_supernet(config, corpus), corpus, config, latency)
    trainer = Trainer(phase, run, config.train)

    run.start(provenance(config, corpus.meta, machine))
    run.write("flops.yaml", phase.flops.content())
    if latency:
        run.write("latency.yaml", latency.content())
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
