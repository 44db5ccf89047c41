"""The choice of the shape, replayed on a finished grid: `python experiments/frontier/replay.py library.csv`.

For each budget, the shapes of the table within it are the candidates, and its figures after parts of a training are the
probes. A line has the chosen and the best shape, and by how much the chosen one's bits per byte are higher. Before them
are the factors of the law's terms, fitted to the whole table with wide priors.
"""

import argparse
import csv
from pathlib import Path
from sys import path

import numpy as np

path.insert(0, str(Path(__file__).parents[2]))

from nas.core.config import Config
from nas.core.errors import run_command
from nas.shapes import law
from nas.shapes.choice import Probes, best_by_probes
from nas.shapes.space import NetworkShape

BUDGETS = 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.8, 1.0
FEWEST = 6  # candidates of a replay
RUNGS = "0.125", "0.25", "0.5"


class RecordedProbes(Probes):
    """Probes whose figures are known. table: bits per byte by shape and share of a training."""

    def __init__(self, table: dict[NetworkShape, dict[float, float]]):
        self.table, self.valid, self.steps, self.config = table, {}, {0: 10**6}, Config()

    def run(self, shapes: list[NetworkShape], share: float) -> None:
        self.valid |= {(shape, share): {"bits_per_byte": self.table[shape][share]} for shape in shapes}


def fitted(table: dict[NetworkShape, dict[float, float]]) -> dict[str, float]:
    """The factors of the law's terms, almost without a prior; the constant and text are left out."""
    before, law.SPREAD = law.SPREAD, np.maximum(law.SPREAD, 1.0)
    points = [law.Point(shape, share, bits) for shape, row in table.items() for share, bits in row.items()]
    factors, law.SPREAD = law.Law(points).factors, before
    return {term: round(float(factor), 4) for term, factor in zip(law.TERMS, factors, strict=True) if {*term} - {"T"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="GRID.csv")
    table, end, ratios = {}, {}, {}
    with open(parser.parse_args().table) as file:
        for row in csv.DictReader(file):
            shape = NetworkShape(*(int(row[key]) for key in NetworkShape._fields))
            if row[RUNGS[0]]:
                table[shape] = {float(share): float(row[share]) for share in RUNGS}
                end[shape], ratios[shape] = float(row["bits_per_byte"]), float(row["time_per_byte"])
    print(f"{len(table)} shapes; factors: {fitted(table)}")
    before = FEWEST - 1
    for budget in BUDGETS:
        fitting = [shape for shape, ratio in ratios.items() if ratio <= budget]
        if len(fitting) <= before:
            continue
        before = len(fitting)
        chosen, best = best_by_probes(RecordedProbes(table), fitting), min(fitting, key=end.get)
        print(f"{budget}: {len(fitting)} shapes, chosen {chosen}, best {best}, {end[chosen] / end[best] - 1:+.2%}")


if __name__ == "__main__":
    run_command(main)
