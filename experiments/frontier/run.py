"""Search and train in each cell: `python experiments/frontier/run.py --out runs/frontier`.

For each text, budget and seed, search.py, derive.py and retrain.py run with the default mixture. The usual network, of
the reference's sizes and as deep as the budget allows, has the same mixture. All searches of a text use the same
measured costs; nothing else should run while the first call measures them. Results that are there are not repeated. Two
calls, for different texts, may run side by side.
"""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.frontier.problem import cells_of, deepest_interleaved, read_arguments, read_run, results_of
from experiments.helpers import FRONTIER, open_space
from nas.core.config import Config
from nas.core.errors import RunError, run_command
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import FORMAT
from nas.core.run_folder import CHOICE, CONFIG, PATTERN, TRIALS, run_options
from nas.search.space import NetworkCosts, first_candidates, make_network

ROOT = Path(__file__).parents[2]
SEEN = {"wikitext-2"}  # texts whose losses the prior of the surrogate has; it is fitted again without them


def call(script: str, *arguments) -> None:
    if status := subprocess.run([sys.executable, ROOT / script, *map(str, arguments)]).returncode:
        raise RunError(f"{script} ended with exit status {status}; its message stands above")


def search_and_train(cell: Path, options: list[str]) -> dict:
    """The results of one search, and of the training of its network. cell: a folder beside costs.yaml of the text."""
    from nas.search.network_search import COSTS

    config, _, shapes, costs, _ = open_space(FRONTIER, cell.parent, options)
    if not fits(config, shapes, costs):
        return {"network": None}
    search, training = cell / "search", cell / "found"
    (search / TRIALS).mkdir(parents=True, exist_ok=True)
    shutil.copy(cell.parent / COSTS, search / TRIALS)
    seen = cell.parent.name in SEEN
    script = ["experiments/prior/search_without.py", cell.parent.name] if seen else ["search.py"]
    call(*script, FRONTIER, *run_options(search), *options)
    if not (search / PATTERN).exists():
        call("derive.py", search)
    call("retrain.py", search / PATTERN, search / CONFIG, *run_options(training))
    choice = read_yaml(search / CHOICE)
    about = {"network": choice["network"], "ratio": choice["ratio"], "seconds": choice["wall_time_s"]}
    for checkpoint in search.glob("trials/*/checkpoint.pt"):
        checkpoint.unlink()
    return about | read_run(training)


def train_usual(cell: Path, options: list[str]) -> dict:
    """The results of the deepest interleaved network of the reference's sizes within the budget."""
    config, _, _, costs, _ = open_space(FRONTIER, cell.parent, options)
    if not (blocks := deepest_interleaved(config, costs, costs.reference[:2])):
        return {"network": None}
    cell.mkdir(parents=True, exist_ok=True)
    write_yaml(cell / "usual.yaml", {"format": FORMAT, "blocks": blocks})
    call("retrain.py", cell / "usual.yaml", FRONTIER, *run_options(cell / "usual"), *options)
    network = make_network(*costs.reference[:2], blocks)
    return {"network": network.to_dict(), "ratio": costs.ratio(network)} | read_run(cell / "usual")


def fits(config: Config, shapes: list, costs: NetworkCosts) -> bool:
    """Whether a network is within the budget. shapes: pairs of vocabulary and width."""
    tables = {shape: costs.tables[shape] for shape in shapes}
    return bool(first_candidates(config, tables, config.search.latency.target * costs.reference_cost))


def main() -> None:
    arguments = read_arguments(__doc__)
    jobs = results_of(arguments)
    for name, seed, cell, options in cells_of(arguments):
        for predictor, work in (("found", search_and_train), ("usual", train_usual)):
            jobs.do(f"{name},{predictor},{seed}", partial(work, cell, options))


if __name__ == "__main__":
    run_command(main)
