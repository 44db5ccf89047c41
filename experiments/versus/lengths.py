"""At which lengths are trials judged best? `python experiments/versus/lengths.py 32000-64-adad ... data.source=FOLDER`.

Trains networks, given by pieces, width and blocks, to each rung of a search. The training is that of
experiments/frontier, of which the first 85% of the steps read short segments. Prints bits per byte on valid at the
lengths of trials, and at full segments and memories. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import FRONTIER, Training, named_network, named_options, open_experiment, print_row
from nas.core.errors import run_command
from nas.search.trials import RUNGS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+", metavar="NETWORK", help="such as 32000-64-adad; and section.key=value")
    given, rows = parser.parse_args().given, {}
    overrides = [text for text in given if "=" in text]
    print_row("network", "share", "at the lengths of trials", "at full lengths", header=True)
    for name in (text for text in given if "=" not in text):
        opened = open_experiment(FRONTIER, named_options(name, overrides))
        training, rows[name] = Training(list(named_network(name).blocks), *opened), {}
        for share, *_ in RUNGS:
            trial = training.until(share)
            full = training.phase.metrics(training.phase.trial_average)
            rows[name][share] = [round(one["bits_per_byte"], 4) for one in (trial, full)]
            print_row(name, share, *rows[name][share])
    print(json.dumps(rows))


if __name__ == "__main__":
    run_command(main)
