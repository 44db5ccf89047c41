"""What a user could do without a SuperNet: an evolution whose judge is short trainings alone.

`python experiments/sizes/evolve.py` draws random networks of search.yaml's space within its budget, changes the best
ones, and trains each for a sixth of the steps (an evolution that keeps the best). The best four then train for half of
the steps, and the best of these is written as a pattern file. Latencies are predicted from a table, measured at the
start. Every training is a JSON file in OUT and is not repeated. The last line is JSON.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import open_experiment, print_row
from experiments.jobs import Jobs, job_parser
from nas.core.errors import run_command
from nas.core.files import write_yaml
from nas.core.pattern import FORMAT, abbreviate, file_name
from nas.costs.cost_table import CostTable

CONFIG = Path(__file__).with_name("search.yaml")
RANDOM, BEST, FINAL = 12, 6, 4  # random networks; parents; networks that train longer
SHORT, LONG = 6, 2  # trainings have 1 / SHORT and 1 / LONG of search.retrain_steps
LEAST = 0.92  # of the budget that a network must use


class Evolution:
    """Random networks and changes of networks, of at most `blocks` blocks, within a budget."""

    def __init__(self, operations: list[str], blocks: int, costs: CostTable, highest: float):
        self.operations = [name for name in operations if name != "identity"]
        self.blocks, self.costs, self.highest = blocks, costs, highest
        self.generator = random.Random(0)

    def fits(self, pattern: list[str]) -> bool:
        return bool(pattern) and LEAST * self.highest <= self.costs.cost(pattern) <= self.highest

    def draw(self) -> list[str]:
        """A random network: first the number of blocks, then shares of the operations, then each block."""
        pattern = []
        while not self.fits(pattern):
            weights = [self.generator.random() for _ in self.operations]
            pattern = self.generator.choices(self.operations, weights, k=self.generator.randint(4, self.blocks))
        return pattern

    def change(self, pattern: list[str]) -> list[str]:
        """Another network that differs by one to three steps: replace, exchange, insert or remove a block."""
        child = pattern
        while child == pattern or not self.fits(child):
            child = list(pattern)
            for _ in range(self.generator.randint(1, 3)):
                place, step = self.generator.randrange(len(child)), self.generator.choice("rrxxid")
                if step == "r":
                    child[place] = self.generator.choice(self.operations)
                elif step == "x":
                    other = self.generator.randrange(len(child))
                    child[place], child[other] = child[other], child[place]
                elif step == "i" and len(child) < self.blocks:
                    child.insert(place, self.generator.choice(self.operations))
                elif step == "d" and len(child) > 1:
                    del child[place]
        return child


def train(pattern: list[str], overrides: list[str], steps: int) -> dict:
    """nll on valid after some steps."""
    from nas.retraining.phase import train_pattern
    from nas.training.evaluation import evaluate_split

    config, corpus, context = open_experiment(CONFIG, [*overrides, f"train.steps={steps}"])
    model = train_pattern(pattern, config, corpus, context)
    valid = evaluate_split(config, model, model.blocks, corpus, "valid", context)
    return {"pattern": abbreviate(pattern), "nll": valid["nll_per_token"]}


def main() -> None:
    from nas.costs.latency import current_costs

    parser = job_parser(__doc__, "runs/evolve", None)
    parser.add_argument("--count", type=int, default=36, help="short trainings (default: %(default)s)")
    arguments = parser.parse_intermixed_args()
    jobs, overrides = Jobs(arguments.out, arguments.overrides), arguments.overrides
    config, corpus, context = open_experiment(CONFIG, overrides)
    table = current_costs(config, corpus.counts(), context, arguments.out / "latency.yaml")
    table.write(arguments.out / "latency.yaml")
    reference, steps = table.reference(config.model.blocks), config.search.retrain_steps
    highest = config.search.latency.target * reference
    evolution = Evolution(config.search.operations, config.model.blocks, table, highest)
    found: dict[tuple[str, ...], float] = {}
    while len(found) < arguments.count:
        parents = sorted(found, key=found.get)[:BEST]
        parent = list(evolution.generator.choice(parents)) if len(found) >= RANDOM else None
        pattern = evolution.change(parent) if parent else evolution.draw()
        if tuple(pattern) not in found:
            result = jobs.do(f"short-{file_name(pattern)}", lambda: train(pattern, overrides, steps // SHORT))  # noqa: B023
            found[tuple(pattern)] = result["nll"]
    print_row("pattern", "of the latency, predicted", f"nll, 1/{SHORT} of the steps", f"nll, 1/{LONG}", header=True)
    finals = {}
    for pattern in sorted(found, key=found.get)[:FINAL]:
        result = jobs.do(f"long-{file_name(pattern)}", lambda: train(list(pattern), overrides, steps // LONG))  # noqa: B023
        finals[pattern] = result["nll"]
        ratio = f"{table.cost(list(pattern)) / reference:.3f}"
        print_row(abbreviate(list(pattern)), ratio, f"{found[pattern]:.4f}", f"{finals[pattern]:.4f}")
    best = list(min(finals, key=finals.get))
    blocks = best + ["identity"] * (config.model.blocks - len(best))
    write_yaml(arguments.out / "evolved.yaml", {"format": FORMAT, "blocks": blocks})
    print(json.dumps({"pattern": abbreviate(best), "trainings": len(found)}))


if __name__ == "__main__":
    run_command(main)
