"""What orders networks of one budget as whole trainings do? `python experiments/versus/ranking.py --out runs/versus`.

The networks are those that the random searches of run.py drew with the seeds 1 and 2, in the same OUT. All train to the
end; their losses on valid are the truth. The judges are FLOPs, the vocabulary, the number of attention blocks, the
losses after each rung, and the surrogate of the search: before any trial, and after each rung. Kendall's tau is that of
all pairs, and that of pairs with the same vocabulary. The last line is JSON.
"""

import json
import sys
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row
from experiments.jobs import Jobs, job_parser
from experiments.versus.run import draw_networks, open_space, open_trials, seeded, train
from nas.core.errors import run_command
from nas.search.space import Network, make_network

SEEDS = 1, 2  # of the random searches
DRAWS = 1000  # of the bootstrap that gives the standard error of tau


def finish(out: Path, overrides: list[str], seed: int) -> dict:
    """Train the networks of a random search to the end. Returns their names, FLOPs, and bits per byte on valid."""
    from nas.core.run_folder import TRIALS
    from nas.costs.flops import count_flops
    from nas.data.corpus import bytes_per_token
    from nas.search.space import with_sizes
    from nas.search.trials import RUNGS
    from nas.training.passes import resolve_auto

    config, corpora, shapes, costs, runtime = open_space(out, seeded(overrides, seed))
    networks, folder = draw_networks(config, costs, shapes, RUNGS[0].networks), out / f"random-{seed}" / TRIALS
    trials = open_trials(config, corpora, folder, runtime)
    for share, *_ in RUNGS:
        trials.run(networks, share)
    rungs = {str(network): {} for network in networks}
    for point in trials.points:
        rungs[str(point.network)][str(point.share)] = point.loss
    results, found = train(trials, networks), []
    for network, result in zip(networks, results, strict=True):
        corpus = corpora[network.vocab_size]
        sized = resolve_auto(with_sizes(config, *network[:2]), corpus)
        flops = count_flops(sized, corpus.counts()).cost(network.blocks) / bytes_per_token(corpus)
        about = {"flops": flops, "rungs": rungs[str(network)], "bits_per_byte": result["valid"]["bits_per_byte"]}
        found.append({**network.to_dict(), **about, "ratio": costs.ratio(network)})
    return {"networks": found}


def report(found: list[dict]) -> dict:
    """Print the tables. found: of finish(). Returns the content of the last line."""
    from scipy.stats import kendalltau

    from nas.search.surrogate import Point, Surrogate
    from nas.search.trials import RUNGS

    networks: list[Network] = [make_network(one["vocab_size"], one["d_model"], one["blocks"]) for one in found]
    truth, judges, points = [one["bits_per_byte"] for one in found], {}, []
    judges["FLOPs (more is better)"] = [-one["flops"] for one in found]
    judges["vocabulary (larger is better)"] = [-one["vocab_size"] for one in found]
    judges["attention blocks (more is better)"] = [-one["blocks"].count("attention") for one in found]
    judges["surrogate before trials"] = Surrogate([], networks).predict(networks).tolist()
    for share, *_ in RUNGS:
        losses = [one["rungs"][str(share)] for one in found]
        points += [Point(network, share, loss) for network, loss in zip(networks, losses, strict=True)]
        judges[f"loss after {share:g}"] = losses
        judges[f"surrogate after {share:g}"] = Surrogate(points, networks).predict(networks).tolist()
    print_row("network", "bits per byte", *judges, header=True)
    for index in np.argsort(truth):
        print_row(networks[index], f"{truth[index]:.4f}", *(f"{values[index]:.4g}" for values in judges.values()))
    print()
    taus, within, count = {}, {}, len(truth)
    draws = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    print_row("judge", "Kendall's tau", "within vocabularies", "its best, behind the best", header=True)
    for name, values in judges.items():
        taus[name] = round(kendalltau(values, truth).statistic, 3)
        within[name] = round(tau_within(values, truth, [network.vocab_size for network in networks]), 3)
        pairs = np.array([values, truth])
        error = np.nanstd([kendalltau(*pairs[:, places]).statistic for places in draws])
        behind = truth[int(np.argmin(values))] / min(truth) - 1
        print_row(name, f"{taus[name]:.3f} ± {error:.3f}", f"{within[name]:.3f}", f"{behind:.2%}")
    return {"tau": taus, "within": within}


def tau_within(values: list, truth: list, groups: list) -> float:
    """Mean agreement, from -1 to 1, of the order of the pairs in the same group; a tie counts 0."""
    pairs = [pair for pair in combinations(range(len(truth)), 2) if groups[pair[0]] == groups[pair[1]]]
    return float(np.mean([np.sign((values[i] - values[j]) * (truth[i] - truth[j])) for i, j in pairs]))


def main() -> None:
    arguments = job_parser(__doc__, "runs/versus", "truth-1").parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides, arguments.only), arguments.overrides
    found = []
    for seed in SEEDS:
        done = jobs.do(f"truth-{seed}", lambda: finish(arguments.out, overrides, seed))  # noqa: B023
        found += done["networks"] if done else []
    print(json.dumps(report(found) if found else {"missing": len(SEEDS)}))


if __name__ == "__main__":
    run_command(main)
