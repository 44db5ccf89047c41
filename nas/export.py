"""Write a folder to hand on a trained model: `python -m nas.export RUN_DIR --out DIR`.

DIR gets model.safetensors, config.json, pattern.yaml, pattern.png, vocabulary/ and README.md, a model card. No file
runs code. `nas.load_model(DIR)`, nas.generate and nas.score read it, without the text.
"""

import argparse
from pathlib import Path

from nas.core.errors import run_command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nas.export", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the run folder of a finished training")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new or empty folder")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()

    from nas.inference.exporting import export

    export(arguments.run, arguments.out)
    for file in sorted(arguments.out.rglob("*")):
        if file.is_file():
            print(f"{file.stat().st_size:>12,} bytes  {file}")
    print(f"State a licence in {arguments.out / 'README.md'} before you publish the model.")


if __name__ == "__main__":
    run_command(main)
