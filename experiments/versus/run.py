"""Three searches of equal time, side by side: `python experiments/versus/run.py --out runs/versus`.

trials: search.py with the law. random: random networks of the same space and budget, one spelling each, uniform over
vocabulary and width, then over the number of blocks; the same rungs, but the losses alone decide. gumbel: the method of
the paper at the vocabulary and width that `trials` chose, with its latency term, for as many seconds. Each network that
they choose then trains with SEEDS. Every finished job is a JSON file in OUT and is not repeated. Several processes may
share OUT, each with its own --only, once `trials` is finished. The last line is JSON.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row
from experiments.jobs import Jobs, job_parser
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import FORMAT, abbreviate, shape_options
from nas.core.run_folder import CHOICE, OUTCOME, RESULTS, TRIALS

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "experiments/frontier/frontier.yaml"
SPACES = {
    "large": [],
    "paper": ["search.vocab_size=[]", "search.d_model=[]", "search.operations=[attention,dense,identity]"],
}
SEARCHES, SEEDS = ("trials", "random", "gumbel"), (2, 3, 4, 5, 6)  # the trials have seed 1
RATE_STEPS = 20, 60  # of the paper's method, to measure its seconds per step


def call(script: str, *arguments) -> None:
    subprocess.run([sys.executable, ROOT / script, *map(str, arguments)], check=True)


def search_by_trials(out: Path, overrides: list[str]) -> dict:
    """The network, and the seconds of the trials."""
    call("search.py", CONFIG, "--run", out / "trials", "--resume", *overrides)
    choice = read_yaml(out / "trials" / CHOICE)
    return {**choice["network"], "seconds": choice["wall_time_s"], "ratio": choice["ratio"]}


def search_at_random(out: Path, overrides: list[str]) -> dict:
    """The network that wins successive halving without a law."""
    from nas.networks.choice import COSTS, candidate_corpora
    from nas.networks.costs import NetworkCosts
    from nas.networks.halving import Halving
    from nas.networks.space import BAND, read_network
    from nas.networks.trials import RUNGS, Trials
    from nas.training.device import set_up_device

    class RandomHalving(Halving):
        def first_networks(self, count):
            return self.promising(count)

        def add_neighbours(self):
            pass

        def promising(self, count):
            return [network for network in self.networks if network not in self.trials.tried][:count]

        def contenders(self, networks, count, vocabularies):
            last = {point.network: point.loss for point in self.trials.points}
            return sorted(networks, key=last.__getitem__)[:count]

    config, folder = load_config(CONFIG, overrides), out / "random"
    context, (corpora, shapes) = set_up_device(config.seed, config.train), candidate_corpora(config)
    own = read_network(read_yaml(out / "trials" / CHOICE)["reference"])
    costs = NetworkCosts.read(out / "trials" / TRIALS / COSTS, own)
    budget, generator = config.search.latency.target, np.random.default_rng(config.seed)
    folder.mkdir(exist_ok=True)
    write_yaml(folder / "config.yaml", {"stage": "search", **asdict(config)})
    networks = random_networks(config, costs, shapes, budget * costs.reference, RUNGS[0][1], generator, BAND)
    search = RandomHalving(Trials(config, corpora, folder, context), costs, budget, networks)
    best = search.run()
    seconds = sum(result["wall_time_s"] for result in search.trials.results.values())
    return best.to_dict() | {"seconds": seconds, "ratio": costs.ratio(best)}


def random_networks(config, costs, shapes, limit: float, count: int, generator, band: float) -> list:
    """Different networks of `band` to 1 of the limit, of a uniform vocabulary and width that allows any."""
    from nas.core.errors import InputError
    from nas.costs.baselines import random_patterns
    from nas.networks.space import make_network

    draws, found = {}, []
    middle, tolerance = limit * (1 + band) / 2, (1 - band) / (1 + band)
    for number, shape in enumerate(shapes):
        about = config.model.blocks, config.search.operations, costs.tables[shape], middle, tolerance
        draws[shape] = random_patterns(*about, config.seed * len(shapes) + number)
    while draws and len(found) < count:
        shape = list(draws)[generator.integers(len(draws))]
        try:
            found.append(make_network(*shape, next(draws[shape])))
        except (InputError, StopIteration):
            del draws[shape]
    return found


def search_by_gumbel(out: Path, overrides: list[str], seconds: float) -> dict:
    """The pattern of the paper's method within the budget, after about `seconds`."""
    choice = read_yaml(out / "trials" / CHOICE)
    options = read_yaml(out / "trials" / "config.yaml")
    sizes = {**choice["network"], "heads": options["model"]["heads"]}
    target = choice["budget"] / choice["interleaved_ratio"]  # the reference is interleaved of these sizes
    own = [*overrides, *shape_options(sizes), "search.vocab_size=[]", "search.d_model=[]", "search.method=gumbel"]
    own += [f"search.latency.target={target}", "train.checkpoint_every=100000"]
    walls = []
    for steps in RATE_STEPS:
        run = out / f"gumbel-{steps}-steps"
        call("search.py", CONFIG, "--run", run, "--resume", *own, f"train.steps={steps}")
        walls.append(read_yaml(run / OUTCOME)["wall_time_s"])
    rate = (walls[1] - walls[0]) / (RATE_STEPS[1] - RATE_STEPS[0])
    steps = round(RATE_STEPS[1] + (seconds - walls[1]) / rate)
    call("search.py", CONFIG, "--run", out / "gumbel", "--resume", *own, f"train.steps={steps}")
    pattern = out / "gumbel" / "pattern.yaml"
    call("derive.py", out / "gumbel", "--out", pattern, "--force", "--latency-budget", round(target, 4))
    blocks = [block for block in read_yaml(pattern)["blocks"] if block != "identity"]
    sizes = {key: choice["network"][key] for key in ("vocab_size", "d_model")}
    return {**sizes, "blocks": blocks, "seconds": read_yaml(out / "gumbel" / OUTCOME)["wall_time_s"]}


