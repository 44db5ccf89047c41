"""What orders networks of one budget as whole trainings do? `python experiments/ranking/run.py`.

Random networks of one latency train to the end; their losses on valid are the truth. The judges are FLOPs, the number
of attention blocks, the losses after each rung of a search by trials, and its law after each rung. Every finished job
is a JSON file in OUT and is not repeated. Several processes may share OUT, each with its own --only. The last line is
JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.frontier.grid import CONFIG, REFERENCE, train
from experiments.helpers import kendall_tau, print_row
from experiments.jobs import Jobs, job_parser
from experiments.versus.run import random_networks
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.networks.space import Network, read_network

NETWORKS, BAND = 24, 0.95  # networks, and their least cost as a share of the budget
DRAWS = 1000  # of the bootstrap that gives the standard error of tau


def draw_networks(overrides: list[str]) -> list[dict]:
    """Random networks, with their costs as ratios to the reference in time and FLOPs."""
    from dataclasses import replace

    from nas.networks.choice import candidate_corpora
    from nas.networks.costs import network_costs
    from nas.training.device import set_up_device

    config = load_config(CONFIG, overrides)
    context, (corpora, shapes) = set_up_device(config.seed, config.train), candidate_corpora(config)
    times = network_costs(config, corpora, shapes, REFERENCE, context)
    config.search.latency = replace(config.search.latency, source="flops")
    flops, budget = network_costs(config, corpora, shapes, REFERENCE, context), config.search.latency.target
    generator = np.random.default_rng(config.seed)
    networks = random_networks(config, times, shapes, budget * times.reference, NETWORKS, generator, BAND)
    return [{**network.to_dict(), "time": times.ratio(network), "flops": flops.ratio(network)} for network in networks]


def report(networks: list[Network], drawn: list[dict], results: list[dict]) -> dict:
    """Print the tables. results: of grid.train(). Returns the content of the last line."""
    from nas.networks.law import Law, Point
    from nas.networks.trials import RUNGS

    truth, judges, points = [result["bits_per_byte"] for result in results], {}, []
    judges["FLOPs (more is better)"] = [-one["flops"] for one in drawn]
    judges["attention blocks (more is better)"] = [-one["blocks"].count("attention") for one in drawn]
    for share, _ in RUNGS:
        losses = [result["rungs"][str(share)] for result in results]
        points += [Point(network, share, loss) for network, loss in zip(networks, losses, strict=True)]
        judges[f"loss after {share:g}"] = losses
        judges[f"law after {share:g}"] = Law(points, networks).predict(networks).tolist()
    print_row("network", "bits per byte", *judges, header=True)
    for index in np.argsort(truth):
        print_row(networks[index], f"{truth[index]:.4f}", *(f"{values[index]:.4f}" for values in judges.values()))
    print()
    taus, count = {}, len(truth)
    draws = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    print_row("judge", "Kendall's tau", "its best, behind the best", header=True)
    for name, values in judges.items():
        taus[name] = round(kendall_tau(values, truth), 3)
        error = np.nanstd([kendall_tau(np.array(values)[places], np.array(truth)[places]) for places in draws])
        behind = truth[int(np.argmin(values))] / min(truth) - 1
        print_row(name, f"{taus[name]:.3f} ± {error:.3f}", f"{behind:.2%}")
    return {"tau": taus}


def main() -> None:
    arguments = job_parser(__doc__, "runs/ranking", "32000-*").parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    drawn = jobs.do("networks", lambda: {"networks": draw_networks(overrides)})["networks"]
    networks = [read_network(one) for one in drawn]
    results = [jobs.do(str(network), lambda: train(network, overrides)) for network in networks]  # noqa: B023
    if None in results:
        print(json.dumps({"missing": results.count(None)}))
    else:
        print(json.dumps(report(networks, drawn, results)))


if __name__ == "__main__":
    run_command(main)
