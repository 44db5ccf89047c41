"""The cells of the frontier: texts and budgets, and where the results of each predictor stand."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from experiments.helpers import FRONTIER, open_space
from experiments.jobs import Jobs
from nas.core.config import Config
from nas.core.files import read_yaml
from nas.core.pattern import interleaved
from nas.core.run_folder import RESULTS
from nas.costs.baselines import deepest
from nas.search.space import NetworkCosts, within_budget

TEXTS = {  # and their data.source
    "speeches": "runs/texts/speeches",
    "go": "runs/texts/go",
    "french": "runs/texts/french",
    "wikitext-2": "wikitext-2",
}
SEEDS = {"wikitext-2": 5}  # of the other texts: 3
BUDGETS = 0.1, 0.4, 1.0
SPLITS = "valid", "test"


def read_arguments(description: str, *flags: str) -> Namespace:
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as data.source=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="folder of all results")
    parser.add_argument("--texts", default=",".join(TEXTS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="default: %(default)s")
    for flag in flags:
        parser.add_argument(flag, action="store_true", help="see above")
    arguments = parser.parse_intermixed_args()
    arguments.texts, arguments.budgets = arguments.texts.split(","), [*map(float, arguments.budgets.split(","))]
    if unknown := {*arguments.texts} - {*TEXTS}:
        parser.error(f"--texts: {min(unknown)} is none of {', '.join(TEXTS)}")
    return arguments


def seeds_of(text: str) -> range:
    return range(1, 1 + SEEDS.get(text, 3))


def options_of_text(text: str, overrides: list[str]) -> list[str]:
    return [f"data.source={TEXTS[text]}", "train.epochs=1", *overrides]


def options_of_cell(text: str, budget: float, seed: int, overrides: list[str]) -> list[str]:
    return [*options_of_text(text, overrides), f"search.latency.target={budget}", f"seed={seed}", "jobs.workers=1"]


def open_text(arguments: Namespace, text: str):
    """As open_space(). Measures the costs of a text once, which all programs use; nothing else should run then."""
    return open_space(FRONTIER, arguments.out / text, options_of_text(text, arguments.overrides))


def cells_of(arguments: Namespace) -> Iterator[tuple[str, int, Path, list[str]]]:
    """TEXT,BUDGET, the seed, the folder and the options of each search. The folder lies beside the costs of a text."""
    for text in arguments.texts:
        open_text(arguments, text)
        for budget, seed in product(arguments.budgets, seeds_of(text)):
            options = options_of_cell(text, budget, seed, arguments.overrides)
            yield f"{text},{budget}", seed, arguments.out / text / f"{budget}-{seed}", options


def deepest_interleaved(config: Config, costs: NetworkCosts, shape: tuple[int, int]) -> list[str] | None:
    """The blocks of the deepest interleaved network of a vocabulary and width within the budget; None if none is."""
    limit = config.search.latency.target * costs.reference_cost
    return deepest(interleaved, config.model.blocks, within_budget(costs.tables[shape], limit))


def results_of(arguments: Namespace) -> Jobs:
    """All results. A name is TEXT,BUDGET,PREDICTOR,SEED."""
    return Jobs(arguments.out / "results", arguments.overrides)


def figures(found: dict) -> dict:
    """What the table needs of the content of results.yaml."""
    return {split: {key: found[split][key] for key in ("bits_per_byte", "word_perplexity")} for split in SPLITS}


def read_run(run: Path) -> dict:
    """The figures of a finished training, with those of its network alone."""
    results = read_yaml(run / RESULTS)
    network = results["network"]
    return figures(results) | {"network_figures": network and figures(network)}
