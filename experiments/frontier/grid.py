"""Interleaved networks of a grid of sizes, each trained to the end: `python experiments/frontier/grid.py`.

OUT/grid.csv has for each network, on valid: word perplexity, bits per byte, also after the parts of a training that
trials have, and the time per byte of text as a ratio to the reference, that of frontier.yaml. The first call measures
these times; nothing else should run then. Every finished training is a JSON file in OUT and is not repeated. Several
processes may share OUT, each with its own --only. The last line is JSON: the best network of each budget.
"""

import csv
import itertools
import json
import math
import sys
import time
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import (
    FRONTIER,
    Training,
    grid_network,
    measure_networks,
    named_options,
    open_experiment,
    read_table,
)
from experiments.jobs import Jobs, job_parser
from nas.core.errors import run_command
from nas.core.pattern import interleaved
from nas.search.space import Network, make_network

PIECES, WIDTHS, BLOCKS = (2000, 4000, 8000, 16_000, 32_000), (64, 96, 128, 192, 256), (2, 4, 6, 8, 12)
BUDGETS = 0.4, 0.65, 1.0
REFERENCE = make_network(2000, 64, interleaved(12))
COLUMNS = "vocab_size", "d_model", "blocks", "time_per_byte", "word_perplexity", "bits_per_byte", "steps"


def train(network: Network, overrides: list[str]) -> dict:
    """Train a network. Returns its figures on valid, and bits per byte after each rung."""
    from nas.search.trials import RUNGS

    opened, began = open_experiment(FRONTIER, named_options(str(network), overrides)), time.monotonic()
    training = Training(list(network.blocks), *opened)
    rungs = {str(share): training.until(share)["bits_per_byte"] for share, *_ in RUNGS}
    valid = training.end()
    figures = {key: valid[key] for key in ("word_perplexity", "bits_per_byte", "nll_per_token")}
    return figures | {"rungs": rungs, "steps": training.steps, "seconds": time.monotonic() - began}


def measure(networks: list, overrides: list[str]) -> dict[str, float]:
    """{name: the time per byte of text of inference, as a ratio to the reference's}"""
    times = measure_networks([*map(str, networks)], overrides)
    return {name: one["ratio"] for name, one in times.items()}


def write_table(rows: list[tuple[float, Network, dict]], path: Path) -> None:
    """rows: the time of each network, and the result of its training."""
    from nas.search.trials import RUNGS

    shares = [str(share) for share, *_ in RUNGS]
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*COLUMNS, *shares])
        for ratio, network, result in sorted(rows, key=lambda row: row[:2]):
            figures = round(result["word_perplexity"], 2), round(result["bits_per_byte"], 4), result["steps"]
            after = [result.get("rungs", {}).get(share, "") for share in shares]
            table.writerow([*network[:2], len(network.blocks), round(ratio, 3), *figures, *after])


def best_networks(rows: list[tuple[float, Network, dict]]) -> dict[str, list]:
    """{budget: name and word perplexity of the best network}"""
    best = {}
    for budget in BUDGETS:
        fitting = [(result["word_perplexity"], str(network)) for ratio, network, result in rows if ratio <= budget]
        if fitting:
            best[str(budget)] = min(fitting)[::-1]
    return best


def measure_again(grid: Path, trained: Path, out: Path, overrides: list[str]) -> dict[str, list]:
    """Measure the networks of two tables in the same rounds. Writes OUT/grid.csv and OUT/grid.png.

    grid: an earlier grid.csv. trained: a table of report.py, of which the searched networks are drawn. Returns
    best_networks().
    """
    from nas.reporting.figures import networks_figure

    lines, seeds = read_table(grid), [line for line in read_table(trained) if line["name"] == "searched"]
    searched = {line["budget"]: line["network"] for line in seeds}
    results = {}
    for line in lines:
        figures = {key: float(line[key]) for key in COLUMNS[4:6]} | {"steps": int(line["steps"])}
        rungs = {key: float(value) for key, value in line.items() if key not in COLUMNS and value}
        results[grid_network(line)] = figures | {"rungs": rungs}
    ratios = measure([*results, *searched.values()], overrides)
    rows = [(ratios[str(network)], network, result) for network, result in results.items()]
    write_table(rows, out / "grid.csv")
    points = []
    for budget, network in searched.items():
        words = [float(line["valid_word_perplexity"]) for line in seeds if line["budget"] == budget]
        points.append((f"searched, within {budget}: {network}", ratios[network], mean(words)))
    best = min(words for _, _, words in points)
    networks = [
        {**network.to_dict(), "name": str(network), "cost": ratio, "interval": 0.0}
        | {"behind": math.log(result["word_perplexity"]) / math.log(best) - 1}
        for ratio, network, result in rows
    ]
    about = {"reference": REFERENCE.to_dict(), "budget": max(BUDGETS), "reference_cost": 1.0, "trials": []}
    about["unit"] = "time for the same text, reference = 1"
    networks_figure(about | {"networks": networks}, points, out / "grid.png")
    return best_networks(rows)


def main() -> None:
    parser = job_parser(__doc__, "runs/grid", "8000-64-*")
    parser.add_argument("--largest", type=float, default=1.02, help="ratio of the slowest networks that are trained")
    again = "train nothing; measure a grid.csv and the searched networks of a table of report.py, and draw both"
    parser.add_argument("--again", type=Path, nargs=2, metavar=("GRID.csv", "TABLE.csv"), help=again)
    arguments = parser.parse_intermixed_args()
    if arguments.again:
        arguments.out.mkdir(parents=True, exist_ok=True)
        print(json.dumps(measure_again(*arguments.again, arguments.out, arguments.overrides)))
        return
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    sizes = itertools.product(PIECES, WIDTHS, BLOCKS)
    networks = [make_network(pieces, width, interleaved(count)) for pieces, width, count in sizes]
    ratios = jobs.do("latency", lambda: measure(networks, overrides))
    ratios = ratios or dict.fromkeys(map(str, networks), math.nan)  # --only without latency
    networks = [network for network in networks if not ratios[str(network)] > arguments.largest]
    for network in sorted(networks, key=lambda network: -ratios[str(network)]):
        jobs.do(str(network), lambda: train(network, overrides))  # noqa: B023
    rows = [(ratios[str(network)], network, result) for network in networks if (result := jobs.get(str(network)))]
    write_table(rows, arguments.out / "grid.csv")
    print(json.dumps({"missing": len(networks) - len(rows), "best": best_networks(rows)}))


if __name__ == "__main__":
    run_command(main)
