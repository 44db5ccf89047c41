"""The first parts of trainings of networks."""

import math
import time
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from nas.core.config import Config, known_values
from nas.core.errors import RunError
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import FORMAT
from nas.core.run_folder import CONFIG, RESULTS, trial_file
from nas.costs.measurement import timed_rounds
from nas.data.corpus import Corpus
from nas.jobs.tasks import Engine, Task, run_tasks, training_task
from nas.mixture.gate import MOST_TOKENS
from nas.mixture.mixture import open_mixture
from nas.mixture.without_network import train_nll
from nas.retraining.phase import RetrainPhase
from nas.search.space import Network, options_of, with_sizes
from nas.search.surrogate import Point, Text
from nas.training.build import build_fixed
from nas.training.device import Runtime
from nas.training.evaluation import read_text
from nas.training.passes import FIRST_SHARE, count_passes, count_steps, judged_sixteenths, resolve_auto

LOGS = "logs"  # folder of the output of trials
TIMED_SECONDS, TIMED_TOKENS = 1.0, 20_000  # of training steps, and of valid, for the estimate of a search


class Rung(NamedTuple):
    """share: of a training. networks: the most that train so far. vocabularies: the fewest among these, if likely."""

    share: float
    networks: int
    vocabularies: int = 1


BATCH = 4  # networks of the first rung that are proposed at once, if no more train at a time
RUNGS = Rung(FIRST_SHARE, 12), Rung(1 / 4, 5, 3), Rung(1 / 2, 2)
# Of at least 12 networks that train at a time, in two batches; more networks and shorter trainings, as simulations of
# commit 11badaf suggest
WIDE_RUNGS = Rung(FIRST_SHARE, 24), Rung(1 / 4, 4, 4)
# Of a text that is read again. The first parts of trainings do not show which vocabulary overfits later, so each rung
# keeps different ones, and the last two networks train to the end.
AGAIN_RUNGS = Rung(FIRST_SHARE, 8), Rung(1 / 4, 5, 4), Rung(1 / 2, 3, 3), Rung(1.0, 2, 2)
# The fewest trials of a search whose time is short.
FEWEST_RUNGS = Rung(FIRST_SHARE, BATCH), Rung(1 / 4, 1), Rung(1 / 2, 1)


def with_batches(config: Config, places: int) -> Config:
    """The configuration with search.batch and search.networks. places: trainings that run at a time."""
    batch = places * math.ceil(BATCH / places)
    known = known_values(config, {"search.batch": batch})
    batch, usual = known.search.batch, RUNGS[0].networks
    whole = batch * (2 if batch >= usual else math.ceil(usual / batch))
    return known_values(known, {"search.networks": whole})


def batches(rungs: tuple[Rung, ...], batch: int = BATCH) -> list[tuple[float, int]]:
    """The share of a training that each batch of trials adds, and its number of networks, at most. batch: of the first
    rung.
    """
    first, count, _ = rungs[0]
    proposed = [(first, min(batch, count - done)) for done in range(0, count, batch)]
    untried = [(first, 1)] * adds_untried(rungs)
    return proposed + untried + [(rung.share - before.share, rung.networks) for before, rung in pairwise(rungs)]


def rung_steps(share: float, steps: int) -> int:
    """The steps of a rung: all for a share of 1, else a multiple of those of the first rung. A trial averages weights
    over its last half, which then begins where the rung before ended.
    """
    first = RUNGS[0].share
    return steps if share == 1 else min(steps, max(1, int(first * steps)) * round(share / first))


def part_of(share: float) -> str:
    return "a whole training" if share == 1 else f"{share:g} of a training"


def adds_untried(rungs: tuple[Rung, ...]) -> bool:
    """Whether an untried network joins the second rung. It takes longer than the others, which wait for it."""
    return len(rungs) > 2


def scaled_rungs(config: Config, again: bool) -> tuple[Rung, ...]:
    """The rungs of search.networks and search.batch. again: whether trainings read their text again."""
    networks = config.search.networks
    rungs = AGAIN_RUNGS if again else WIDE_RUNGS if config.search.batch >= RUNGS[0].networks else RUNGS
    wider = networks / max(RUNGS[0].networks, rungs[0].networks)
    return tuple(rung._replace(networks=max(1, round(wider * rung.networks))) for rung in rungs)


