"""The choice of the shape, replayed on a finished grid: `python experiments/frontier/replay.py library.csv`.

For each budget, the shapes of the table within it are the candidates, and its figures after parts of a training are the
probes. A line has the chosen and the best shape, by how much the chosen one's bits per byte are higher, and how many
true differences are inside the intervals of the law. The first line has the factors of the law's terms, fitted to the
whole table.
"""

import argparse
import csv
from pathlib import Path
from sys import path

import numpy as np

path.insert(0, str(Path(__file__).parents[2]))

from nas.core.config import Config
from nas.core.errors import InputError, run_command
from nas.networks import law
from nas.networks.choice import NORMAL_95, RUNGS, Probes, best_by_probes
from nas.networks.space import NetworkShape

BUDGETS = 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.8, 1.0
FEWEST = 6  # candidates of a replay


class RecordedProbes(Probes):
    """Probes whose figures are known. table: bits per byte by shape and share of a training."""

    def __init__(self, table: dict[NetworkShape, dict[float, float]]):
        self.table, self.valid, self.steps, self.config = table, {}, {0: 10**6}, Config()

    def run(self, shapes: list[NetworkShape], share: float) -> None:
        self.valid |= {(shape, share): {"bits_per_byte": self.table[shape][share]} for shape in shapes}


def read_grid(file: Path) -> tuple[dict, dict, dict]:
    """The rows with rungs: bits per byte by share of a training, bits per byte at the end, and times; by shape."""
    table, end, ratios = {}, {}, {}
    with open(file) as lines:
        for row in csv.DictReader(lines):
            if row.get(str(RUNGS[0][0])):
                shape = NetworkShape(*(int(row[key]) for key in NetworkShape._fields))
                table[shape] = {share: float(row[str(share)]) for share, _ in RUNGS}
                end[shape], ratios[shape] = float(row["bits_per_byte"]), float(row["time_per_byte"])
    if not table:
        raise InputError(f"{file} has no figures after parts of a training; give a grid.csv that grid.py wrote")
    return table, end, ratios


def fitted(table: dict[NetworkShape, dict[float, float]]) -> np.ndarray:
    """The factors of the law's terms, almost without a prior."""
    points = [law.Point(shape, share, bits) for shape, row in table.items() for share, bits in row.items()]
    features, losses = law.Law(points).known.features, np.log([point.loss for point in points])
    precision = features.T @ features / law.NOISE**2
    return np.linalg.solve(precision + np.eye(len(precision)), features.T @ losses / law.NOISE**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="GRID.csv")
    means = "take the means of the law's factors from this table, which should be that of another text"
    parser.add_argument("--means", type=Path, metavar="GRID.csv", help=means)
    arguments = parser.parse_args()
    table, end, ratios = read_grid(arguments.table)
    factors = dict(zip(law.TERMS, fitted(table).round(4).tolist(), strict=True))
    terms = ", ".join(f"{term} {factor}" for term, factor in factors.items() if term)
    print(f"{len(table)} shapes; factors of vocabulary V, width D, blocks N and text T: {terms}")
    if arguments.means:
        law.MEAN = fitted(read_grid(arguments.means)[0])
    before = FEWEST - 1
    for budget in BUDGETS:
        fitting = [shape for shape, ratio in ratios.items() if ratio <= budget]
        if len(fitting) <= before:
            continue
        before, probes = len(fitting), RecordedProbes(table)
        chosen, best = best_by_probes(probes, fitting), min(fitting, key=end.get)
        others = [shape for shape in fitting if shape != chosen]
        differences = np.array([end[shape] / end[chosen] - 1 for shape in others])
        losses, errors = probes.law().predict([chosen, *others]), probes.law().errors(others, chosen)
        inside = np.mean(abs(losses[1:] / losses[0] - 1 - differences) <= NORMAL_95 * errors)
        print(
            f"{budget}: {len(fitting)} shapes, chosen {chosen}, best {best}, {end[chosen] / end[best] - 1:+.2%}; "
            f"{inside:.0%} of the differences to the chosen one are inside their intervals"
        )


if __name__ == "__main__":
    run_command(main)
