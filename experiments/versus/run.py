"""Three searches of equal time, side by side: `python experiments/versus/run.py --out runs/versus`.

trials: search.py. random: random networks of the same space and budget, and the same rungs, but the losses alone
decide. gumbel: the method of the paper at the vocabulary and width that `trials` chose, with its latency term,
for as many seconds. Each search runs with each of SEEDS, and so does the training of the network that it finds. All use
the costs that are measured first; nothing else should run then.
Every finished job is a JSON file in OUT and is not repeated. The last line is JSON.
"""

import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from itertools import islice, product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import FRONTIER, print_row, spell_network
from experiments.jobs import Jobs, job_parser
from nas.core.config_loading import load_config
from nas.core.errors import RunError, run_command
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import interleaved, shape_options
from nas.core.run_folder import CHOICE, CONFIG, LATENCY, OUTCOME, TRIALS, run_options
from nas.search.strategy import Strategy, successive_halving

ROOT = Path(__file__).parents[2]
SPACES = {
    "large": [],
    "paper": ["search.vocab_size=[]", "search.d_model=[]", "search.operations=[attention,dense,identity]"],
}
SEARCHES, SEEDS = ("trials", "random", "gumbel"), (1, 2, 3, 4, 5)
BAND = 0.95  # least cost of a random network, as a share of the budget
RATE_STEPS = 20, 60  # of the paper's method, to measure its seconds per step


def call(script: str, *arguments) -> None:
    if status := subprocess.run([sys.executable, ROOT / script, *map(str, arguments)]).returncode:
        raise RunError(f"{script} ended with exit status {status}; its message stands above")


def seeded(overrides: list[str], seed: int) -> list[str]:
    return [*overrides, f"seed={seed}"]


def open_space(out: Path, overrides: list[str]):
    """(configuration, texts by vocabulary, candidates for vocabulary and width, costs, device)."""
    from nas.search.candidate_costs import find_costs, open_candidates
    from nas.search.network_search import COSTS
    from nas.training.device import set_up_device

    config = load_config(FRONTIER, overrides)
    runtime = set_up_device(config.seed, config.train)
    candidates = open_candidates(config, runtime)
    costs = find_costs(candidates, out / COSTS, runtime, keep=True)
    if not (out / COSTS).exists():
        write_yaml(out / COSTS, costs.to_dict())
    return config, candidates.corpora, candidates.shapes, costs, runtime


def search_by_trials(out: Path, overrides: list[str], seed: int) -> dict:
    """The network, its cost as a ratio to the reference's, the seconds of the trials, and the folder of its own."""
    from nas.search.network_search import COSTS

    run = out / f"trials-{seed}"
    (run / TRIALS).mkdir(parents=True, exist_ok=True)
    shutil.copy(out / COSTS, run / TRIALS)
    call("search.py", FRONTIER, *run_options(run), *seeded(overrides, seed))
    choice = read_yaml(run / CHOICE)
    found = {"network": choice["network"], "ratio": choice["ratio"], "seconds": choice["wall_time_s"]}
    return found | {"trial": choice["trial"]["folder"]}


def draw_networks(config, costs, shapes, count: int) -> list:
    """Random networks of BAND to 1 of the budget."""
    from experiments.versus.draws import random_networks

    tables = {shape: costs.tables[shape] for shape in shapes}
    limit = config.search.latency.target * costs.reference_cost
    return list(islice(random_networks(config, tables, limit, BAND), count))


class GivenStrategy(Strategy):
    """The strategy of the search among given networks alone."""

    def add_neighbours(self):
        pass


class RandomStrategy(GivenStrategy):
    """Networks in their order, of which those with the lowest losses go on, without a surrogate."""

    def propose(self, count):
        return self.untried()[:count]

    def likely_best(self, surrogate, networks, rung):
        return self.in_order(networks)[: rung.networks]

    def with_best_untried(self, surrogate, networks, count):
        return networks

    def choose(self, networks):
        return self.in_order(networks)[0]

    def in_order(self, networks):
        last = {point.network: point.loss for point in self.trials.points}
        return sorted(networks, key=last.__getitem__)


