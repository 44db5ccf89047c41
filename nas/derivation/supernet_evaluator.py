"""The SuperNet that a search left, as a judge of patterns: what derivations that ask its weights have in common.

N blocks, O candidate operations.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.config_loading import load_config
from nas.core.errors import InputError
from nas.core.run_folder import CHECKPOINT
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.search.sampling import sample_path
from nas.search.supernet import build_supernet
from nas.training.build import image_size
from nas.training.checkpoint import load_checkpoint
from nas.training.device import set_up_device
from nas.training.evaluation import count_memory_blocks, period_of, total_nll

PARTS, PART_TOKENS = 4, 8_192  # of valid, from its beginning: each measures a loss once, and their spread is its error


ROWS = 4  # read at once where paths are sampled: fewer mean more of them


PATH_ROWS, PATH_PARTS = 16, 2  # read at once along one path, where more are faster; parts read


SEED = 0


class SampledPaths(nn.Module):
    """A SuperNet that draws a new path from pi for each forward pass, from noise that `seed` fixes."""

    def __init__(self, supernet: nn.Module, pi: Tensor, seed: int):
        super().__init__()
        self.supernet, self.logits = supernet, pi.log()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, *inputs):
        self.supernet.set_path(sample_path(self.logits, self.generator))
        return self.supernet(*inputs)


class TrainedSuperNet:
    """The SuperNet at the end of a search, and the text that judges it."""

    def __init__(self, run: Path, method: str):
        """method: the derivation that needs it. Raises InputError where the run has no checkpoint."""
        if not (run / CHECKPOINT).exists():
            raise InputError(
                f"--method {method}: {run} holds no {CHECKPOINT}, whose weights it needs; argmax and budget do not"
            )
        state = load_checkpoint(run / CHECKPOINT, "phase")["phase"]
        if "supernet" not in state:
            raise InputError(f"{run / CHECKPOINT} holds no SuperNet: give the --run folder of a search")
        self.config = load_config(run / "config.yaml", [])
        self.context = set_up_device(self.config.seed, self.config.train)
        self.corpus = corpus = Corpus(prepare(self.config.data))
        text = corpus.tokens("valid")
        size = max(1, min(PART_TOKENS, (len(text) - 1) // PARTS))
        self.supernet = build_supernet(self.config, corpus)
        self.supernet.load_state_dict(state["supernet"])
        self.supernet.backbone.to(self.context.device)
        self.period = period_of(self.supernet.backbone.blocks, image_size(self.config))
        size = -(-size // self.period) * self.period  # each part begins like the text
        starts = range(0, max(1, min(len(text) - size, PARTS * size)), size)
        self.parts = [text[start : start + size + 1] for start in starts]
        self.supernet.eval()

    def nll(self, pi: Tensor) -> np.ndarray:
        """Loss per token [parts] where blocks follow pi [N, O]: mixed by it, or sampled from it anew for each segment.

        The sampled paths of a part come from the same noise at each call, so that a difference is not one of noise.
        """
        looking_back, train, losses = count_memory_blocks(self.supernet.backbone.blocks), self.config.train, []
        for part, text in enumerate(self.parts):
            model = self.supernet
            if self.config.search.sampling == "soft":
                self.supernet.set_mixture(pi)
            else:
                model = SampledPaths(self.supernet, pi, SEED + part)
            with self.context.autocast():
                total, counted = total_nll(
                    model, text, ROWS, train.segment, train.memory, looking_back, self.period, self.context.device
                )
            losses.append(total / counted)
        return np.array(losses)

    @torch.no_grad()
    def path_nll(self, path: list[int]) -> float:
        """Loss per token along a path, an operation's index for each block, on the first parts of valid."""
        self.supernet.set_path(path)
        looking_back = count_memory_blocks(self.supernet.operations_on(path))
        return self.nll_of(self.supernet, looking_back, self.parts[:PATH_PARTS])

    def nll_of(self, model: nn.Module, looking_back: int, parts: list) -> float:
        """Loss per token of a model, the SuperNet or another, on some parts of valid."""
        train = self.config.train
        with self.context.autocast(), self.context.disable_compile():
            losses = [
                total_nll(
                    model, text, PATH_ROWS, train.segment, train.memory, looking_back, self.period, self.context.device
                )
                for text in parts
            ]
        return sum(total for total, _ in losses) / sum(counted for _, counted in losses)