class Estimate(NamedTuple):
    """Seconds. start: of a trial that has no steps and is judged by nothing. training: of the steps of a whole one.
    reading: of all of valid, by a network. looking: of all of valid, by cache and counts. fitting: of the gate at the
    end of a training, which looks at valid too. at_once: trials that run side by side. judged: the part of valid that a
    trial reads.
    """

    start: float
    training: float
    reading: float
    looking: float
    fitting: float
    at_once: int
    judged: float = 1.0

    def seconds(self, batches: list[tuple[float, int]]) -> float:
        """Of some batches of trials: the share of a training that each adds, and its number of networks."""
        own = self.start + self.judged * (self.reading + self.looking)
        return sum(math.ceil(count / self.at_once) * (share * self.training + own) for share, count in batches)

    def training_to_end(self, share: float, evaluations: int) -> float:
        """Of the last share of a training: it reads all of valid at each evaluation, and valid and test at its end."""
        ended = (evaluations + 2) * self.reading + self.looking + self.fitting
        return self.start + share * self.training + ended


def step_seconds(phase: RetrainPhase) -> float:
    """Mean seconds of the steps of a training, whose first ones may read short segments."""

    def take(step: int) -> None:
        phase.step(step)
        phase.runtime.synchronize()

    total, short = phase.total_steps, phase.train_weights.short_steps
    times = timed_rounds({step: lambda step=step: take(step) for step in (1, total)}, 1, TIMED_SECONDS)
    first, last = (float(np.median(times[step])) for step in (1, total))
    return last + (first - last) * short / total


def reading_seconds(phase: RetrainPhase) -> tuple[float, float, float]:
    """Estimate.reading, looking and fitting, from the first tokens of valid."""
    config, corpus, tokens = phase.config, phase.corpus, phase.corpus.tokens("valid")
    part, times = tokens[:TIMED_TOKENS], [time.monotonic()]
    read = read_text(config, phase.model, part, phase.runtime)
    times.append(time.monotonic())
    mixture = open_mixture(replace(config.beside, size=None), corpus, phase.model.d_model)
    times.append(time.monotonic())  # a start has this part
    if mixture:
        mixture.look(part, *read)
    times.append(time.monotonic())
    if mixture:
        mixture.fit(part, *read)
    times.append(time.monotonic())
    read, _, looked, fitted = np.diff(times)
    whole, fits = len(tokens) / len(part), min(len(tokens), MOST_TOKENS) / min(len(part), MOST_TOKENS)
    return whole * read, whole * looked, whole * looked + fits * (fitted - looked)


def run_trials(tasks: list[Task], engine: Engine) -> dict[str, dict]:
    """{name: content of the trial's file}; those that have run already are read. Raises RunError if all fail.

    A trial that fails is left out with a notice, because its weights may have diverged.
    """
    failed = run_tasks(tasks, engine)
    reasons = [f"the trial {name} failed: {reason}" for name, reason in failed.items()]
    if len(failed) == len(tasks):
        raise RunError("; ".join(reasons))
    for reason in reasons:
        print(f"NOTICE: {reason}")
    return {task.name: read_yaml(task.result) for task in tasks if task.name not in failed}


