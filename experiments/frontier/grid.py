"""Interleaved networks of a grid of sizes, each trained to the end: `python experiments/frontier/grid.py`.

OUT/grid.csv has for each network, on valid: word perplexity, bits per byte, also after the parts of a training that
trials have, and the time per byte of text as a ratio to the reference, that of frontier.yaml. --latency measures these
times; nothing else should run then. Every finished training is a JSON file in OUT and is not repeated. Several
processes may share OUT, each with its own --only. The last line is JSON: the best network of each budget.
"""

import csv
import itertools
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import Training, open_experiment
from experiments.jobs import Jobs, job_parser
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.files import read_yaml
from nas.core.pattern import interleaved
from nas.core.run_folder import CHOICE, FOUND, RESULTS, SEARCH
from nas.networks.space import Network, make_network, options_of

CONFIG = Path(__file__).with_name("frontier.yaml")
PIECES, WIDTHS, BLOCKS = (2000, 4000, 8000, 16_000, 32_000), (64, 96, 128, 192, 256), (2, 4, 6, 8, 12)
BUDGETS = 0.4, 0.65, 1.0
REFERENCE = make_network(2000, 64, interleaved(12))
ROUNDS = 20


def options(network: Network, overrides: list[str]) -> list[str]:
    return [*options_of(network, load_config(CONFIG, [])), *overrides]


def train(network: Network, overrides: list[str]) -> dict:
    """Train a network. Returns its figures on valid, and bits per byte after each rung."""
    from nas.networks.trials import RUNGS

    opened, began = open_experiment(CONFIG, options(network, overrides)), time.monotonic()
    training = Training(list(network.blocks), *opened)
    rungs = {str(share): training.until(share)["bits_per_byte"] for share, *_ in RUNGS}
    valid = training.end()
    figures = {key: valid[key] for key in ("word_perplexity", "bits_per_byte", "nll_per_token")}
    return figures | {"rungs": rungs, "steps": training.steps, "seconds": time.monotonic() - began}


def measure(networks: list[Network], overrides: list[str]) -> dict[str, float]:
    """{name: the time per byte of text of inference, as a ratio to the reference's}"""
    from nas.costs.latency import text_times

    opened = {}
    for network in dict.fromkeys([REFERENCE, *networks]):  # ratios are to the first one
        config, corpus, context = open_experiment(CONFIG, options(network, overrides))
        opened[network] = list(network.blocks), config, corpus
    return {str(network): found["ratio"] for network, found in text_times(opened, context, ROUNDS).items()}


def report(jobs: Jobs, networks: list[Network], ratios: dict[str, float], folders: list[Path]) -> dict:
    """Write grid.csv of the finished trainings, and grid.png. Returns the content of the last line: the best ones."""
    from nas.networks.trials import RUNGS

    shares = [str(share) for share, *_ in RUNGS]
    rows = [(ratios[str(network)], network, result) for network in networks if (result := jobs.get(str(network)))]
    with open(jobs.folder / "grid.csv", "w", newline="") as file:
        table, best = csv.writer(file), {}
        head = ["vocab_size", "d_model", "blocks", "time_per_byte", "word_perplexity", "bits_per_byte", "steps"]
        table.writerow([*head, *shares])
        for ratio, network, result in sorted(rows, key=lambda row: row[:2]):
            figures = round(result["word_perplexity"], 2), round(result["bits_per_byte"], 4), result["steps"]
            after = [result.get("rungs", {}).get(share, "") for share in shares]
            table.writerow([*network[:2], len(network.blocks), round(ratio, 3), *figures, *after])
    for budget in BUDGETS:
        fitting = [(result["word_perplexity"], str(network)) for ratio, network, result in rows if ratio <= budget]
        if fitting:
            best[str(budget)] = min(fitting)[::-1]
    if folders:
        draw(rows, folders, jobs.folder / "grid.png")
    return {"missing": len(networks) - len(rows), "best": best}


def draw(rows: list[tuple], folders: list[Path], path: Path) -> None:
    """Draw the grid over its times, and the networks that nas.run found. folders: of nas.run."""
    from nas.reporting.networks_figure import networks_figure

    choices = [read_yaml(folder / SEARCH / CHOICE) for folder in folders]
    found = [read_yaml(folder / FOUND / RESULTS) for folder in folders]
    trained = [
        (f"found within {one['budget']:g}", one["ratio"] * one["reference_cost"], result["valid"]["word_perplexity"])
        for one, result in zip(choices, found, strict=True)
    ]
    best, first = min(words for _, _, words in trained), choices[0]
    networks = [
        {
            **network.to_dict(),
            "name": str(network),
            "cost": ratio * first["reference_cost"],
            "behind": math.log(result["word_perplexity"]) / math.log(best) - 1,
            "interval": 0.0,
        }
        for ratio, network, result in rows
    ]
    about = {key: first[key] for key in ("reference", "budget", "unit", "reference_cost")}
    networks_figure(about | {"networks": networks, "trials": []}, trained, path)


def main() -> None:
    parser = job_parser(__doc__, "runs/grid", "8000-64-*")
    parser.add_argument("--latency", action="store_true", help="measure the latencies, which choose what is trained")
    parser.add_argument("--largest", type=float, default=1.02, help="ratio of the slowest networks that are trained")
    found = "folder of a finished nas.run, to draw in OUT/grid.png; may be repeated"
    parser.add_argument("--found", type=Path, action="append", default=[], metavar="FOLDER", help=found)
    arguments = parser.parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    sizes = itertools.product(PIECES, WIDTHS, BLOCKS)
    networks = [make_network(pieces, width, interleaved(count)) for pieces, width, count in sizes]
    if arguments.latency:
        (arguments.out / "latency.json").unlink(missing_ok=True)
    ratios = jobs.do("latency", lambda: measure(networks, overrides))
    networks = [network for network in networks if ratios[str(network)] <= arguments.largest]
    for network in sorted(networks, key=lambda network: -ratios[str(network)]):
        jobs.do(str(network), lambda: train(network, overrides))  # noqa: B023
    print(json.dumps(report(jobs, networks, ratios, arguments.found)))


if __name__ == "__main__":
    run_command(main)
