"""Cache and counts without a network: `python experiments/outside/no_network.py --out runs/frontier`.

Valid decides the vocabulary and the order of the counts. There is nothing random, so there is one result for each text.
"""

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.frontier.problem import open_text, options_of_text, read_arguments, read_run, results_of
from experiments.frontier.run import call
from experiments.helpers import FRONTIER
from nas.core.errors import run_command
from nas.core.run_folder import run_options

PATTERN = Path(__file__).parents[1] / "patterns" / "no-network.yaml"
ORDERS = 4, 5, 6, 7, 8


def count(folder: Path, options: list[str], sizes: list[int]) -> dict:
    found = []
    for size, order in product(sizes, ORDERS):
        own = [*options, f"data.vocab_size={size}", f"mixture.counts={order}"]
        run = folder / f"none-{size}-{order}"
        call("retrain.py", PATTERN, FRONTIER, *run_options(run), *own)
        found.append({"pieces": size, "order": order, "ratio": None} | read_run(run))
    return min(found, key=lambda one: one["valid"]["bits_per_byte"])


def main() -> None:
    arguments = read_arguments(__doc__)
    jobs = results_of(arguments)
    for text in arguments.texts:
        _, corpora, *_ = open_text(arguments, text)
        options = options_of_text(text, arguments.overrides)
        jobs.do(f"{text},,none,1", lambda: count(arguments.out / text, options, sorted(corpora)))  # noqa: B023


if __name__ == "__main__":
    run_command(main)
