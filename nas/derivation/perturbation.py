"""Derivation by perturbation (Wang et al. 2021, arXiv 2108.04392): in a block the operation whose removal hurts most.

Probabilities say what the logits were pushed to; this asks the SuperNet's weights. Two things differ from the paper:
the weights are not tuned between one decision and the next, and where paths were sampled in the search, not mixed, the
loss is that of sampled paths. N blocks, O candidate operations.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nas.derivation.supernet_evaluator import SEED, TrainedSuperNet


def removal_losses(net: TrainedSuperNet, pi: Tensor, block: int) -> np.ndarray:
    """Loss per token [parts, O] with each operation taken out of a block, whose others share its probability."""
    losses = []
    for operation in range(pi.shape[1]):
        without = pi.clone()
        without[block] += torch.finfo(pi.dtype).tiny  # so that others are left where pi has none
        without[block, operation] = 0.0
        without[block] /= without[block].sum()
        losses.append(net.nll(without))
    return np.stack(losses, axis=1)


def choose_by_perturbation(runs: list[Path]) -> tuple[list[int], list[np.ndarray]]:
    """The operation of each block, and for each block the loss per token without each operation [R, O], measured once
    for each part of the text and each run.

    Blocks are decided one after the other in a random order; those that are decided run their choice alone.
    """
    nets = [TrainedSuperNet(run, "perturbation") for run in runs]
    pis = [net.supernet.pi() for net in nets]
    blocks, operations = pis[0].shape
    path, losses = [0] * blocks, [np.zeros((1, operations))] * blocks
    for block in np.random.default_rng(SEED).permutation(blocks).tolist():
        if operations > 1:
            losses[block] = np.concatenate([removal_losses(net, pi, block) for net, pi in zip(nets, pis, strict=True)])
        path[block] = int(losses[block].mean(axis=0).argmax())
        for pi in pis:
            pi[block] = 0.0
            pi[block, path[block]] = 1.0
    return path, losses
