"""Measure the latency of each operation on this device, in PyTorch or, with search.latency.source=onnx, in ONNX
Runtime, in each vocabulary and width of a search. Searches read the file with search.latency.source=FILE.yaml.
"""

import argparse
from pathlib import Path

from nas.core.config_loading import load_config
from nas.core.errors import InputError, run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nas.latency", description=__doc__)
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    out = "file for the costs, such as RUN/latency.yaml (default: print them only)"
    parser.add_argument("--out", metavar="FILE.yaml", type=Path, help=out)
    arguments = parser.parse_intermixed_args()
    if arguments.out and arguments.out.exists():
        raise InputError(f"--out {arguments.out} exists; name another file, or remove it")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config, arguments.overrides)

    # Imported only now, because --help and errors in the configuration need no torch.
    from nas.core.files import write_yaml
    from nas.core.run_folder import processor
    from nas.costs.cost_table import cost_text
    from nas.costs.flops import with_latency
    from nas.search.candidate_costs import measure_costs, open_candidates
    from nas.training.device import set_up_device

    if config.search.latency.source != "onnx":
        config = with_latency(config, source="measured")
    runtime = set_up_device(config.seed, config.train)
    costs = measure_costs(open_candidates(config, runtime), runtime)
    print(runtime.name if runtime.is_gpu else f"{processor()}, train.threads={runtime.threads}")
    for (size, width), table in costs.tables.items():
        print(f"\n{size} pieces, width {width}\n{cost_text(table, config.model.blocks)}")
    if arguments.out:
        write_yaml(arguments.out, costs.to_dict())
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    run_command(main)