class Trials:
    """Parts of trainings of networks, or whole ones. A whole training reads the same text in each vocabulary.

    points: the losses on valid, in the order of the trials. results: the file of each network's last trial. tried: all
    networks that began one. failed: those whose last one failed. steps (by vocabulary), text: of whole trainings.
    """

    def __init__(
        self, config: Config, corpora: dict[int, Corpus], folder: Path, runtime: Runtime, engine: Engine | None = None
    ):
        places = len(engine.places) if engine else 1
        self.config, self.corpora, self.folder = with_batches(config, places), corpora, folder
        self.runtime, self.engine = runtime, engine
        tokens = {size: len(corpus.tokens("train")) for size, corpus in corpora.items()}
        self.steps = {size: count_steps(config, count) for size, count in tokens.items()}
        passes = max((count_passes(config, count) for count in tokens.values()), default=1.0)
        size = max((corpus.meta["splits"]["train"]["bytes"] for corpus in corpora.values()), default=1)
        self.text = Text(passes, size)
        self.tried: set[Network] = set()
        self.failed: set[Network] = set()
        self.points: list[Point] = []
        self.results: dict[Network, dict] = {}

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return scaled_rungs(self.config, self.text.is_read_again)

    @property
    def batches(self) -> list[tuple[float, int]]:
        return batches(self.rungs, self.config.search.batch)

    def finished(self, rung: Rung) -> list[Network]:
        """The networks whose trials in a rung have not failed."""
        return [point.network for point in self.points if point.share == rung.share]

    def estimate(self, networks: list[Network]) -> Estimate:
        """The seconds of trials, if these networks are typical, from the shortest trial and a few steps."""
        config, at_once, seconds = {"stage": "search", **asdict(self.config)}, len(self.engine.places), []
        for corpus in self.corpora.values():  # what is made once for all trials is no part of a start
            open_mixture(self.config.beside, corpus, 0)
            if self.config.train.residual:
                train_nll(corpus, self.config.beside)
        self.engine.warm_up()
        self.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="estimate-", dir=self.folder) as folder, redirect_stdout(None):
            write_yaml(Path(folder) / CONFIG, config)
            tasks = [self.task(network, 1, Path(folder), 2) for network in networks[:at_once]]
            began = time.monotonic()
            run_trials(tasks, self.engine)
            start = time.monotonic() - began
        with self.runtime.fork_rng():
            for network in networks:
                corpus = self.corpora[network.vocab_size]
                config = resolve_auto(with_sizes(self.config, *network[:2]), corpus)
                model = build_fixed(list(network.blocks), config, corpus.vocab_size)
                phase = RetrainPhase(model, corpus, config, self.runtime)
                seconds.append((phase.total_steps * step_seconds(phase), *reading_seconds(phase)))
        training, reading, looking, fitting = np.mean(seconds, axis=0).tolist()
        shortest = replace(config, train=replace(config.train, steps=2, epochs=None))
        judged = [judged_sixteenths(own, corpus) / 16 for own in (shortest, config)]
        start = max(0.0, start - judged[0] * (reading + looking))
        return Estimate(start, training, reading, looking, fitting, at_once, judged[1])

    def task(self, network: Network, until: int | None, folder: Path, steps: int | None = None) -> Task:
        """Train a network until a step (None: to the end), from its new pattern file. folder: has the configuration.
        steps: of the whole training, if they are others.
        """
        name, steps, run = str(network), steps or self.steps[network.vocab_size], folder / str(network)
        pattern, log = folder / "patterns" / f"{name}.yaml", folder / LOGS / f"{name}.txt"
        pattern.parent.mkdir(parents=True, exist_ok=True)
        write_yaml(pattern, {"format": FORMAT, "blocks": network.pattern})
        arguments = [pattern, folder / CONFIG, f"train.steps={steps}"]
        arguments += [] if self.text.is_read_again else ["train.evaluate_every=0"]  # earlier weights may be the best
        arguments += [*options_of(network, self.config), *([] if until is None else ["--until", until])]
        return training_task(name, arguments, run, RESULTS if until is None else trial_file(until), log)

    def until(self, network: Network, share: float) -> int:
        return rung_steps(share, self.steps[network.vocab_size])

    def run(self, networks: list[Network], share: float) -> None:
        """Train each network until a share of its steps. Raises RunError if all fail."""
        done = sum({point.network: point.share for point in self.points}.values())
        done /= sum(part * count for part, count in self.batches)
        print(
            f"{part_of(share)} of {', '.join(map(str, networks))}; {min(done, 1):.0%} of the trials are done",
            flush=True,
        )
        self.tried |= {*networks}
        self.failed |= {*networks}
        results = self.train(networks, share)
        self.failed -= results.keys()
        self.results |= results
        points = [Point(network, share, result["valid"]["bits_per_byte"]) for network, result in results.items()]
        self.points += points
        best = min(points, key=lambda point: point.loss)
        print(f"the best of these: {best.network}, {best.loss:.4f} bits per byte on valid", flush=True)

    def train(self, networks: list[Network], share: float) -> dict[Network, dict]:
        """The content of the trial's file of each network whose trial has not failed."""
        tasks = [self.task(network, self.until(network, share), self.folder) for network in networks]
        found = run_trials(tasks, self.engine)
        return {network: found[str(network)] for network in networks if str(network) in found}
