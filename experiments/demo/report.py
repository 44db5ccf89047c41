"""A table of several demonstrations: `python experiments/demo/report.py RUN ...`, folders of nas.run.

Bits per byte are those on test, with cache and counts; times are ratios to the usual network, with these too.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, spell_network
from nas.core.errors import InputError, run_command
from nas.core.files import read_yaml
from nas.core.run_folder import FOUND, NO_NETWORK, PLAN, SUMMARY, USUAL

HEADER = "seed", "found", "passes", "found", "usual", "no network", "against usual", "against none", "alone", "time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    runs = parser.parse_args().runs
    if missing := [run for run in runs if not (run / SUMMARY).exists()]:
        raise InputError(f"{missing[0]} has no {SUMMARY}: nas.run has not finished there")
    if len(runs) < 2:
        raise InputError("give at least two runs, because standard deviations need them")
    print_row(*HEADER, header=True)
    differences = []
    for run in runs:
        plan, summary = read_yaml(run / PLAN), read_yaml(run / SUMMARY)
        found, usual, none = (summary[name] for name in (FOUND, USUAL, NO_NETWORK))
        bits = [one["bits_per_byte"] for one in (found, usual, none)]
        alone = found["network_bits_per_byte"] / usual["network_bits_per_byte"] - 1
        differences.append([bits[0] / bits[1] - 1, bits[0] / bits[2] - 1, alone])
        print_row(
            plan["seed"],
            spell_network(found),
            f"{plan['train']['epochs']:.3g}",
            *(f"{value:.4f}" for value in bits),
            *(f"{difference:+.1%}" for difference in differences[-1]),
            f"{found['time_ratio_to_usual']:.2f}",
        )
    for name, values in zip(("usual", "no network", "usual, networks alone"), np.transpose(differences), strict=True):
        better = f"found is better in {(values < 0).sum()} of {len(values)}"
        error = values.std(ddof=1) / len(values) ** 0.5
        print(f"against {name}: {better}, {values.mean():+.2%} ± {error:.2%}")


if __name__ == "__main__":
    run_command(main)
