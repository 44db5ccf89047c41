"""Compare a SuperNet's order of patterns with that of trainings alone.

Command: `python experiments/hybrid/supernet_order.py --search RUN_DIR --alone comparison.csv`, with a finished search
and the file that `python -m nas.compare` writes.

The program prints, for each pattern, the mean nll per token on valid after trainings alone, and the nll by the
SuperNet's weights on parts of valid. The last line is JSON, with Kendall's tau.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import kendall_tau, print_row, read_comparison
from nas.core.errors import InputError, run_command
from nas.core.pattern import expand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", type=Path, required=True, metavar="RUN_DIR", help="a finished search")
    parser.add_argument("--alone", type=Path, required=True, metavar="FILE", help="comparison.csv on the same text")
    arguments = parser.parse_args()

    from nas.search.shared_weights import load_shared_weights

    alone = {row["blocks"]: float(row["valid_nll_mean"]) for row in read_comparison(arguments.alone)}
    weights = load_shared_weights(arguments.search)
    operations = weights.config.search.operations
    kinds = [name.split()[0] for name in operations]  # `window` also means `window 128`, if that is the only window
    indices = {kind: kinds.index(kind) for kind in kinds if kinds.count(kind) == 1}
    indices |= {name: index for index, name in enumerate(operations)}
    if unknown := {name for short in alone for name in expand(short)} - indices.keys():
        raise InputError(f"{arguments.search} has no {min(unknown)}; give the search of {arguments.alone}")
    shared = {short: weights.nll([indices[name] for name in expand(short)]) for short in alone}
    print_row("blocks", "alone", "SuperNet", header=True)
    for short in sorted(alone, key=alone.get):
        print_row(short, f"{alone[short]:.4f}", f"{shared[short]:.4f}")
    tau = kendall_tau(list(alone.values()), [shared[short] for short in alone])
    print(json.dumps({"patterns": len(alone), "tau": round(tau, 3)}))


if __name__ == "__main__":
    run_command(main)
