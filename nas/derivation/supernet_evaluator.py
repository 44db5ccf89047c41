"""Losses of patterns with the weights of a trained SuperNet.

N blocks, O candidate operations.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.pattern import abbreviate
from nas.core.provenance import check_text, data_digests
from nas.core.run_folder import CHECKPOINT
from nas.costs.budget import likeliest_path
from nas.costs.cost_table import CostTable
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.derivation.baselines import rules_within
from nas.derivation.pattern_record import Choice
from nas.derivation.runs import SearchRun
from nas.search.sampling import sample_path
from nas.search.supernet import build_supernet
from nas.training.build import image_size
from nas.training.checkpoint import load_checkpoint
from nas.training.device import set_up_device
from nas.training.evaluation import count_memory_blocks, period_of, total_nll

PARTS, PART_TOKENS = 4, 8_192  # parts of valid, evenly spaced; their spread gives the error of a loss
SAMPLED_ROWS = 4  # rows of the batch with sampled paths; with fewer rows more paths are sampled
PATH_ROWS = 16  # rows of the batch for a fixed path, many for speed
SEED = 0


class SampledPaths(nn.Module):
    """A SuperNet that samples a new path from pi [N, O] in each forward pass; `seed` fixes the noise."""

    def __init__(self, supernet: nn.Module, pi: Tensor, seed: int):
        super().__init__()
        self.supernet, self.logits = supernet, pi.log()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, *inputs):
        self.supernet.set_path(sample_path(self.logits, self.generator))
        return self.supernet(*inputs)


class SuperNetEvaluator:
    """The SuperNet at the end of a search, and the parts of valid on which it is evaluated."""

    def __init__(self, run: Path):
        """Raises InputError if the run has no checkpoint of a search, or if its text has changed."""
        if not (run / CHECKPOINT).exists():
            raise InputError(
                f"{run} holds no {CHECKPOINT} with the SuperNet's weights; --method argmax and budget do not need them"
            )
        state = load_checkpoint(run / CHECKPOINT, "phase")["phase"]
        if "supernet" not in state:
            raise InputError(f"{run / CHECKPOINT} holds no SuperNet; give the --run folder of a search")
        self.config = load_config(run / "config.yaml", [])
        self.context = set_up_device(self.config.seed, self.config.train)
        self.corpus = Corpus(prepare(self.config.data))
        check_text(run, data_digests(self.corpus.meta))
        self.supernet = build_supernet(self.config, self.corpus)
        self.supernet.load_state_dict(state["supernet"])
        self.supernet.backbone.to(self.context.device)
        self.supernet.eval()
        self.period = period_of(self.supernet.backbone.blocks, image_size(self.config))
        text = self.corpus.tokens("valid")
        size = max(1, min(PART_TOKENS, (len(text) - 1) // PARTS))
        size = -(-size // self.period) * self.period  # the position of a part is a multiple of the period
        spare = max(0, len(text) - 1 - size)
        distance = max(size, spare // (PARTS - 1) // self.period * self.period)
        starts = [start for start in range(0, PARTS * distance, distance) if start <= spare]
        self.parts = [text[start : start + size + 1] for start in starts]
        self.path_nlls: dict[tuple[int, ...], float] = {}  # results of path_nll()

    def nll(self, pi: Tensor) -> np.ndarray:
        """Loss per token [parts] with blocks that follow pi [N, O].

        If the search was soft, pi mixes the operations; otherwise each segment samples a new path. Each call
        samples the paths of a part with the same noise, so that the noise does not contribute to differences.
        """
        if self.config.search.sampling == "soft":
            self.supernet.set_mixture(pi)
            models = [self.supernet] * len(self.parts)
        else:
            models = [SampledPaths(self.supernet, pi, SEED + part) for part in range(len(self.parts))]
        memory_blocks = count_memory_blocks(self.supernet.backbone.blocks)
        pairs = zip(models, self.parts, strict=True)
        return np.concatenate([self.losses(model, [text], SAMPLED_ROWS, memory_blocks) for model, text in pairs])

    @torch.no_grad()
    def path_nll(self, path: list[int]) -> float:
        """Loss per token along a path, an operation's index for each block, on every other part of valid."""
        key = tuple(path)
        if key not in self.path_nlls:
            self.supernet.set_path(path)
            memory_blocks = count_memory_blocks(self.supernet.operations_on(path))
            parts = self.parts[::2] if len(self.parts) == PARTS else self.parts
            losses = self.losses(self.supernet, parts, PATH_ROWS, memory_blocks)
            self.path_nlls[key] = float(losses.mean())
        return self.path_nlls[key]

    def losses(self, model: nn.Module, parts: list[np.ndarray], rows: int, memory_blocks: int | None) -> np.ndarray:
        """Loss per token [parts]; rows: the batch size; memory_blocks: see total_nll()."""
        train, device = self.config.train, self.context.device
        with self.context.autocast(), self.context.disable_compile():
            sums = [
                total_nll(model, text, rows, train.segment, train.memory, memory_blocks, self.period, device)
                for text in parts
            ]
        return np.array([total / tokens for total, tokens in sums])


@cache
def load_evaluator(run: Path) -> SuperNetEvaluator:
    """The evaluator of a run folder. Each run is loaded once, because learning pi anew does not change the weights."""
    return SuperNetEvaluator(run)


def mean_nll(evaluators: list[SuperNetEvaluator], path: list[int]) -> float:
    """Loss per token along a path, averaged over SuperNets."""
    return float(np.mean([evaluator.path_nll(path) for evaluator in evaluators]))


def choose_among_seeds(
    choice: Choice, runs: list[SearchRun], costs: CostTable, evaluators: list[SuperNetEvaluator]
) -> Choice:
    """The choice, with the path of lowest loss among its own and the likeliest path of each seed of pi.

    Two seeds may find different patterns that are equally good. The average of their pi is then a mixture, which may be
    worse than both. Losses are those of mean_nll().
    """
    own = choice.runs or runs
    limits = costs, choice.budget, choice.attentions
    found = [likeliest_path(pi, run.operations, *limits) for run in own for pi in run.seed_pi]
    paths = [list(path) for path in dict.fromkeys(map(tuple, [choice.path, *found]))]
    return replace(choice, path=min(paths, key=lambda path: mean_nll(evaluators, path)) if paths[1:] else choice.path)


def compare_with_rules(
    evaluators: list[SuperNetEvaluator], pattern: list[str], operations: list[str], costs: CostTable, budget: float
) -> dict[str, dict]:
    """{name: {"pattern", "nll"}} of a pattern, called `pi`, and of rules within a budget.

    budget: a ratio to the interleaved pattern's cost.

    nll: loss per token on parts of valid with the SuperNets' weights.
    """
    patterns = {"pi": pattern, **rules_within(len(pattern), operations, costs, budget)}
    paths = {name: [operations.index(part) for part in own] for name, own in patterns.items()}
    return {name: describe_path(evaluators, operations, path) for name, path in paths.items()}


def describe_path(evaluators: list[SuperNetEvaluator], operations: list[str], path: list[int]) -> dict:
    """The pattern of a path, abbreviated, and its nll by mean_nll()."""
    pattern = abbreviate([operations[index] for index in path])
    return {"pattern": pattern, "nll": round(mean_nll(evaluators, path), 4)}
