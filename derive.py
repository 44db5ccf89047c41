"""Stage 2: turn the probabilities pi of a search into one fixed layer pattern, with how sure it is."""

import argparse
from pathlib import Path

from nas.derivation import confidence_table, derive_argmax, doubts, read_costs
from nas.errors import InputError, run_command
from nas.pattern import abbreviate, dump_pattern
from nas.record import read_pi, read_yaml, write_text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the --run folder of a search")
    parser.add_argument("--out", metavar="PATTERN.yaml", type=Path, help="default: RUN_DIR/pattern.yaml")
    parser.add_argument("--method", choices=["argmax"], default="argmax", help="how a block's operation is chosen")
    parser.add_argument("--force", action="store_true", help="replace a pattern file that differs")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    history = read_pi(arguments.run)
    config = read_yaml(arguments.run / "config.yaml")
    costs = read_costs(arguments.run / "flops.yaml", history[-1]["operations"])

    pattern = derive_argmax(history, config, costs)
    last = history[-1]
    pattern["derived_from"] = {"run": str(arguments.run), "method": arguments.method, "step": last["step"]}

    text = dump_pattern(pattern)
    out = arguments.out or arguments.run / "pattern.yaml"
    if out.exists() and out.read_bytes() != text.encode("utf-8") and not arguments.force:
        raise InputError(f"{out} exists and differs; name another file with --out, or replace it with --force")
    write_text(out, text)

    print(confidence_table(pattern))
    if last["step"] < last.get("of_steps", 0):
        print(f"NOTICE: the last logged step of the search is {last['step']} of {last['of_steps']}")
    for doubt in doubts(pattern):
        print(f"WARNING: {doubt}")
    if doubts(pattern):
        print("more steps, more text, or other seeds (seed=2, ...) would tell whether such a choice holds")
    print(f"pattern {abbreviate(pattern['blocks'])}: {', '.join(pattern['blocks'])}")
    print(f"{pattern['flops_ratio_to_interleaved']:.2f} of the interleaved pattern's FLOPs per token")
    print(f"written to {out}")


if __name__ == "__main__":
    run_command(main)
