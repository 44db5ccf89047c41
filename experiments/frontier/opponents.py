"""What a user would take instead of the search: `python experiments/frontier/opponents.py --out runs/frontier`.

For each budget, OUT/BUDGET/patterns gets the networks that nas.compare then trains with the same recipe:

- searched: what search.py finds. gumbel: the paper's method at its vocabulary and width, for as many seconds.
- Rules, each at its best vocabulary, width and depth, by successive halving with the surrogate of the search.
- fewer, narrower: the reference with fewer blocks, and with a smaller width if one is fast enough.
- random-1 to random-5: random networks.

All are within the budget by the same measured costs, which are in OUT/costs.yaml; nothing else should run while the
program measures. Every finished job is a JSON file in OUT and is not repeated. The last line is JSON.

With --table, the networks are those of a table with the columns budget, name and network, such as one of report.py.
Nothing is searched or measured then.
"""

import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import (
    FRONTIER,
    by_budget,
    named_network,
    named_options,
    open_experiment,
    print_row,
    read_table,
    spell_network,
)
from experiments.jobs import Jobs, job_parser
from experiments.versus.run import (
    GivenStrategy,
    draw_networks,
    open_space,
    open_trials,
    search_by_gumbel,
    search_by_trials,
    seeded,
)
from nas.comparison.spec import FORMAT as COMPARISON
from nas.core.config import CANDIDATES
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.files import write_yaml
from nas.core.pattern import FORMAT, interleaved
from nas.costs.baselines import RULES, deepest
from nas.search.network_search import COSTS
from nas.search.strategy import successive_halving

OPPONENTS = "interleaved,sandwich,par,conv-attention,local-global,gumbel,random,fewer,narrower"
ALL_RULES = RULES | {"window-dense": lambda blocks: (["window", "dense"] * blocks)[:blocks]}
OPERATIONS = f"search.operations=[{','.join(CANDIDATES['trials'])}]"  # of gumbel too
SEED, RANDOM = 1, 5  # of the searches; the number of random networks
ROUNDS = 20  # of the times of narrower references


def rule_networks(rule: str, costs, shapes: list, budget: float, most: int) -> list:
    """The deepest network of a rule within the budget, for each vocabulary and width."""
    from nas.search.space import make_network, within_budget

    found = []
    for shape in shapes:
        affordable = within_budget(costs.tables[shape], budget * costs.reference_cost)
        if blocks := deepest(ALL_RULES[rule], most, affordable):
            found.append(make_network(*shape, blocks))
    return found


def choose_sizes(folder: Path, overrides: list[str], rule: str) -> dict:
    """The best network of a rule, and the folder of its trial."""
    config, corpora, shapes, costs, runtime = open_space(folder, overrides)
    trials, budget = open_trials(config, corpora, folder / "rules", runtime), config.search.latency.target
    networks = rule_networks(rule, costs, shapes, budget, config.model.blocks)
    best = successive_halving(GivenStrategy(trials, costs, budget, networks))
    seconds = sum(result["wall_time_s"] for result in trials.results.values())
    found = {"network": best.to_dict(), "ratio": costs.ratio(best), "seconds": seconds}
    return found | {"trial": str(trials.folder / str(best))}


def measure_narrow(overrides: list[str]) -> dict:
    """{width: the time of the reference at this width, with as many heads, as a ratio to its own}"""
    from nas.costs.measurement import text_times

    opened, model = {}, load_config(FRONTIER, overrides).model
    for width in range(model.d_model, 8, -8):  # ratios are to the first one
        if width % model.heads:
            continue
        own = [*overrides, f"model.d_model={width}", "search.d_model=[]"]
        config, corpus, runtime = open_experiment(FRONTIER, own)
        opened[width] = interleaved(config.model.blocks), config, corpus
    return {str(width): found["ratio"] for width, found in text_times(opened, runtime, ROUNDS).items()}


