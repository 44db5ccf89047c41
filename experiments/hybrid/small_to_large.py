"""Does the order of patterns carry over to larger models?

Command: `python experiments/hybrid/small_to_large.py --small RUN_DIR data.source=FOLDER`. RUN_DIR is a comparison.

The program makes each of its patterns twice as deep, by stretch and by stack, and trains it at twice the width with the
same recipe. Kendall's tau compares the order of the losses on valid at both sizes. The regret is the loss of the
pattern that is best at the small size minus the lowest loss, both at the large size, in nats per token.

Every finished training is a JSON file in OUT and is not repeated. Several processes may share OUT if --only divides the
trainings between them. The last line is JSON.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.jobs import Jobs, job_parser
from nas.core.config_loading import load_config
from nas.core.errors import InputError, run_command
from nas.core.files import read_yaml
from nas.core.pattern import RESIZINGS, abbreviate, network, read_pattern
from nas.core.run_folder import RESULTS

LARGER = ["model.d_model=128", "model.d_ffn=512"]  # twice the width of retrain.yaml
DEPTH = 2
SEED = 1
RANDOM = 2  # random patterns of each budget that take part


def main() -> None:
    parser = job_parser(__doc__, "runs/small-to-large", "stretch-*")
    parser.add_argument("--small", type=Path, required=True, help="run folder of a comparison with retrain.yaml")
    arguments = parser.parse_intermixed_args()
    jobs, small = Jobs(arguments.out, arguments.overrides, arguments.only), small_losses(arguments.small)
    rows, summary = {}, {}
    for by, resize in RESIZINGS.items():
        for blocks in map(list, small):
            larger = resize(blocks, DEPTH * len(blocks))
            result = jobs.do(f"{by}-{abbreviate(blocks)}", lambda: train(larger, arguments.overrides))  # noqa: B023
            rows.setdefault(tuple(blocks), {})[by] = result and result["nll"]
    print_row("pattern", "small", *RESIZINGS)
    print_row(*["---"] * (2 + len(RESIZINGS)))
    for blocks in sorted(small, key=small.get):
        losses = [loss and f"{loss:.4f}" for loss in rows[blocks].values()]
        print_row(abbreviate(list(blocks)), f"{small[blocks]:.4f}", *losses)
    for by in RESIZINGS:
        large = {blocks: losses[by] for blocks, losses in rows.items() if losses[by]}
        if len(large) > 1:
            summary[by] = agreement({blocks: small[blocks] for blocks in large}, large)
    print(json.dumps(summary))


def small_losses(run: Path) -> dict[tuple[str, ...], float]:
    """nll per token on valid of the comparison's patterns with SEED. Of equal networks, only the first counts."""
    losses, networks = {}, set()
    for file in sorted((run / "patterns").glob("*.yaml")):
        name, blocks = file.stem, read_pattern(file)["blocks"]
        results = run / "runs" / f"{abbreviate(blocks)}-{SEED}" / RESULTS
        left_out = name.startswith("random-") and int(name.rpartition("-")[2]) > RANDOM
        if results.exists() and not left_out and network(blocks) not in networks:
            networks.add(network(blocks))
            losses[tuple(blocks)] = read_yaml(results)["valid"]["nll_per_token"]
    if not losses:
        raise InputError(f"--small {run} holds no finished training; give the run folder of a comparison")
    return losses


def agreement(small: dict, large: dict) -> dict:
    """Kendall's tau between the losses of the same patterns at two sizes, and the regret of the best at the first."""
    from scipy.stats import kendalltau

    tau = kendalltau(list(small.values()), list(large.values())).statistic
    regret = large[min(small, key=small.get)] - min(large.values())
    return {"patterns": len(large), "tau": round(float(tau), 3), "regret": round(regret, 4)}


def train(blocks: list[str], overrides: list[str]) -> dict:
    """nll per token on valid after a training with retrain.yaml at LARGER sizes."""
    from nas.data.corpus import Corpus
    from nas.data.preprocess import prepare
    from nas.retraining.phase import train_pattern
    from nas.training.device import device_context, set_up_device
    from nas.training.evaluation import evaluate_split

    config = load_config(Path(__file__).with_name("retrain.yaml"), [*LARGER, f"seed={SEED}", *overrides])
    set_up_device(config.seed, config.train)
    corpus, context = Corpus(prepare(config.data)), device_context(config.train)
    model = train_pattern(blocks, config, corpus, context)
    figures = evaluate_split(config, model, model.blocks, corpus, "valid", context)
    return {"pattern": abbreviate(blocks), "nll": figures["nll_per_token"]}


def print_row(*cells) -> None:
    print("| " + " | ".join(cell or "" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    run_command(main)
