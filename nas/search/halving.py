"""Successive halving (arXiv 1502.07943): networks train for parts of a training, and the best of them go on."""

from itertools import pairwise

from nas.core.errors import RunError
from nas.search.space import Network
from nas.search.strategy import Strategy
from nas.search.trials import BATCH, Rung, Trials, rung_steps

LONG_ENOUGH = 1.3  # times the warm-up; shorter first trials are judged on weights of the warm-up
NONE_LEFT = "no network is left, because trials failed; the notices above say why"


def successive_halving(strategy: Strategy) -> Network:
    """The network that a strategy chooses after the last rung. Raises RunError if all trials of a rung fail."""
    trials, rungs = strategy.trials, strategy.trials.rungs
    first, count, _ = rungs[0]
    steps, warmup = rung_steps(first, min(trials.steps.values())), trials.config.train.warmup_steps
    if steps < LONG_ENOUGH * warmup:
        told = f"WARNING: the first trials have {steps} steps, and the warm-up {warmup}"
        print(f"{told}; give a smaller train.warmup_steps")
    networks = strategy.propose_first(min(BATCH, count))
    while networks:
        if not train(trials, networks, first) and not trials.points:
            raise RunError(NONE_LEFT)
        networks = strategy.propose(min(BATCH, count - len(trials.tried)))
    for before, rung in pairwise(rungs):
        train_rung(strategy, before, rung)
    return strategy.choose(trials.finished(rungs[-1]))


def train_rung(strategy: Strategy, before: Rung, rung: Rung) -> None:
    """Train the promoted networks of the rung before; if the trials of all of them fail, the next best ones."""
    waiting = strategy.trials.finished(before)
    while waiting:
        promoted = strategy.promote(waiting, before, rung)
        if train(strategy.trials, promoted, rung.share):
            return
        waiting = [network for network in waiting if network not in promoted]
    raise RunError(NONE_LEFT)


def train(trials: Trials, networks: list[Network], share: float) -> bool:
    """Train networks until a share of their steps. False, with a notice, if the trials of all fail."""
    try:
        trials.run(networks, share)
    except RunError as error:
        print(f"NOTICE: {error}", flush=True)
        return False
    return True
