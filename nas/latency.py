"""Measure the latency of each operation on this device, in PyTorch or, with search.latency.source=onnx, in ONNX
Runtime. A search reads the table with search.latency.source=FILE.yaml: with search.method=trials one of --networks.
"""

import argparse
from pathlib import Path

from nas.core.config_loading import load_config
from nas.core.errors import InputError, run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nas.latency", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    out = "file for the table, such as RUN/latency.yaml (default: print it only)"
    networks = "all vocabularies and widths of a search by trials, which needs --out"
    parser.add_argument("--networks", action="store_true", help=networks)
    parser.add_argument("--out", metavar="FILE.yaml", type=Path, help=out)
    arguments = parser.parse_intermixed_args()
    if arguments.out and arguments.out.exists():
        raise InputError(f"--out {arguments.out} exists; name another file, or remove it")
    if arguments.networks and not arguments.out:
        raise InputError("--networks needs --out FILE.yaml")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config, arguments.overrides)

    # Imported only now, because --help and errors in the configuration need no torch.
    from nas.core.files import write_yaml
    from nas.core.provenance import processor
    from nas.costs.measurement import measure_costs
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.search.network_search import open_costs
    from nas.training.auto import auto_lines, resolve_auto
    from nas.training.device import set_up_device

    context = set_up_device(config.seed, config.train)
    if config.search.latency.source != "onnx":  # a table holds milliseconds, whatever the search counts
        config.search.latency.source = "measured"
    if arguments.networks:
        _, _, costs = open_costs(config, arguments.out, context)
        write_yaml(arguments.out, costs.to_dict())
        print(f"written to {arguments.out}")
        return
    corpus = Corpus(prepare(config.data))
    given, config = config, resolve_auto(config, corpus)
    for line in auto_lines(given, config, corpus):
        print(line)
    table = measure_costs(config, corpus.counts(), context)
    device = context.name if context.is_gpu else f"{processor()}, train.threads={context.threads}"
    print(f"d_model {config.model.d_model}, {device}")
    print(table.text(config.model.blocks))
    if arguments.out:
        table.write(arguments.out)
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    run_command(main)