def train(out: Path, found: dict, seed: int, overrides: list[str]) -> dict:
    """Train a network to the end. Returns its figures on valid and test, and milliseconds for 1,000 bytes of text."""
    from nas.networks.space import options_of, read_network

    network = read_network(found)
    pattern, run = out / "patterns" / f"{network}.yaml", out / "trainings" / f"{network}-{seed}"
    pattern.parent.mkdir(exist_ok=True)
    write_yaml(pattern, {"format": FORMAT, "blocks": list(network.blocks)})
    sizes = options_of(network, load_config(CONFIG, []))
    call("retrain.py", pattern, CONFIG, "--run", run, "--resume", *sizes, *overrides, f"seed={seed}")
    results = read_yaml(run / RESULTS)
    return {split: results[split] for split in ("valid", "test")} | {"ms": results["latency"]["ms_per_1000_bytes"]}


def report(jobs: Jobs, seeds: list[int]) -> dict:
    """Print a table of the finished trainings on valid. Returns the content of the last line.

    p: Dunnett's test of each network against that of `trials`; it does not know how searches of other seeds differ.
    """
    from scipy import stats

    found, losses = {name: jobs.get(name) for name in SEARCHES}, {}
    for name in filter(found.get, SEARCHES):
        done = [result for seed in seeds if (result := jobs.get(f"{name}-{seed}"))]
        losses[name] = np.log([result["valid"]["word_perplexity"] for result in done])
    print_row("search", "network", "word perplexity on valid", "behind trials", "p", "search, seconds", header=True)
    others = [name for name in losses if name != "trials" and len(losses[name]) > 1]
    tests = {}
    if others and len(losses["trials"]) > 1:
        test = stats.dunnett(*(losses[name] for name in others), control=losses["trials"])
        tests = dict(zip(others, test.pvalue.tolist(), strict=True))
    table = {}
    for name, own in losses.items():
        if not len(own) or not len(losses["trials"]):
            continue
        network, mean = found[name], float(np.exp(own.mean()))
        error = mean * own.std(ddof=1) / len(own) ** 0.5 if len(own) > 1 else float("nan")
        short = f"{network['vocab_size']:,}, {network['d_model']}, {abbreviate(network['blocks'])}"
        behind = float(np.expm1(own.mean() - losses["trials"].mean()))
        table[name] = {"word_perplexity": mean, "behind": behind, "p": tests.get(name)}
        p = f"{tests[name]:.3f}" if name in tests else ""
        print_row(name, short, f"{mean:.1f} ± {error:.1f}", f"{behind:+.1%}", p, f"{network['seconds']:.0f}")
    return table


def main() -> None:
    parser = job_parser(__doc__, "runs/versus", "trials-*")
    parser.add_argument("--space", choices=SPACES, default="large", help="vocabulary, width and sizes, or the paper's")
    arguments = parser.parse_intermixed_args()
    overrides = [*SPACES[arguments.space], *arguments.overrides]
    jobs, out = Jobs(arguments.out, overrides, arguments.only), arguments.out
    trials = jobs.do("trials", lambda: search_by_trials(out, overrides))
    if trials:
        jobs.do("random", lambda: search_at_random(out, overrides))
        jobs.do("gumbel", lambda: search_by_gumbel(out, overrides, trials["seconds"]))
    for seed in SEEDS:
        for name in SEARCHES:
            if network := jobs.get(name):
                jobs.do(f"{name}-{seed}", lambda: train(out, network, seed, overrides))  # noqa: B023
    print(json.dumps(report(jobs, list(SEEDS))))


if __name__ == "__main__":
    run_command(main)
