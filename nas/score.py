"""Score a text with a trained model: `python -m nas.score RUN_DIR FILE`.

RUN_DIR is the run folder of a training, or a folder that nas.export wrote. The program prints the nll of each line in
nats, and the metrics of the whole text, by the evaluation protocol (docs/metrics.md). Nothing predicts the first token.
"""

import json
import math
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np

from nas.core.errors import run_command
from nas.core.files import read_input


def main() -> None:
    parser = ArgumentParser("python -m nas.score", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="a training, or an exported folder")
    parser.add_argument("text", metavar="FILE", help="the text; - reads the standard input")
    per_token = (
        "print a JSON line per token: line, token, id, nll and, of a mixture, network_nll and part; null for the first"
    )
    parser.add_argument("--per-token", action="store_true", help=per_token)
    parser.add_argument("--lines", action="store_true", help="score each line by itself, as a text of its own")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    arguments = parser.parse_args()
    data = read_input(arguments.text)

    from nas import load_model

    model = load_model(arguments.run, arguments.device)
    score = model.score(data, arguments.lines)
    if not arguments.per_token:
        print(score)
        return
    pieces, starts = model.tokenizer.pieces(), np.diff(score.line_of, prepend=-1) > 0
    for place, token in enumerate(score.ids):
        added = model.tokenizer.tokenizer.begins_with_space and starts[place]  # a space before each line
        text = pieces[token].removeprefix(b" " if added else b"").decode("utf-8", errors="backslashreplace")
        known = {"line": int(score.line_of[place]) + 1, "token": text, "id": int(token), "nll": score.nll[place]}
        if score.network:
            known["network_nll"] = score.network.nll[place]
        if score.parts:
            known["part"] = score.parts[int(score.shares[place].argmax())]
        unknown = dict.fromkeys(known.keys() - {"line", "token", "id"}) if math.isnan(score.nll[place]) else {}
        print(json.dumps(known | unknown))


if __name__ == "__main__":
    run_command(main, only_prints=True)
