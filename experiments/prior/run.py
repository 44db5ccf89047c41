"""Train random networks on texts for the surrogate's prior: `python experiments/prior/run.py --out runs/prior`.

TEXTS are not those of the evidence (experiments/frontier). Each network is judged after the shares of the search's
rungs, and the first half of them at the end too, alone and with its mixture. OUT/losses.csv gets a line for each time.
Trainings that have ended are not repeated.
"""

import argparse
import csv
import io
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import FRONTIER, open_space, open_trials
from experiments.prior.draws import random_networks
from nas.core.errors import run_command
from nas.core.files import write_text
from nas.core.pattern import abbreviate

TEXTS = {"runs/texts/kernel": 20, "stdlib": 10}  # and the number of networks
COLUMNS = "text", "vocab_size", "d_model", "blocks", "share", "bits_per_byte", "mixture"
LEAST = 0.1  # cost of a network, as a share of the reference's
OPTIONS = [
    "train.epochs=1",
    "search.latency.source=flops",
    "search.latency.target=1",
    "search.vocab_size=auto",
    "search.d_model=auto",
    "search.operations=[attention,dense,dense 8x,conv,window,identity]",
]


def train(text: str, out: Path, count: int) -> list[tuple]:
    """The losses of random networks on a text."""
    from nas.search.trials import RUNGS

    name = Path(text).name
    config, corpora, shapes, costs, runtime = open_space(FRONTIER, out / name, [*OPTIONS, f"data.source={text}"])
    trials = open_trials(config, corpora, out / name, runtime)
    tables = {shape: costs.tables[shape] for shape in shapes}
    networks = list(islice(random_networks(config, tables, costs.reference_cost, LEAST), count))
    rows = []
    for share in *(rung.share for rung in RUNGS), 1.0:
        trials.run(own := networks if share < 1 else networks[: count // 2], share)
        for network in own:
            results = trials.results[network]
            losses = (of["valid"]["bits_per_byte"] for of in (results["network"], results))
            rows.append((name, *network[:2], abbreviate(network.blocks), share, *(round(loss, 5) for loss in losses)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/prior"), help="folder of the trainings")
    arguments = parser.parse_args()
    rows = [COLUMNS]
    for text, count in TEXTS.items():
        rows += train(text, arguments.out, count)
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(rows)
        write_text(arguments.out / "losses.csv", file.getvalue())


if __name__ == "__main__":
    run_command(main)