def patterns_of(jobs: Jobs, budget: str, names: list[str], folder: Path, overrides: list[str]) -> dict[str, dict]:
    """The content of each pattern file, the searched network first. Leaves out those whose jobs have not finished.

    names: of OPPONENTS and ALL_RULES.
    """
    from nas.search.space import make_network, read_network, with_sizes

    config, _, shapes, costs, _ = open_space(folder, seeded(overrides, SEED))
    trials = jobs.do(f"{budget}-searched", lambda: search_by_trials(folder, overrides, SEED))
    found = {"searched": trials}
    for name in names:
        if name in ALL_RULES and rule_networks(name, costs, shapes, float(budget), config.model.blocks):
            found[name] = jobs.do(f"{budget}-{name}", lambda: choose_sizes(folder, seeded(overrides, SEED), name))  # noqa: B023
        elif name == "gumbel" and trials:
            found[name] = jobs.do(f"{budget}-{name}", lambda: search_by_gumbel(folder, overrides, SEED, trials))
        elif name == "random":
            for number, network in enumerate(draw_networks(config, costs, shapes, RANDOM), start=1):
                found[f"random-{number}"] = {"network": network.to_dict()}
    fewer = rule_networks("interleaved", costs, [costs.reference[:2]], float(budget), config.model.blocks)
    if "fewer" in names and fewer:
        found["fewer"] = {"network": fewer[0].to_dict()}
    patterns = {}
    for name, result in found.items():
        if result and result["network"]["blocks"]:  # the paper's method may leave none
            network = read_network(result["network"])
            patterns[name] = network.to_dict() | {"heads": with_sizes(config, *network[:2]).model.heads}
            patterns[name] |= {"derived_from": {"trial": result["trial"]}} if "trial" in result else {}
    times = (jobs.get("narrow") or {}) if "narrower" in names else {}
    if widths := [int(width) for width, ratio in times.items() if ratio <= float(budget)]:
        narrow = make_network(costs.reference.vocab_size, max(widths), costs.reference.blocks)
        if [narrow] != fewer:  # both are the reference if the budget allows it
            patterns["narrower"] = narrow.to_dict() | {"heads": config.model.heads}
    return patterns


def write_comparison(folder: Path, patterns: dict[str, dict], seeds: int) -> None:
    """Write the pattern files, and compare.yaml. seeds: number of trainings of each network."""
    for name, content in patterns.items():
        (folder / "patterns").mkdir(exist_ok=True)
        write_yaml(folder / "patterns" / f"{name}.yaml", {"format": FORMAT, **content})
    once = [f"patterns/{name}.yaml" for name in patterns if name.startswith("random")]
    others = [f"patterns/{name}.yaml" for name in patterns if not name.startswith("random")]
    about = {"format": COMPARISON, "retrain": os.path.relpath(FRONTIER, folder), "seeds": [*range(1, seeds + 1)]}
    write_yaml(folder / "compare.yaml", about | {"patterns": others, "once": once})


def write_recorded(table: Path, out: Path, seeds: int) -> dict[str, int]:
    """Write the comparisons of the networks of a table. Returns {budget: number of networks}."""
    budgets = by_budget(read_table(table))
    for budget, names in budgets.items():
        patterns = {}
        for name, rows in names.items():
            network = rows[0]["network"]
            heads = load_config(FRONTIER, named_options(network, [])).model.heads
            patterns[name] = named_network(network).to_dict() | {"heads": heads}
        (out / budget).mkdir(parents=True, exist_ok=True)
        write_comparison(out / budget, patterns, seeds)
    return {budget: len(names) for budget, names in budgets.items()}


def main() -> None:
    parser = job_parser(__doc__, "runs/frontier", "0.65-*")
    parser.add_argument("--budgets", default="0.4,0.65,1.0", help="separated by commas (default: %(default)s)")
    parser.add_argument("--opponents", default=OPPONENTS, help="separated by commas (default: %(default)s)")
    parser.add_argument("--table", type=Path, help="such as experiments/frontier/frontier.csv")
    parser.add_argument("--seeds", type=int, default=5, help="of the trainings (default: %(default)s)")
    arguments = parser.parse_intermixed_args()
    out, given, names = arguments.out, arguments.overrides, arguments.opponents.split(",")
    known = dict.fromkeys([*OPPONENTS.split(","), *ALL_RULES])
    if unknown := next((name for name in names if name not in known), None):
        parser.error(f"--opponents: {unknown} is none of {', '.join(known)}")
    if arguments.table:
        if given:
            parser.error("--table takes no options of trainings: give these to nas.compare")
        print(json.dumps(write_recorded(arguments.table, out, arguments.seeds)))
        return
    jobs, overrides = Jobs(out, given, arguments.only), [OPERATIONS, *given]
    if "narrower" in names:
        jobs.do("narrow", lambda: measure_narrow(given))
    open_space(out, overrides)  # measures the costs
    counts = {}
    print_row("budget", "name", "network", "time, ratio", "seconds", header=True)
    for budget in arguments.budgets.split(","):
        folder = out / budget
        folder.mkdir(exist_ok=True)
        shutil.copy(out / COSTS, folder)
        own = [*overrides, f"search.latency.target={budget}"]
        patterns = patterns_of(jobs, budget, names, folder, own)
        write_comparison(folder, patterns, arguments.seeds)
        counts[budget] = len(patterns)
        for name, content in patterns.items():
            result = jobs.get(f"{budget}-{name}") or {}
            figures = (f"{result[key]:.3g}" if key in result else "" for key in ("ratio", "seconds"))
            print_row(budget, name, spell_network(content), *figures)
    print(json.dumps(counts))


if __name__ == "__main__":
    run_command(main)
