"""Does the order of patterns carry over to larger models?

Command: `python experiments/hybrid/small_to_large.py --small RUN_DIR data.source=FOLDER`. RUN_DIR is a comparison.

The program makes each of its patterns twice as deep, by stretch and by stack, and trains it at twice the width with the
same recipe. It trains the rules of that depth too, as a reference. Losses are means over SEEDS.

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

from experiments.jobs import Jobs, job_parser
from nas.core.config_loading import load_config
from nas.core.errors import InputError, run_command
from nas.core.files import read_yaml
from nas.core.pattern import RESIZINGS, abbreviate, network, read_pattern
from nas.core.run_folder import RESULTS
from nas.derivation.baselines import RULES

LARGER = ["model.d_model=128", "model.d_ffn=512"]  # twice the width of retrain.yaml
DEPTH = 2
SEEDS = (1, 2, 3)
RANDOM = 2  # random patterns of each budget that take part; they have one seed at the small size


def main() -> None:
    parser = job_parser(__doc__, "runs/small-to-large", "stretch-*")
    parser.add_argument("--small", type=Path, required=True, help="run folder of a comparison with retrain.yaml")
    arguments = parser.parse_intermixed_args()
    jobs, patterns = Jobs(arguments.out, arguments.overrides, arguments.only), small_patterns(arguments.small)

    def large(blocks: list[str]) -> list[float]:
        """The losses of a large pattern, for each seed that has been trained."""
        names = {seed: f"{abbreviate(blocks)}-{seed}" for seed in SEEDS}
        found = [jobs.do(name, partial(train, blocks, seed, arguments.overrides)) for seed, name in names.items()]
        return [result["nll"] for result in found if result]

    print_row("pattern", "blocks", "small, valid", *(f"{by}, test" for by in (*RESIZINGS, "rule")))
    print_row(*["---"] * (4 + len(RESIZINGS)))
    summary = {by: [] for by in RESIZINGS}
    for name, (group, blocks, small) in sorted(patterns.items(), key=lambda item: item[1][2]):
        count = DEPTH * len(blocks)
        rows = {by: large(resize(blocks, count)) for by, resize in RESIZINGS.items()}
        for by, losses in rows.items():
            if len(losses) == len(SEEDS):
                summary[by].append((group, small, losses))
        rule = large(RULES[name](count)) if name in RULES else []
        print_row(name, abbreviate(blocks), f"{small:.4f}", *map(mean_and_error, (*rows.values(), rule)))
    print(json.dumps({by: by_group(results) for by, results in summary.items()}))


def small_patterns(run: Path) -> dict[str, tuple[str, list[str], float]]:
    """{name: (group, blocks, nll per token on valid, a mean over the trained seeds)} of the comparison's patterns.

    Of equal networks, only the first counts.
    """
    patterns, networks = {}, set()
    for file in sorted((run / "patterns").glob("*.yaml")):
        name, blocks = file.stem, read_pattern(file)["blocks"]
        kind, *rest = name.split("-")
        left_out = kind == "random" and int(rest[-1]) > RANDOM
        results = sorted((run / "runs").glob(f"{abbreviate(blocks)}-[0-9]*/{RESULTS}"))
        if results and not left_out and network(blocks) not in networks:
            networks.add(network(blocks))
            group = rest[0] if kind in ("random", "searched") and rest else "rules"
            losses = [read_yaml(path)["valid"]["nll_per_token"] for path in results]
            patterns[name] = group, blocks, float(np.mean(losses))
    if not patterns:
        raise InputError(f"--small {run} holds no finished training; give the run folder of a comparison")
    return patterns


def by_group(results: list[tuple[str, float, list[float]]]) -> dict:
    """agreement() of all results, and of each group with at least two."""
    groups = {"all": results} | {group: [r for r in results if r[0] == group] for group, *_ in results}
    return {group: agreement(members) for group, members in groups.items() if len(members) > 1}


def agreement(results: list[tuple[str, float, list[float]]]) -> dict:
    """tau, regret and noise, as in the module's docstring, of (group, small loss, large losses)."""
    from scipy.stats import kendalltau

    small, large = [one for _, one, _ in results], [float(np.mean(losses)) for _, _, losses in results]
    errors = [np.std(losses, ddof=1) / len(losses) ** 0.5 for _, _, losses in results if len(losses) > 1]
    return {
        "patterns": len(results),
        "tau": round(float(kendalltau(small, large).statistic), 3),
        "regret": round(large[int(np.argmin(small))] - min(large), 4),
        "noise": round(float(np.mean(errors)), 4) if errors else None,
    }


def train(blocks: list[str], seed: int, overrides: list[str]) -> dict:
    """nll per token on test after a training with retrain.yaml at LARGER sizes."""
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.retraining.phase import train_pattern
    from nas.training.device import device_context, set_up_device
    from nas.training.evaluation import evaluate_split

    config = load_config(Path(__file__).with_name("retrain.yaml"), [*LARGER, f"seed={seed}", *overrides])
    set_up_device(config.seed, config.train)
    corpus, context = Corpus(prepare(config.data)), device_context(config.train)
    model = train_pattern(blocks, config, corpus, context)
    figures = evaluate_split(config, model, model.blocks, corpus, "test", context)
    return {"pattern": abbreviate(blocks), "nll": figures["nll_per_token"]}


def mean_and_error(losses: list[float]) -> str:
    if len(losses) < 2:
        return "".join(f"{loss:.4f}" for loss in losses)
    return f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1) / len(losses) ** 0.5:.4f}"


def print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    run_command(main)
