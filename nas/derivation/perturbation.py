"""Derivation by perturbation (Wang et al. 2021, arXiv 2108.04392): the operation whose removal hurts a block most.

pi shows what the logits learned; perturbation measures how much the SuperNet's loss depends on an operation. It differs
from the paper in two points: the weights are not fine-tuned between decisions, and after a hard search the loss is that
of sampled paths.
N blocks, O candidate operations, R measurements.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nas.derivation.supernet_evaluator import SEED, SuperNetEvaluator


def losses_without(evaluator: SuperNetEvaluator, pi: Tensor, block: int) -> np.ndarray:
    """Loss per token [parts, O] with each operation removed from a block. The others share its probability."""
    losses = []
    for operation in range(pi.shape[1]):
        without = pi.clone()
        without[block] += torch.finfo(pi.dtype).tiny  # if the others have no probability, they share it equally
        without[block, operation] = 0.0
        without[block] /= without[block].sum()
        losses.append(evaluator.nll(without))
    return np.stack(losses, axis=1)


def perturb(runs: list[Path]) -> tuple[list[int], list[np.ndarray]]:
    """The path, and for each block the losses per token without each operation [R, O], one row per part and run.

    Blocks are decided in random order; a decided block runs only its choice. Raises InputError if a run has no
    checkpoint.
    """
    evaluators = [SuperNetEvaluator(run) for run in runs]
    pis = [evaluator.supernet.pi() for evaluator in evaluators]
    blocks, operations = pis[0].shape
    path, losses = [0] * blocks, [np.zeros((1, operations))] * blocks
    for block in np.random.default_rng(SEED).permutation(blocks).tolist():
        if operations > 1:
            pairs = zip(evaluators, pis, strict=True)
            losses[block] = np.concatenate([losses_without(evaluator, pi, block) for evaluator, pi in pairs])
        path[block] = int(losses[block].mean(axis=0).argmax())
        for pi in pis:
            pi[block] = 0.0
            pi[block, path[block]] = 1.0
    return path, losses
