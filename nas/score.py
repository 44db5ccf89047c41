"""Score a text with a trained model: `python -m nas.score RUN_DIR FILE`.

RUN_DIR is the run folder of a training, or a folder that nas.export wrote. The program prints the nll of each line in
nats, and the figures of the whole text, by the evaluation protocol (docs/metrics.md). Nothing predicts the first token.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from nas.core.errors import InputError, run_command

SHOWN = 60  # characters of a line that are printed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nas.score", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="a training, or an exported folder")
    parser.add_argument("text", metavar="FILE", help="the text; - reads the standard input")
    parser.add_argument(
        "--per-token",
        action="store_true",
        help="print a JSON line per token: line, token, id, nll (null for the first)",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args()


def read_text(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None


def print_tokens(score, vocabulary) -> None:
    for line, token, nll in zip(score.line_of.tolist(), score.ids, score.nll.tolist(), strict=True):
        text = vocabulary.decode(token[None]).decode("utf-8", errors="replace")
        known = None if math.isnan(nll) else nll
        print(json.dumps({"line": line + 1, "token": text, "id": int(token), "nll": known}, ensure_ascii=False))


def print_lines(score) -> None:
    """Print a row per line of the text, and the figures."""
    import numpy as np

    counts = np.bincount(score.line_of, minlength=len(score.lines))
    print(f"{'line':>6}{'tokens':>8}{'nll':>12}  text")
    for number, (line, count, nll) in enumerate(zip(score.lines, counts, score.line_nll(), strict=True), start=1):
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        print(f"{number:>6}{count:>8}{nll:>12.4f}  {shown}")
    about = score.figures
    print(f"nll {about['nll']:.4f} in {about['tokens']} predicted tokens, {about['nll_per_token']:.4f} per token")
    print(f"perplexity {about['perplexity']:.4f} per token")
    if about["word_perplexity_comparable"]:
        print(f"word perplexity {about['word_perplexity']:.4f}, {about['words']} words")
    else:
        print("no comparable word perplexity: the tokens do not keep the words")
    compared = "" if about["bits_per_byte_comparable"] else " (not comparable: the tokens do not keep the text)"
    print(f"bits per byte {about['bits_per_byte']:.4f}, {about['bytes']} bytes{compared}")


def main() -> None:
    arguments = parse_arguments()
    data = read_text(arguments.text)

    from nas import load_model

    model = load_model(arguments.run, arguments.device)
    score = model.score(data)
    if arguments.per_token:
        print_tokens(score, model.tokenizer)
    else:
        print_lines(score)


if __name__ == "__main__":
    run_command(main)
