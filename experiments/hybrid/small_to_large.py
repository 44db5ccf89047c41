"""Does the order of patterns carry over to larger models?

Command: `python experiments/hybrid/small_to_large.py --small comparison.csv data.source=FOLDER`, with the file that
`python -m nas.compare` writes.

The program makes each pattern of the comparison twice as deep, by stretch and by stack, and trains it at twice the
width with the same recipe. It trains the rules of that depth too, as a reference. Losses are means over the seeds.

- tau: Kendall's tau between the loss on valid at the small size and the loss on test at the large size.
- regret: the large loss of the pattern that is best at the small size minus the lowest large loss, in nats per token.
- Both are computed over all patterns, and within each group of patterns of the same latency, because a difference in
  latency alone makes an order.
- noise: the mean standard error of the large losses. A regret of this size may be chance.

Every finished training is a JSON file in OUT and is not repeated. Several processes may share OUT if --only divides the
trainings between them. The last line is JSON.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import kendall_tau, mean_and_error, open_experiment, print_row, read_comparison
from experiments.jobs import Jobs, job_parser
from nas.comparison.results import mean_and_standard_error
from nas.comparison.spec import RANDOM, SEARCHED
from nas.core.errors import run_command
from nas.core.pattern import RESIZINGS, abbreviate, expand, network
from nas.derivation.baselines import RULES

LARGER = ["model.d_model=128", "model.d_ffn=512"]  # twice the width of retrain.yaml
DEPTH = 2
RANDOM_PATTERNS = 2  # of each budget


def main() -> None:
    parser = job_parser(__doc__, "runs/small-to-large", "*-1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the large trainings")
    parser.add_argument("--small", type=Path, required=True, help="comparison.csv of a comparison with retrain.yaml")
    arguments = parser.parse_intermixed_args()
    jobs, patterns = Jobs(arguments.out, arguments.overrides, arguments.only), small_patterns(arguments.small)

    def large(blocks: list[str]) -> list[float]:
        """The losses of a large pattern, for each seed that has been trained."""
        names = {seed: f"{abbreviate(blocks)}-{seed}" for seed in arguments.seeds}
        found = [jobs.do(name, partial(train, blocks, seed, arguments.overrides)) for seed, name in names.items()]
        return [result["nll"] for result in found if result]

    print_row("pattern", "blocks", "small, valid", *(f"{by}, test" for by in (*RESIZINGS, "rule")), header=True)
    summary = {by: [] for by in RESIZINGS}
    for name, (group, blocks, small) in sorted(patterns.items(), key=lambda item: item[1][2]):
        count = DEPTH * len(blocks)
        rows = {by: large(resize(blocks, count)) for by, resize in RESIZINGS.items()}
        for by, losses in rows.items():
            if len(losses) == len(arguments.seeds):
                summary[by].append((group, small, losses))
        rule = large(RULES[name](count)) if name in RULES else []
        print_row(name, abbreviate(blocks), f"{small:.4f}", *map(mean_and_error, (*rows.values(), rule)))
    print(json.dumps({by: by_group(results) for by, results in summary.items()}))


def small_patterns(path: Path) -> dict[str, tuple[str, list[str], float]]:
    """{name: (group, blocks, nll per token on valid)} of the patterns. Of equal networks, only the first counts."""
    patterns, networks = {}, set()
    for row in read_comparison(path):
        blocks = expand(row["blocks"])
        kind, *rest = row["name"].split("-")
        left_out = kind == RANDOM and int(rest[-1]) > RANDOM_PATTERNS
        if not left_out and network(blocks) not in networks:
            networks.add(network(blocks))
            group = rest[0] if kind in (RANDOM, SEARCHED) and rest else "rules"
            patterns[row["name"]] = group, blocks, float(row["valid_nll_mean"])
    return patterns


def by_group(results: list[tuple[str, float, list[float]]]) -> dict:
    """agreement() of all results, and of each group with at least two."""
    groups = {"all": results} | {group: [r for r in results if r[0] == group] for group, *_ in results}
    return {group: agreement(members) for group, members in groups.items() if len(members) > 1}


def agreement(results: list[tuple[str, float, list[float]]]) -> dict:
    """tau, regret and noise, as in the module's docstring, of (group, small loss, large losses)."""
    small, large = [one for _, one, _ in results], [float(np.mean(losses)) for _, _, losses in results]
    errors = [error for _, _, losses in results if (error := mean_and_standard_error(losses)[1]) is not None]
    return {
        "patterns": len(results),
        "tau": round(kendall_tau(small, large), 3),
        "regret": round(large[int(np.argmin(small))] - min(large), 4),
        "noise": round(float(np.mean(errors)), 4) if errors else None,
    }


def train(blocks: list[str], seed: int, overrides: list[str]) -> dict:
    """nll per token on test after a training with retrain.yaml at LARGER sizes."""
    from nas.retraining.phase import train_pattern
    from nas.training.evaluation import evaluate_split

    options = [*LARGER, f"seed={seed}", *overrides]
    config, corpus, context = open_experiment(Path(__file__).with_name("retrain.yaml"), options)
    model = train_pattern(blocks, config, corpus, context)
    figures = evaluate_split(config, model, model.blocks, corpus, "test", context)
    return {"pattern": abbreviate(blocks), "nll": figures["nll_per_token"]}


if __name__ == "__main__":
    run_command(main)