def search_at_random(out: Path, overrides: list[str], seed: int) -> dict:
    """The network that wins successive halving without a surrogate, and the seconds of the trials."""
    from nas.search.trials import RUNGS

    config, corpora, shapes, costs, runtime = open_space(out, seeded(overrides, seed))
    trials = open_trials(config, corpora, out / f"random-{seed}" / TRIALS, runtime)
    networks = draw_networks(config, costs, shapes, RUNGS[0].networks)
    best = successive_halving(RandomStrategy(trials, costs, config.search.latency.target, networks))
    seconds = sum(result["wall_time_s"] for result in trials.results.values())
    return {"network": best.to_dict(), "ratio": costs.ratio(best), "seconds": seconds}


def open_trials(config, corpora, folder: Path, runtime):
    from nas.jobs.engines import open_engine
    from nas.search.trials import Trials

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG).exists():
        write_yaml(folder / CONFIG, {"stage": "search", **asdict(config)})
    return Trials(config, corpora, folder, runtime, open_engine(config, runtime, folder))


def search_by_gumbel(out: Path, overrides: list[str], seed: int, trials: dict) -> dict:
    """The network of the paper's method within the budget, after as many seconds as the trials of the same seed."""
    from nas.search.space import NetworkCosts, make_network, read_network

    config, _, _, costs, _ = open_space(out, seeded(overrides, seed))
    choice, options = (read_yaml(out / f"trials-{seed}" / name) for name in (CHOICE, CONFIG))
    sizes, network = trials["network"] | {"heads": options["model"]["heads"]}, read_network(trials["network"])
    target = round(choice["budget"] / choice["interleaved_ratio"], 4)  # the reference is interleaved of these sizes
    own = [*seeded(overrides, seed), *shape_options(sizes), "search.vocab_size=[]", "search.d_model=[]"]
    own += ["search.method=gumbel", f"search.latency.target={target}", "train.checkpoint_every=100000"]
    reference = make_network(*network[:2], interleaved(config.model.blocks))
    known = NetworkCosts({network[:2]: costs.tables[network[:2]]}, reference)

    def search(steps: int, run: Path) -> float:
        """Search for this number of steps. Returns the seconds."""
        if not run.exists():
            run.mkdir()
            write_yaml(run / LATENCY, known.to_dict())
        call("search.py", FRONTIER, *run_options(run), *own, f"train.steps={steps}")
        return read_yaml(run / OUTCOME)["wall_time_s"]

    walls, run = [search(steps, out / f"gumbel-{seed}-{steps}-steps") for steps in RATE_STEPS], out / f"gumbel-{seed}"
    rate = (walls[1] - walls[0]) / (RATE_STEPS[1] - RATE_STEPS[0])
    seconds = search(round(RATE_STEPS[1] + max(0.0, trials["seconds"] - walls[1]) / rate), run)
    call("derive.py", run, "--out", run / "pattern.yaml", "--force", "--latency-budget", target)
    network = make_network(*network[:2], read_yaml(run / "pattern.yaml")["blocks"])
    return {"network": network.to_dict(), "ratio": costs.ratio(network), "seconds": seconds}


def train(trials, networks: list) -> list[dict]:
    """Train networks to the end, from their trials on if there are any. Returns their results."""
    from nas.jobs.tasks import run_tasks

    tasks = [trials.task(network, None, trials.folder) for network in networks]
    if failed := run_tasks(tasks, trials.engine):
        raise RunError(f"trainings failed: {failed}")
    return [read_yaml(task.result) for task in tasks]


def finish(out: Path, overrides: list[str], search: str, seed: int, found: dict) -> dict:
    """Train what a search found. Returns its figures."""
    from nas.search.space import read_network

    config, corpora, _, _, runtime = open_space(out, seeded(overrides, seed))
    trials = open_trials(config, corpora, out / f"{search}-{seed}" / TRIALS, runtime)
    (results,) = train(trials, [read_network(found["network"])])
    return {split: results[split] for split in ("valid", "test")}


