"""Derivation by perturbation (Wang et al. 2021, arXiv 2108.04392): in a block the operation whose removal hurts most.

Probabilities say what the logits were pushed to; this asks the SuperNet's weights. N blocks, O candidate operations.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nas.assembly import build_supernet
from nas.checkpoint import load_checkpoint
from nas.config import load_config
from nas.data import Corpus
from nas.errors import InputError
from nas.evaluation import count_looking_back, total_nll
from nas.gumbel import sample_path
from nas.prepare import prepare
from nas.record import CHECKPOINT

TOKENS = 32_768  # of valid, the first: what a loss is measured on
SEED = 0


class SampledPaths(nn.Module):
    """A SuperNet that draws a new path from pi for each forward pass, always the same ones."""

    def __init__(self, supernet: nn.Module, pi: Tensor):
        super().__init__()
        self.supernet, self.logits = supernet, pi.log()
        self.generator = torch.Generator().manual_seed(SEED)

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
        corpus = Corpus(prepare(self.config.data))
        self.text = corpus.tokens("valid")[: TOKENS + 1]
        self.supernet = build_supernet(self.config, corpus)
        self.supernet.load_state_dict(state["supernet"])
        self.supernet.eval()
        self.soft = self.config.search.sampling == "soft"

    def nll(self, pi: Tensor) -> float:
        """Loss per token where blocks follow pi [N, O]: mixed by it, or sampled from it anew for each segment.

        The sampled paths come from the same noise at each call, so that a difference is not one of noise.
        """
        model, train = self.supernet, self.config.train
        if self.config.search.sampling == "soft":
            self.supernet.mix(pi)
        else:
            model = SampledPaths(self.supernet, pi)
        looking_back = count_looking_back(self.supernet.backbone.blocks)
        rows = self.config.evaluate.batch_size
        total, counted = total_nll(model, self.text, rows, train.segment, train.memory, looking_back)
        return total / counted

    def removal_losses(self, pi: Tensor, block: int) -> np.ndarray:
        """Loss per token [O] with each operation taken out of a block, whose others share its probability."""
        losses = []
        for operation in range(pi.shape[1]):
            without = pi.clone()
            without[block] += torch.finfo(pi.dtype).tiny  # so that others are left where pi has none
            without[block, operation] = 0.0
            without[block] /= without[block].sum()
            losses.append(self.nll(without))
        return np.array(losses)


def choose_by_perturbation(runs: list[Path]) -> tuple[list[int], list[list[float]]]:
    """The operation of each block, and each one's mean loss per token [N][O] over the runs without it.

    Blocks are decided one after the other in a random order; those that are decided run their choice alone.
    """
    nets = [TrainedSuperNet(run) for run in runs]
    pis = [net.supernet.pi() for net in nets]
    blocks, operations = pis[0].shape
    path, losses = [0] * blocks, [[0.0] * operations] * blocks
    if operations == 1:
        return path, losses
    for block in np.random.default_rng(SEED).permutation(blocks).tolist():
        mean = np.mean([net.removal_losses(pi, block) for net, pi in zip(nets, pis, strict=True)], axis=0)
        path[block], losses[block] = int(mean.argmax()), mean.tolist()
        for pi in pis:
            pi[block] = 0.0
            pi[block, path[block]] = 1.0
    return path, losses
