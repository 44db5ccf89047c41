"""A SuperNet with trained weights, which judge any path, and the texts that they have not seen."""

from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from nas.core.config import Config, flat_config
from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.operations import describe_sizes
from nas.core.provenance import check_text, data_digests
from nas.core.run_folder import CHECKPOINT, OUTCOME, find_weights_run
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.search.supernet import SuperNet, build_supernet
from nas.training.build import image_size
from nas.training.checkpoint import load_supernet
from nas.training.device import DeviceContext, set_up_device
from nas.training.evaluation import count_memory_blocks, period_of, total_nll

PARTS, PART_TOKENS = 2, 8_192  # parts of valid on which paths are judged
ROWS = 16  # of a batch
MUST_EQUAL = ("model.", "search.operations", "search.arch_fraction")


class SharedWeights:
    """The weights of a SuperNet that trained on uniform paths."""

    def __init__(self, supernet: SuperNet, corpus: Corpus, config: Config, context: DeviceContext):
        self.supernet, self.corpus, self.config, self.context = supernet, corpus, config, context
        supernet.backbone.to(context.device)
        supernet.eval()
        self.nlls: dict[tuple[int, ...], float] = {}

    @torch.no_grad()
    def nll(self, path: list[int]) -> float:
        """nll per token along a path, an operation's index for each block, on two parts of valid."""
        key = tuple(path)
        if key not in self.nlls:
            self.supernet.set_path(path)
            train, memory_blocks = self.config.train, count_memory_blocks(self.supernet.chosen_operations())
            lengths = ROWS, train.segment, train.memory, memory_blocks, self.period
            with self.context.autocast(), self.context.disable_compile():
                sums = [total_nll(self.supernet, part, *lengths, self.context.device) for part in self.valid_parts()]
            self.nlls[key] = sum(total / tokens for total, tokens in sums) / len(sums)
        return self.nlls[key]

    def valid_parts(self) -> list:
        """The tokens of the first and the last part of valid. Each begins at a multiple of the period."""
        text = self.corpus.tokens("valid")
        size = max(1, min(PART_TOKENS, (len(text) - 1) // PARTS))
        size = -(-size // self.period) * self.period
        spare = max(0, len(text) - 1 - size) // self.period * self.period
        return [text[start : start + size + 1] for start in sorted({0, spare})]

    @property
    def period(self) -> int:
        return period_of(self.supernet.backbone.blocks, image_size(self.config))


@cache
def load_shared_weights(run: Path) -> SharedWeights:
    """The weights of a finished search. Raises InputError if they are missing, or if its text has changed."""
    config = load_config(run / "config.yaml", [])
    context, corpus = set_up_device(config.seed, config.train), Corpus(prepare(config.data))
    check_text(run, data_digests(corpus.meta))
    supernet = build_supernet(config, corpus)
    supernet.load_state_dict(load_supernet(run))
    return SharedWeights(supernet, corpus, config, context)


def inherit_weights(supernet: SuperNet, config: Config, corpus: Corpus) -> None:
    """Load the weights of the search in search.weights_from into a SuperNet.

    Raises InputError, with the first difference, if that search has another model or text, or is not finished.
    """
    run = Path(config.search.weights_from)
    prefix = f"search.weights_from={run}"
    if not (run / OUTCOME).exists() or not (find_weights_run(run) / CHECKPOINT).exists():
        raise InputError(f"{prefix} holds no finished search; finish it with --resume, or give another --run folder")
    check_text(run, data_digests(corpus.meta))
    old, new = flat_config(read_yaml(run / "config.yaml")), flat_config(asdict(config))
    if old["search.method"] != "single_path":
        raise InputError(f"{prefix} has search.method={old['search.method']}; its weights favour its own pi")
    for key in new:
        if key.startswith(MUST_EQUAL) and old[key] != new[key]:
            raise InputError(f"{prefix} has {key}={old[key]}, not {new[key]}; give the options of that search")
    shapes = load_config(run / "config.yaml", []).shape, config.shape
    for block in config.search.operations:
        own, given = (describe_sizes(block, shape) for shape in shapes)
        if own != given:
            raise InputError(f"{prefix} has {block} with {own}, not {given}; give the sizes of that search")
    supernet.load_state_dict(load_supernet(run))
