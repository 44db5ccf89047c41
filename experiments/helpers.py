"""What several experiments share."""

import csv
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from models.operations.registry import Shape
from nas.core.config import Config
from nas.core.config_loading import load_config
from nas.core.files import write_yaml
from nas.core.pattern import abbreviate, resolve_block
from nas.core.run_folder import CONFIG

if TYPE_CHECKING:  # they import torch
    from nas.training.device import Runtime

FRONTIER = Path(__file__).with_name("frontier") / "frontier.yaml"


class ArrayCorpus:
    """The interface of nas.data.corpus.Corpus that a phase uses, for generated tokens.

    splits: {"train", "valid", and optionally "test": tokens}.
    """

    def __init__(self, vocab_size: int, **splits):
        self.vocab_size, self.splits = vocab_size, {"test": splits["valid"]} | splits
        self.vocabulary = SimpleNamespace(kind="bytes", decode=lambda ids: bytes(len(ids)))
        about = {"words_kept": False, "lossless": False}
        sizes = {split: len(tokens) for split, tokens in self.splits.items()}
        self.meta = {"splits": {split: {"words": n, "bytes": n, "tokens": n, **about} for split, n in sizes.items()}}

    def tokens(self, split: str) -> np.ndarray:
        return np.asarray(self.splits[split])

    def counts(self) -> np.ndarray:
        return np.bincount(self.splits["train"], minlength=self.vocab_size)


def sized_blocks(blocks: list[str], d_model: int, keys: int = 0) -> list[tuple[str, dict[str, int]]]:
    """The operation and the sizes of each block, with 4 heads and a d_ffn of 4x. keys: segment and memory together."""
    return [resolve_block(block, Shape(d_model, 4, "4x", keys, keys)) for block in blocks]


def spell_network(content: dict) -> str:
    """Pieces, width and blocks for a table. content: as Network.to_dict()."""
    return f"{content['vocab_size']:,}, {content['d_model']}, `{abbreviate(content['blocks'])}`"


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def open_space(path: Path, out: Path, overrides: list[str]):
    """(configuration, texts by vocabulary, pairs of sizes, costs, device) of the search of a configuration file. The
    costs are those of OUT, and are written there if they are new.
    """
    from nas.search.candidate_costs import find_costs, open_candidates
    from nas.search.network_search import COSTS
    from nas.training.device import set_up_device

    config = load_config(path, overrides)
    runtime = set_up_device(config.seed, config.train)
    candidates = open_candidates(config, runtime)
    costs = find_costs(candidates, out / COSTS, runtime, keep=True)
    if not (out / COSTS).exists():
        out.mkdir(parents=True, exist_ok=True)
        write_yaml(out / COSTS, costs.to_dict())
    return config, candidates.corpora, candidates.shapes, costs, runtime


def open_trials(config: Config, corpora: dict, folder: Path, runtime: "Runtime"):
    """The trials in a folder, on all cores of this machine."""
    from nas.jobs.engines import open_engine
    from nas.search.trials import Trials

    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(folder / CONFIG, {"stage": "search", **asdict(config)})
    return Trials(config, corpora, folder, runtime, open_engine(config, runtime, folder))


def print_row(*cells, header: bool = False) -> None:
    """Print a row of a Markdown table. A cell of None is empty. header: also print the line below a header."""
    row = "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"
    print(row + ("\n|" + "---|" * len(cells) if header else ""), flush=True)
