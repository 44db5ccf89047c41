"""Write a folder to hand on a trained model: `python -m nas.export RUN_DIR --out DIR`.

DIR gets pattern.yaml, pattern.png, vocabulary/ and README.md, a model card, and:

- --format par: model.safetensors and config.json. `nas.load_model(DIR)`, nas.generate and nas.score read it, without
  the text. No file runs code.
- --format par-int8: the same with weights of int8, a quarter of the size. It evaluates both on valid, so it needs the
  text.
- --format onnx: model.onnx and start.npz for ONNX Runtime, without par-nas and PyTorch. The card tells how to run it.
- --format onnx-int8: the same with weights of int8. It evaluates both graphs on valid, so it needs the text.
- --format transformers: a folder that `AutoModelForCausalLM` and `AutoTokenizer` of Transformers open, with its code.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from nas.core.errors import run_command

FORMATS = "par", "par-int8", "onnx", "onnx-int8", "transformers"


def main() -> None:
    parser = ArgumentParser("python -m nas.export", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="the run folder of a finished training")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="(default: %(default)s)")
    arguments = parser.parse_args()

    from nas.inference.exporting import export

    for line in export(arguments.run, arguments.out, arguments.format):
        print(line)
    for file in sorted(arguments.out.rglob("*")):
        if file.is_file():
            print(f"{file.stat().st_size:>12,} bytes  {file}")
    print(f"State a licence in {arguments.out / 'README.md'} before you publish the model.")


if __name__ == "__main__":
    run_command(main)
