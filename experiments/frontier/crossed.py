"""Networks of several searches at the costs of each: `python experiments/frontier/crossed.py RUN RUN`.

RUNs are folders of search.py with measured costs, the same reference and the same sizes. Prints a row for each search:
its network, the loss of its trial on valid, and the network's cost by the table of each search, as a ratio to the
reference. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, spell_network
from nas.core.errors import InputError, run_command
from nas.core.files import read_yaml
from nas.core.run_folder import CHOICE, TRIALS
from nas.networks.choice import COSTS
from nas.networks.costs import NetworkCosts
from nas.networks.space import read_network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+")
    runs = parser.parse_args().runs
    tables = {run: NetworkCosts.read(run / TRIALS / COSTS) for run in runs}
    first = tables[runs[0]]
    for run, table in tables.items():
        if not table.device or table.reference != first.reference or table.tables.keys() != first.tables.keys():
            raise InputError(f"{run} must have measured costs, and the reference and the sizes of {runs[0]}")
    headings = [
        f"{table.device['timing']}: reference {table.reference_cost:.3g} ms for 1,000 bytes"
        for table in tables.values()
    ]
    print_row("budget of", "network", "share of a training", "bits per byte", *headings, header=True)
    report = {}
    for run in runs:
        choice, timing = read_yaml(run / CHOICE), tables[run].device["timing"]
        network, trial = read_network(choice["network"]), choice["trial"]
        ratios = [round(table.ratio(network), 3) for table in tables.values()]
        loss, share = round(trial["valid"]["bits_per_byte"], 4), round(trial["step"] / trial["of_steps"], 2)
        print_row(timing, spell_network(choice["network"]), share, loss, *ratios)
        report[str(run)] = {"network": str(network), "bits_per_byte": loss, "ratios": ratios}
    print(json.dumps(report))


if __name__ == "__main__":
    run_command(main)
