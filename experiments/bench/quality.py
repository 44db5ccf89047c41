"""Time to quality of training recipes: `python experiments/bench/quality.py "OPTIONS OF A RECIPE" "OF ANOTHER"`.

The previous recipe (--previous) trains a pattern for train.steps. Each other recipe is the present default with its own
options. It trains for several shares of these steps, each with a whole learning-rate schedule. All trainings of a seed
run in one process, in turns of two seconds. The training with the least progress takes the next turn. Therefore all end
at the same time, and other work on the machine slows all of them.

- nll: per token on all of valid, after the last step.
- seconds: of training alone; evaluations do not count.
- wall_time_ratio, steps_ratio: the time and the steps after which a recipe has the previous one's nll, divided by those
  of the previous recipe. They are interpolated between the two shares around this nll, linearly in the logarithm of
  time or steps; null beyond all shares. Steps are exact; times depend on the machine.

The last line is JSON: for each recipe the means over the seeds (nll_old: of the previous recipe, nll_new: of the
largest share), and the ratio of wall times of each seed.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.pattern import expand

EXPERIMENTS = Path(__file__).parents[1]
TURN_S = 2.0
PREVIOUS = (
    "train.optimizer=adamw train.schedule=cosine train.average_share=0 train.short_share=0 model.tie_embeddings=true"
)


class Training:
    """One training that can be paused. It keeps the state of PyTorch's random numbers."""

    def __init__(self, pattern: list[str], config, corpus):
        import torch

        from nas.retraining.phase import RetrainPhase
        from nas.training.build import build_fixed, resolve_cutoffs
        from nas.training.device import device_context, set_up_device

        config = resolve_cutoffs(config, corpus)
        set_up_device(config.seed, config.train)
        context = device_context(config.train)
        self.phase = RetrainPhase(build_fixed(pattern, config, corpus.vocab_size), corpus, config, context)
        self.random, self.steps, self.seconds = torch.get_rng_state(), 0, 0.0

    @property
    def progress(self) -> float:
        return self.steps / self.phase.total_steps

    @property
    def finished(self) -> bool:
        return self.progress == 1

    def take_turn(self) -> None:
        import torch

        torch.set_rng_state(self.random)
        began = time.perf_counter()
        while not self.finished and time.perf_counter() < began + TURN_S:
            self.steps += 1
            self.phase.step(self.steps)
        self.seconds += time.perf_counter() - began
        self.random = torch.get_rng_state()

    def nll(self) -> float:
        return self.phase.valid_figures()["nll_per_token"]


class Result(NamedTuple):
    seconds: float
    steps: int
    nll: float


def ratio_at(nll: float, curve: list[tuple[float, float]]) -> float | None:
    """The ratio at which a curve of (ratio, nll) reaches an nll; None beyond its ends."""
    for (ratio_1, nll_1), (ratio_2, nll_2) in itertools.pairwise(curve):
        if nll_2 <= nll <= nll_1:
            share = (nll_1 - nll) / (nll_1 - nll_2)
            return math.exp(math.log(ratio_1) + share * math.log(ratio_2 / ratio_1))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=[""], help="options of each recipe, separated by spaces")
    parser.add_argument("--config", type=Path, default=EXPERIMENTS / "bench/quality.yaml", help="sizes and text")
    parser.add_argument("--previous", default=PREVIOUS, help="options of the previous recipe, separated by spaces")
    parser.add_argument("--all", nargs="*", default=[], metavar="section.key=value", help="options of all recipes")
    parser.add_argument("--pattern", default="adadadadadad", help="one letter per block (default: %(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.7, 1.0], help="of train.steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds (default: 1)")
    arguments = parser.parse_intermixed_args()

    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare

    config = load_config(arguments.config, arguments.all)
    corpus, steps = Corpus(prepare(config.data)), config.train.steps
    rows = []
    print("| seed | recipe | steps | seconds | nll |\n|---|---|---|---|---|")
    for seed in arguments.seeds:
        given = [*arguments.all, f"seed={seed}"]
        pattern = expand(arguments.pattern)
        previous = load_config(arguments.config, [*given, *arguments.previous.split()])
        trainings = {"previous": Training(pattern, previous, corpus)}
        for recipe, share in itertools.product(arguments.recipes, arguments.shares):
            options = [*given, *recipe.split(), f"train.steps={round(share * steps)}"]
            trainings[recipe, share] = Training(pattern, load_config(arguments.config, options), corpus)
        while running := [training for training in trainings.values() if not training.finished]:
            min(running, key=lambda training: training.progress).take_turn()
        row = {}
        for name, training in trainings.items():
            row[name] = result = Result(training.seconds, training.steps, training.nll())
            label = name if name == "previous" else name[0] or "default"
            print(f"| {seed} | {label} | {result.steps} | {result.seconds:.0f} | {result.nll:.4f} |", flush=True)
        rows.append(row)
    print(json.dumps({recipe or "default": summary(rows, recipe, arguments.shares) for recipe in arguments.recipes}))


def summary(rows: list[dict], recipe: str, shares: list[float]) -> dict:
    """What the last line says about a recipe. rows: for each seed, the result of each training."""
    times, steps = [], []
    for row in rows:
        previous, curve = row["previous"], [row[recipe, share] for share in sorted(shares)]
        times.append(ratio_at(previous.nll, [(own.seconds / previous.seconds, own.nll) for own in curve]))
        steps.append(ratio_at(previous.nll, [(own.steps / previous.steps, own.nll) for own in curve]))
    return {
        "wall_time_ratio": None if None in times else round(statistics.fmean(times), 4),
        "steps_ratio": None if None in steps else round(statistics.fmean(steps), 4),
        "nll_old": round(statistics.fmean(row["previous"].nll for row in rows), 4),
        "nll_new": round(statistics.fmean(row[recipe, max(shares)].nll for row in rows), 4),
        "ratios": times,
    }


if __name__ == "__main__":
    run_command(main)