def report(jobs: Jobs) -> dict:
    """Print tables of the finished trainings, for valid and test. Returns the content of the last line.

    p: Welch's test of each search against `trials`; some searches vary much more than others, which Dunnett's test does
    not allow. p of ranks: the exact test of Mann and Whitney, in which a search that finds no network is behind all
    others. Both are multiplied by the number of other searches (Bonferroni).
    """
    from scipy import stats

    from nas.search.space import read_network

    losses, failures, table = {}, Counter(), {}
    print_row("search", "seed", "network", "word perplexity on valid", "on test", "search, seconds", header=True)
    for name in SEARCHES:
        losses[name] = {"valid": [], "test": []}
        for seed in SEEDS:
            found, result = jobs.get(f"{name}-{seed}"), jobs.get(f"{name}-{seed}-trained")
            if result or (found and not found["network"]["blocks"]):
                words = [result[split]["word_perplexity"] for split in ("valid", "test")] if result else []
                for split, value in zip(losses[name], words, strict=False):
                    losses[name][split].append(math.log(value))
                failures[name] += not words
                network, figures = read_network(found["network"]), [f"{value:,.1f}" for value in words] or ["none", ""]
                short = spell_network(network.to_dict())
                print_row(name, seed, short, *figures, f"{found['seconds']:.0f}")
    print()
    head = "split", "search", "trained", "word perplexity", "spread of searches", "behind trials", "p", "p of ranks"
    print_row(*head, header=True)
    for split, name in product(("valid", "test"), SEARCHES):
        own, control = losses[name][split], losses["trials"][split]
        count, tests = len(own) + failures[name], [None, None]
        if name != "trials" and min(count, len(control)) > 1:
            failed = [math.log(sys.float_info.max) + number for number in range(failures[name])]
            tests[1] = stats.mannwhitneyu([*own, *failed], control, method="exact").pvalue
            if len(own) == count:  # the mean of a search that failed at times says nothing
                tests[0] = stats.ttest_ind(own, control, equal_var=False).pvalue
        ps = [None if p is None else min(1.0, (len(SEARCHES) - 1) * float(p)) for p in tests]
        if count and control:
            mean = float(np.exp(np.mean(own))) if own else None
            behind = mean and float(np.expm1(np.mean(own) - np.mean(control)))
            table[f"{name}, {split}"] = {"searches": count, "word_perplexity": mean, "behind": behind}
            table[f"{name}, {split}"] |= {"p": ps[0], "p_ranks": ps[1]}
            spread = f"{np.std(own, ddof=1):.1%}" if len(own) > 1 else ""
            figures = [f"{mean:,.1f}", spread, f"{behind:+.1%}"] if own else ["", "", ""]
            print_row(split, name, f"{len(own)} of {count}", *figures, *(p if p is None else f"{p:.4f}" for p in ps))
    return table


def main() -> None:
    parser = job_parser(__doc__, "runs/versus", "trials-*,random-[12]*")
    parser.add_argument("--space", choices=SPACES, default="large", help="vocabulary, width and sizes, or the paper's")
    arguments = parser.parse_intermixed_args()
    overrides = [*SPACES[arguments.space], *arguments.overrides]
    jobs, out = Jobs(arguments.out, overrides, arguments.only), arguments.out
    open_space(out, overrides)
    for seed in SEEDS:
        jobs.do(f"random-{seed}", lambda: search_at_random(out, overrides, seed))  # noqa: B023
        trials = jobs.do(f"trials-{seed}", lambda: search_by_trials(out, overrides, seed))  # noqa: B023
        if trials:
            jobs.do(f"gumbel-{seed}", lambda: search_by_gumbel(out, overrides, seed, trials))  # noqa: B023
        for name in SEARCHES:
            found = jobs.get(f"{name}-{seed}")
            if found and found["network"]["blocks"]:  # the paper's method may leave none
                jobs.do(f"{name}-{seed}-trained", lambda: finish(out, overrides, name, seed, found))  # noqa: B023
    print(json.dumps(report(jobs)))


if __name__ == "__main__":
    run_command(main)
