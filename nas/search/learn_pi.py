"""Learn pi with the fixed weights of a SuperNet, by forward passes on held-out text.

S seeds, N blocks, O candidate operations, K paths.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from nas.core.errors import RunError
from nas.costs.budget import patterns_within
from nas.costs.cost_table import CostTable
from nas.search.history import pi_line
from nas.search.sampling import PathDistribution, PathsWithinBudget, sampling_generator
from nas.search.shared_weights import SharedWeights
from nas.search.supernet import SuperNet
from nas.training import distributed
from nas.training.build import open_streams
from nas.training.train_step import BatchRunner, Stream

ADAM_BETAS = (0.5, 0.999)  # as in DARTS (arXiv 1806.09055, appendix A.1.1): low momentum, as the loss changes
GROWTH = 0.7  # progress at which all paths count
IndexPath = tuple[int, ...]  # the index of each block's operation


@dataclass(frozen=True)
class LearnedPi:
    """What learn_pi() returns.

    Args:
        logits: [S, N, O]; pi = softmax(logits).
        history: a line of pi.jsonl for each step, and before them one with uniform pi.
        evaluated: a line of paths.jsonl for each step: the paths that were drawn [K][N], and their nll [K].
    """

    logits: Tensor
    history: list[dict]
    evaluated: list[dict]

    @property
    def pi(self) -> np.ndarray:
        """[S, N, O], in float64."""
        return self.logits.double().softmax(dim=-1).numpy()


def learn_pi(
    weights: SharedWeights,
    costs: CostTable,
    budget: float | None,
    title: str = "pi",
    report: Callable[[dict, dict | None], None] = lambda line, evaluated: None,
    known: list[dict] | None = None,
) -> LearnedPi:
    """Learn pi search.logits_seeds times, each from uniform in search.logits_steps steps of Adam.

    In each step, K paths are drawn from pi and evaluated on the next batch of held-out text, without dropout. The
    gradient is that of the mean loss of the best paths. The same arguments give the same result. Each
    seed reads on where the one before ended.

    Args:
        budget: the highest cost of the paths, a ratio to the interleaved pattern's; None: any.
        title: of the progress bar.
        report: called with each line of the history, and that of the evaluated paths (None before the first step).
        known: the lines of evaluated paths of an interrupted call. Their losses are not computed again.

    Raises InputError if no pattern fits the budget, RunError if a loss is not finite.
    """
    supernet, options, adam = weights.supernet, weights.config.search, weights.config.search.optimizer
    blocks, operations = supernet.blocks, supernet.operations
    paths = PathDistribution()
    if budget is not None:
        paths = PathsWithinBudget(patterns_within(budget, blocks, operations, costs))
    _, stream = open_streams(weights.corpus, weights.config, weights.context)
    run_batch = BatchRunner(supernet, weights.config.train, weights.context)
    generator = sampling_generator(weights.config.seed)
    steps, total = options.logits_steps, options.logits_steps * options.logits_seeds
    logits, learned, evaluated, known = torch.zeros(blocks, len(operations)), [], [], known or []

    def line(step: int) -> dict:
        pi, within = logits.double().softmax(dim=-1), None if budget is None else paths.marginals(logits).numpy()
        seed = {"of_steps": total, "logits_seed": max(1, len(learned))}
        return pi_line(step, operations, pi.numpy(), within, costs) | seed

    history = [line(0)]
    report(history[0], None)
    for step in tqdm(range(total), title, disable=not (sys.stderr.isatty() and distributed.is_main())):
        if step % steps == 0:
            logits = torch.zeros(blocks, len(operations))
            optimizer = torch.optim.Adam([logits], lr=adam.lr, betas=ADAM_BETAS, weight_decay=adam.weight_decay)
            learned.append(logits)
        drawn = paths.sample(logits, options.paths, generator)
        before = known[step] if step < len(known) else None
        if before and [list(path) for path in before["paths"]] != [list(path) for path in drawn]:
            raise RunError(f"pi: step {step + 1} draws other paths than in paths.jsonl; remove that file and resume")
        nll = evaluate(supernet, run_batch, stream, drawn, before and before["nll"])
        fraction = best_fraction(options.best_fraction, (step % steps + 1) / steps)
        logits.grad = score_gradient(drawn, risk_seeking_weights(nll, fraction), len(operations)).to(logits.dtype)
        optimizer.step()
        history.append(line(step + 1))
        evaluated.append({"step": step + 1, "paths": drawn, "nll": nll.tolist()})
        report(history[-1], evaluated[-1])
    distributed.check_replicated({"the logits": torch.stack(learned)})
    return LearnedPi(torch.stack(learned), history, evaluated)


@torch.no_grad()
def evaluate(
    supernet: SuperNet, run_batch: BatchRunner, stream: Stream, paths: list[IndexPath], known: list[float] | None
) -> Tensor:
    """The nll per token of each path [K] on the next batch, in float64. A path that was drawn twice runs once.

    The memories for the next batch are those of the first path, which is a fair draw from pi. known: the nll, if it is
    known; then only the first path runs.
    """
    batch, results = stream.next(), {}
    for path in dict.fromkeys(paths if known is None else paths[:1]):
        supernet.set_path(path)
        results[path] = run_batch(batch)
    stream.memories = results[paths[0]][1]
    if known is not None:
        return torch.tensor(known, dtype=torch.float64)
    # In float64, because weights cancel if all paths agree in a block. Adam would scale up a rounding error.
    nll = torch.stack([results[path][0] for path in paths]).cpu().double()
    if not nll.isfinite().all():
        raise RunError("pi: the loss of a sampled path is not finite; search again with a smaller train.lr")
    return nll


def leave_one_out_weights(losses: Tensor) -> Tensor:
    """Weights [K] of grad log p(path_k) whose sum is an unbiased estimate of the gradient of the expected loss.

    Mean over k of loss_k - mean of the other losses (Kool, van Hoof, Welling 2019, "Buy 4 REINFORCE samples, get a
    baseline for free"). Raises ValueError if K < 2.
    """
    if len(losses) < 2:
        raise ValueError(f"leave-one-out needs at least 2 paths, got {len(losses)}")
    return (losses - losses.mean()) / (len(losses) - 1)


def risk_seeking_weights(losses: Tensor, fraction: float) -> Tensor:
    """Weights [K] of grad log p(path_k) whose sum estimates the gradient of the mean of the best losses.

    These are the leave-one-out weights of min(loss, quantile) / fraction, so the paths beyond the best `fraction` all
    count the same (Petersen et al. 2019, arXiv 1912.04871, section 3.3, where rewards are maximised). The estimate is
    consistent: its bias vanishes as K grows. With fraction 1 it is leave-one-out.
    """
    return leave_one_out_weights(losses.clamp_max(losses.quantile(fraction))) / fraction


def best_fraction(start: float, progress: float) -> float:
    """The share of the paths that count as the best, at a progress from 0 to 1.

    It grows from `start` to 1. Once one path has a larger probability than this share, its gradient vanishes, although
    pi may favour no single path yet. The growing share lets pi converge.
    """
    return start + (1 - start) * min(1.0, progress / GROWTH)


def score_gradient(paths: list, weights: Tensor, operations: int) -> Tensor:
    """Sum over k of weight_k * grad log p(path_k) with respect to the logits, [N, operations].

    paths [K][N]; weights [K] that sum to 0. grad log p(path) is one_hot(path) minus the expected one_hot under p, which
    is pi or pi within a budget. The expected one_hot is the same for all paths, so it cancels.
    """
    one_hot = F.one_hot(torch.as_tensor(paths), operations)  # [K, N, O]
    return (weights[:, None, None] * one_hot).sum(dim=0)
