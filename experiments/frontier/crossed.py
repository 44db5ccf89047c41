"""Networks of several searches at the costs of each: `python experiments/frontier/crossed.py RUN RUN`.

RUNs are folders of search.py with measured costs of the same reference. Prints a row for each search: its network, and
the network's cost by the table of each search, as a ratio to the reference. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row
from nas.core.errors import InputError, run_command
from nas.core.files import read_yaml
from nas.core.pattern import abbreviate
from nas.core.run_folder import CHOICE, TRIALS
from nas.networks.choice import COSTS
from nas.networks.costs import NetworkCosts
from nas.networks.space import read_network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+")
    runs = parser.parse_args().runs
    tables = {run: NetworkCosts.read(run / TRIALS / COSTS) for run in runs}
    if any(not table.device for table in tables.values()):
        raise InputError("the costs of a search are not measured: search.latency.source must not be flops or none")
    headings = [f"{table.device['timing']}, {table.reference_cost:.3g} ms" for table in tables.values()]
    print_row("budget of", "network", *headings, header=True)
    report = {}
    for run in runs:
        network, timing = read_network(read_yaml(run / CHOICE)["network"]), tables[run].device["timing"]
        ratios = [round(table.ratio(network), 3) for table in tables.values()]
        print_row(timing, f"{network.vocab_size:,}, {network.d_model}, `{abbreviate(network.blocks)}`", *ratios)
        report[str(run)] = {"network": str(network), "ratios": ratios}
    print(json.dumps(report))


if __name__ == "__main__":
    run_command(main)
