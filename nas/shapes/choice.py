"""The choice of the shape before a search: costs, probes, law."""

import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from nas.core.config import Config
from nas.core.errors import InputError, world_size
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import interleaved
from nas.core.run_folder import SHAPES, read_metrics
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.retraining.trials import Trial, run_trials
from nas.search.maturity import retraining_steps
from nas.shapes.costs import KILOBYTE, shape_costs
from nas.shapes.law import Law, Point
from nas.shapes.space import NetworkShape, candidate_shapes, options_of, own_shape, with_shape
from nas.training.build import count_steps
from nas.training.device import DeviceContext

CONFIG, CHOICE = "config.yaml", "choice.yaml"
LINES = 8  # losses of a probe


def choose_shape(config: Config, run: Path, context: DeviceContext) -> tuple[Config, float]:
    """The configuration with the best shape within the budget, and CostTable.interleaved_share of this shape.

    The choice is recorded in the run folder, so that a resumed run repeats it. Raises InputError if no shape is within
    the budget, and RunError if a probe fails.
    """
    folder = run / SHAPES
    if not (folder / CHOICE).exists():
        write_yaml(folder / CHOICE, find_shape(config, folder, context))
    choice = read_yaml(folder / CHOICE)
    shape, ratio = NetworkShape(**choice["shape"]), choice["ratio"]
    print(
        f"shape: {shape.vocab_size:,} pieces, {shape.blocks} blocks of width {shape.d_model}; its interleaved network "
        f"takes {choice['cost']:.4g} {choice['unit']}, {ratio:.3f} of the reference's {choice['reference_cost']:.4g}"
    )
    return with_shape(config, shape), ratio


def find_shape(config: Config, folder: Path, context: DeviceContext) -> dict:
    """The content of choice.yaml."""
    if world_size() > 1:
        raise InputError("the shape is chosen by one process: start the search without torchrun, and continue with it")
    own, budget = own_shape(config), config.search.latency.target
    corpora = {own.vocab_size: Corpus(prepare(config.data, print))}
    shapes = candidate_shapes(config, corpora[own.vocab_size].meta["splits"]["train"]["bytes"])
    for size in sorted({shape.vocab_size for shape in shapes} - corpora.keys()):
        corpora[size] = Corpus(prepare(replace(config.data, vocab_size=size), print))
    costs = shape_costs(config, corpora, shapes, context)
    fitting = [shape for shape in shapes if costs.ratio(shape) <= budget]
    if not fitting:
        least = min(shapes, key=costs.cost)
        raise InputError(
            f"no shape is within search.latency.target={budget:g}: the cheapest, {least}, costs "
            f"{costs.ratio(least):.3f} of the configuration's own shape; give at least that, or smaller sizes"
        )
    widest, count = frontier(fitting), config.search.probes
    probes = spread(widest, count)
    if others := [shape for shape in fitting if shape not in widest]:
        probes += spread(others, count - len(probes))
    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(folder / CONFIG, asdict(config))
    points = run_probes(config, probes, corpora, folder, context)
    law = Law(points)
    losses = dict(zip(fitting, law.predict(fitting).tolist(), strict=True))
    best = min(fitting, key=losses.get)
    return {
        "format": "par-shape/1",
        "shape": best._asdict(),
        "reference": own._asdict(),
        "unit": f"{costs.unit} for {KILOBYTE:,} bytes of text",
        "cost": costs.cost(best),
        "reference_cost": costs.cost(own),
        "ratio": costs.ratio(best),
        "probes": [{**point.shape._asdict(), "text": point.text, "bits_per_byte": point.loss} for point in points],
        "shapes": [
            {**shape._asdict(), "ratio": costs.ratio(shape), "bits_per_byte": losses[shape]}
            for shape in sorted(fitting, key=losses.get)
        ],
    }


def frontier(shapes: list[NetworkShape]) -> list[NetworkShape]:
    """The widest shape of each vocabulary and number of blocks."""
    widest = {}
    for shape in sorted(shapes, key=lambda shape: shape.d_model):
        widest[shape.vocab_size, shape.blocks] = shape
    return list(widest.values())


def spread(shapes: list[NetworkShape], count: int) -> list[NetworkShape]:
    """At most `count` shapes, far from each other in the logarithms of their sizes. The first is in the middle."""
    places = np.log(np.array(shapes, dtype=float))
    places = (places - places.min(axis=0)) / np.maximum(np.ptp(places, axis=0), 1e-9)
    chosen = [int(np.argmin(((places - places.mean(axis=0)) ** 2).sum(axis=1)))][:count]
    while len(chosen) < min(count, len(shapes)):
        distances = ((places[:, None] - places[None, chosen]) ** 2).sum(axis=-1).min(axis=1)
        chosen.append(int(np.argmax(distances)))
    return [shapes[index] for index in chosen]


def run_probes(
    config: Config, probes: list[NetworkShape], corpora: dict[int, Corpus], folder: Path, context: DeviceContext
) -> list[Point]:
    """The losses of probes, while they train for a part of their steps.

    A loss is the mean over an eighth of these steps. Those from the warm-up are left out, because shapes differ
    otherwise in it. Losses on text that is read for the first time need no held-out text.
    """
    own, share = corpora[config.data.vocab_size], config.search.probe_share
    whole = retraining_steps(config, count_steps(config, len(own.tokens("train"))))
    steps = {size: round(whole * len(one.tokens("train")) / len(own.tokens("train"))) for size, one in corpora.items()}
    print(f"{len(probes)} probes, each {share:g} of a training: about {share * len(probes):.1f} trainings", flush=True)
    trials = []
    for shape in probes:
        until = round(share * steps[shape.vocab_size])
        options = [*options_of(shape, config), f"train.log_every={max(1, until // LINES)}"]
        trials.append(Trial(str(shape), interleaved(shape.blocks), steps[shape.vocab_size], until, options))
    run_trials(trials, folder / CONFIG, folder, context)
    points = []
    for shape in probes:
        scale = bits_per_nat(corpora[shape.vocab_size])
        lines = [line for line in read_metrics(folder / str(shape)) if line["split"] == "train"]
        later = [line for before, line in pairwise(lines) if before["step"] >= config.train.warmup_steps]
        points += [Point(shape, line["step"] / steps[shape.vocab_size], line["nll"] * scale) for line in later or lines]
    return points


def bits_per_nat(corpus: Corpus) -> float:
    """Bits per byte of a loss of one nat per token."""
    text = corpus.meta["splits"]["train"]
    return text["tokens"] / text["bytes"] / math.log(2)
