"""The length of trainings that fits a number of minutes for the whole: search, trainings and report."""

import math
import time
from dataclasses import asdict, replace
from pathlib import Path

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_yaml
from nas.core.provenance import data_digests
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.search.network_search import COSTS, ESTIMATE, open_search, trial_estimate
from nas.search.strategy import LONG_ENOUGH
from nas.search.trials import AGAIN_RUNGS, RUNGS, Estimate, Rung, batches, rung_steps
from nas.training.auto import resolve_auto
from nas.training.device import DeviceContext
from nas.training.passes import most_passes

AFTER_S = 45  # derivation, latencies, pictures and report
FEWEST_STEPS = 16  # of a trial in the first rung
DROPOUT_TIME = 1.2  # of a training step with dropout, to one without (experiments/passes)
EVALUATIONS = 4  # of a training on valid, before its end


def plan_minutes(config: Config, minutes: float, folder: Path, context: DeviceContext) -> Config:
    """The configuration with the train.epochs with which all stages take these minutes, and evaluations and a warm-up
    that suit them.

    folder: of the trials; it keeps the measured costs and the estimate. Raises InputError if the minutes are too few.
    """
    began, corpus = time.monotonic(), Corpus(prepare(config.data, print))
    estimate, steps = measure(config, corpus, folder, context)
    spent = time.monotonic() - began
    least, most = FEWEST_STEPS / RUNGS[0].share / steps, most_passes(config)
    if most < least:
        raise InputError(
            f"the text is too short: {most} passes have {most * steps} steps; {least * steps:.0f} are needed"
        )
    left, (fixed, per_epoch) = 60 * minutes - spent, whole_seconds(estimate, RUNGS)
    epochs = min(1.0, (left - fixed) / per_epoch)
    again = whole_seconds(estimate, AGAIN_RUNGS)  # above 1 epoch; these rungs take longer
    longer = (left - again[0]) / again[1]
    if longer > 1 and gets_dropout(config, longer, corpus):  # the estimate has none
        again = whole_seconds(estimate._replace(training=DROPOUT_TIME * estimate.training), AGAIN_RUNGS)
        longer = (left - again[0]) / again[1]
    if max(longer, least) > 1:
        (fixed, per_epoch), epochs = again, min(longer, most)
    if epochs < least:
        enough = math.ceil((spent + fixed + least * per_epoch) / 6) / 10
        raise InputError(f"--minutes {minutes:g} is too short for this text and device: give at least {enough:g}")
    total = (spent + fixed + epochs * per_epoch) / 60
    train = replace(config.train, steps=None, epochs=float(f"{epochs:.3g}"))
    print(f"a training reads the text {train.epochs:g} times; everything takes about {total:.1f} minutes", flush=True)
    whole = max(1, round(train.epochs * steps))
    train.warmup_steps = min(train.warmup_steps, int(rung_steps(RUNGS[0].share, whole) / LONG_ENOUGH))
    train.evaluate_every = train.evaluate_every and math.ceil(whole / (EVALUATIONS + 1))
    return replace(config, train=train)


def measure(config: Config, corpus: Corpus, folder: Path, context: DeviceContext) -> tuple[Estimate, int]:
    """The estimate with one epoch, which the folder keeps, and an epoch's steps in the vocabulary with the fewest."""
    epoch = replace(config, train=replace(config.train, steps=None, epochs=1.0))
    file, about = folder / ESTIMATE, asdict(epoch) | data_digests(corpus.meta)
    if file.exists() and read_yaml(file)["about"] != about:
        forget_estimate(folder)
    strategy = open_search(epoch, folder, context)
    estimate = trial_estimate(strategy, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(folder / COSTS, strategy.costs.to_dict())
    write_yaml(file, {"start": estimate.start, "training": estimate.training, "about": about})
    return estimate, min(strategy.trials.steps.values())


def gets_dropout(config: Config, epochs: float, corpus: Corpus) -> bool:
    """Whether the reference gets dropout by auto if it reads its text so often."""
    longer = replace(config, train=replace(config.train, steps=None, epochs=epochs))
    return config.model.dropout == "auto" and resolve_auto(longer, corpus).model.dropout > 0


def forget_estimate(folder: Path) -> None:
    """Remove costs and estimate of an earlier call with other options, which was refused. folder: of the trials."""
    for name in (COSTS, ESTIMATE):
        (folder / name).unlink(missing_ok=True)


def whole_seconds(estimate: Estimate, rungs: tuple[Rung, ...]) -> tuple[float, float]:
    """Seconds of the trials, of the found and the usual network, each evaluated on valid and test, and of the rest:
    those that do not depend on train.epochs, and those for each epoch. estimate: with one epoch.
    """
    evaluations = EVALUATIONS + 2  # valid and test at the end
    finals = [(1.0, 1), *[(0.0, 1)] * evaluations]
    if estimate.at_once == 1:
        finals += [(1.0 - rungs[-1].share, 1), *[(0.0, 1)] * evaluations]
    parts = [*batches(rungs), *finals]
    fixed = estimate._replace(training=0.0).seconds(parts)
    return fixed + AFTER_S, estimate.seconds(parts) - fixed
