"""Derivation by perturbation (Wang et al. 2021, arXiv 2108.04392): in a block the operation whose removal hurts most.

Probabilities say what the logits were pushed to; this asks the SuperNet's weights. Two things differ from the paper:
the weights are not tuned between one decision and the next, and where paths were sampled in the search, not mixed, the
loss is that of sampled paths. N blocks, O candidate operations.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nas.assembly import build_supernet, image_size
from nas.checkpoint import load_checkpoint
from nas.config import load_config
from nas.data import Corpus
from nas.device import set_up
from nas.errors import InputError
from nas.evaluation import count_looking_back, period_of, total_nll
from nas.gumbel import sample_path
from nas.prepare import prepare
from nas.record import CHECKPOINT

PARTS, PART_TOKENS = 4, 8_192  # of valid, from its beginning: each measures a loss once, and their spread is its error
ROWS = 4  # read at once: fewer mean more sampled paths
SEED = 0


class SampledPaths(nn.Module):
    """A SuperNet that draws a new path from pi for each forward pass, from noise that `seed` fixes."""

    def __init__(self, supernet: nn.Module, pi: Tensor, seed: int):
        super().__init__()
        self.supernet, self.logits = supernet, pi.log()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, *inputs):
        self.supernet.take(sample_path(self.logits, self.generator))
        return self.supernet(*inputs)


class TrainedSuperNet:
    """The SuperNet at the end of a search, and the text that judges it."""

    def __init__(self, run: Path):
        """Raises InputError where the run has no checkpoint."""
        if not (run / CHECKPOINT).exists():
            raise InputError(
                f"--method perturbation: {run} holds no {CHECKPOINT}, whose weights it needs; the other methods do not"
            )
        state = load_checkpoint(run / CHECKPOINT, "phase")["phase"]
        if "supernet" not in state:
            raise InputError(f"{run / CHECKPOINT} holds no SuperNet: give the --run folder of a search")
        self.config = load_config(run / "config.yaml", [])
        set_up(self.config.seed, self.config.train.threads)
        corpus = Corpus(prepare(self.config.data))
        text = corpus.tokens("valid")
        size = max(1, min(PART_TOKENS, (len(text) - 1) // PARTS))
        self.supernet = build_supernet(self.config, corpus)
        self.supernet.load_state_dict(state["supernet"])
        self.period = period_of(self.supernet.backbone.blocks, image_size(self.config))
        size = -(-size // self.period) * self.period  # each part begins like the text
        starts = range(0, max(1, min(len(text) - size, PARTS * size)), size)
        self.parts = [text[start : start + size + 1] for start in starts]
        self.supernet.eval()

    def nll(self, pi: Tensor) -> np.ndarray:
        """Loss per token [parts] where blocks follow pi [N, O]: mixed by it, or sampled from it anew for each segment.

        The sampled paths of a part come from the same noise at each call, so that a difference is not one of noise.
        """
        looking_back, train, losses = count_looking_back(self.supernet.backbone.blocks), self.config.train, []
        for part, text in enumerate(self.parts):
            model = self.supernet
            if self.config.search.sampling == "soft":
                self.supernet.mix(pi)
            else:
                model = SampledPaths(self.supernet, pi, SEED + part)
            total, counted = total_nll(model, text, ROWS, train.segment, train.memory, looking_back, self.period)
            losses.append(total / counted)
        return np.array(losses)

    def removal_losses(self, pi: Tensor, block: int) -> np.ndarray:
        """Loss per token [parts, O] with each operation taken out of a block, whose others share its probability."""
        losses = []
        for operation in range(pi.shape[1]):
            without = pi.clone()
            without[block] += torch.finfo(pi.dtype).tiny  # so that others are left where pi has none
            without[block, operation] = 0.0
            without[block] /= without[block].sum()
            losses.append(self.nll(without))
        return np.stack(losses, axis=1)


def choose_by_perturbation(runs: list[Path]) -> tuple[list[int], list[np.ndarray]]:
    """The operation of each block, and for each block the loss per token without each operation [R, O], measured once
    for each part of the text and each run.

    Blocks are decided one after the other in a random order; those that are decided run their choice alone.
    """
    nets = [TrainedSuperNet(run) for run in runs]
    pis = [net.supernet.pi() for net in nets]
    blocks, operations = pis[0].shape
    path, losses = [0] * blocks, [np.zeros((1, operations))] * blocks
    for block in np.random.default_rng(SEED).permutation(blocks).tolist():
        if operations > 1:
            losses[block] = np.concatenate([net.removal_losses(pi, block) for net, pi in zip(nets, pis, strict=True)])
        path[block] = int(losses[block].mean(axis=0).argmax())
        for pi in pis:
            pi[block] = 0.0
            pi[block, path[block]] = 1.0
    return path, losses
