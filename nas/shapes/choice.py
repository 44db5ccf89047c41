"""The choice of the shape before a search: costs, probes, law."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from nas.core.config import Config
from nas.core.config_checks import milliseconds
from nas.core.errors import InputError, world_size
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import interleaved
from nas.core.run_folder import CHOICE, SHAPES, open_run
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.retraining.trials import Trial, run_trials, rung_steps
from nas.search.maturity import retraining_steps
from nas.shapes.costs import ShapeCosts, shape_costs
from nas.shapes.law import Law, Point
from nas.shapes.space import NetworkShape, candidate_shapes, options_of, own_shape, with_shape
from nas.training.build import count_steps
from nas.training.device import DeviceContext

CONFIG, COSTS, STAGE = "config.yaml", "costs.yaml", "search"
RUNGS = (1 / 8, 4), (1 / 4, 4), (1 / 2, 2)  # share of a training, and number of networks that get it
VOCABULARIES = 3  # of the second rung, at least
MOST = sum(share * count for share, count in RUNGS) - RUNGS[1][0] * RUNGS[2][1]  # trainings; the last rung goes on
LONG_ENOUGH = 1.3  # times the warm-up; shorter probes are judged on its weights
SHOWN = 6  # shapes
NORMAL_95 = 1.96


def choose_shape(config: Config, run: Path, context: DeviceContext) -> tuple[Config, float]:
    """The configuration with the best shape within the budget, and CostTable.interleaved_share of this shape.

    The choice is recorded in the run folder, so that a resumed run repeats it. Raises InputError if no shape is within
    the budget, and RunError if a probe fails.
    """
    if (run / SHAPES / CONFIG).exists():
        open_run(run / SHAPES, config, STAGE, resume=True)  # an InputError, if an earlier call had other options
    if not (run / CHOICE).exists():
        write_yaml(run / CHOICE, find_shape(config, run / SHAPES, context))
    choice = read_yaml(run / CHOICE)
    print(shapes_table(choice))
    return with_shape(config, NetworkShape(**choice["shape"])), choice["ratio"]


def shapes_table(choice: dict) -> str:
    """The best shapes by the law, a line for each. choice: the content of choice.yaml."""
    fitting = [shape for shape in choice["shapes"] if shape["ratio"] <= choice["budget"]]
    own, unit = f"{choice['budget']:.4g} of the reference's {choice['reference_cost']:.4g}", choice["unit"]
    rows = [f"chosen: {NetworkShape(**choice['shape'])}. Shapes within {own} {unit}, in the law's order:"]
    for shape in fitting[:SHOWN]:
        sizes = f"{shape['vocab_size']:,} pieces, {shape['blocks']} x {shape['d_model']}"
        cost = f"{shape['cost']:.4g}, {shape['ratio']:.3f}"
        rows.append(f"  {sizes:<26}{cost:<18}loss {shape['behind']:+.1%} ± {shape['interval']:.1%}")
    return "\n".join(rows)


def find_shape(config: Config, folder: Path, context: DeviceContext) -> dict:
    """The content of choice.yaml. Raises InputError and RunError as choose_shape()."""
    if config.search.vocab_size and (config.train.epochs is None or config.search.retrain_steps):
        raise InputError("search.vocab_size needs train.epochs without search.retrain_steps, because of equal text")
    if world_size() > 1:
        raise InputError("the shape is chosen by one process: start the search without torchrun, and continue with it")
    corpora, shapes = candidate_corpora(config)
    own, file = own_shape(config), folder / COSTS
    costs = ShapeCosts.read(file, own) if file.exists() else shape_costs(config, corpora, shapes, context)
    absolute = milliseconds(config.search.latency.target)
    budget = absolute / costs.cost(own) if absolute is not None else config.search.latency.target
    fitting = [shape for shape in shapes if costs.ratio(shape) <= budget]
    if not fitting:
        least = min(shapes, key=costs.cost)
        raise InputError(
            f"no shape is within search.latency.target={config.search.latency.target}: the cheapest, {least}, costs "
            f"{costs.ratio(least):.3f} of the reference, {costs.cost(least):.4g} {costs.unit} for 1,000 bytes of text; "
            "give at least that, or smaller sizes"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(folder / CONFIG, {"stage": STAGE, **asdict(config)})
    write_yaml(file, costs.to_dict())
    probes = Probes(config, corpora, folder, context)
    print(f"the choice among {len(fitting)} shapes takes the steps of at most {MOST:g} trainings", flush=True)
    return choice_record(best_by_probes(probes, fitting), probes, costs, budget, shapes)


def best_by_probes(probes: "Probes", fitting: list[NetworkShape]) -> NetworkShape:
    """The law proposes the networks of the later rungs. The best of the last rung is chosen."""
    (share, count), (longer, several), (longest, few) = RUNGS
    steps, warmup = rung_steps(share, share, min(probes.steps.values())), probes.config.train.warmup_steps
    if steps < LONG_ENOUGH * warmup:
        print(
            f"WARNING: the first probes have {steps} steps, and the warm-up {warmup}: give a smaller train.warmup_steps"
        )
    probes.run(first_probes(fitting, count), share)
    if len(fitting) == 1:
        return fitting[0]
    finalists = contenders(fitting, probes.law(), several, VOCABULARIES)
    probes.run(finalists, longer)
    finalists = contenders(finalists, probes.law(), few)
    probes.run(finalists, longest)
    return min(finalists, key=lambda shape: probes.valid[shape, longest]["bits_per_byte"])


def candidate_corpora(config: Config) -> tuple[dict[int, Corpus], list[NetworkShape]]:
    """The text in each vocabulary, and the candidates. `auto` leaves out vocabularies that the text does not allow."""
    own, corpora = own_shape(config), {}
    corpora[own.vocab_size] = Corpus(prepare(config.data, print))
    shapes = candidate_shapes(config, corpora[own.vocab_size].meta["splits"]["train"]["bytes"])
    for size in sorted({shape.vocab_size for shape in shapes} - corpora.keys()):
        try:
            corpora[size] = Corpus(prepare(replace(config.data, vocab_size=size), print))
        except InputError:
            if config.search.vocab_size != "auto":
                raise
    return corpora, [shape for shape in shapes if shape.vocab_size in corpora]


def first_probes(fitting: list[NetworkShape], count: int) -> list[NetworkShape]:
    """The shapes of the first rung: the widest of each vocabulary and number of blocks, and then others."""
    widest = {}
    for shape in sorted(fitting, key=lambda shape: shape.d_model):
        widest[shape.vocab_size, shape.blocks] = shape
    probes = spread(list(widest.values()), count)
    others = [shape for shape in fitting if shape not in probes]
    return probes + (spread(others, count - len(probes)) if others else [])


def contenders(fitting: list[NetworkShape], law: Law, count: int, vocabularies: int = 1) -> list[NetworkShape]:
    """The shapes of a later rung by the law: the best of each of the best vocabularies, and then the best others.

    The first parts of trainings do not show which vocabulary is the best at the end, so several of them stay.
    """
    order, first = [fitting[index] for index in np.argsort(law.predict(fitting))], {}
    for shape in order:
        first.setdefault(shape.vocab_size, shape)
    best = list(first.values())[:vocabularies]
    return [*best, *(shape for shape in order if shape not in best)][:count]


def spread(shapes: list[NetworkShape], count: int) -> list[NetworkShape]:
    """At most `count` shapes, far from each other in the logarithms of their sizes. The first is in the middle."""
    places = np.log(np.array(shapes, dtype=float))
    places = (places - places.min(axis=0)) / np.maximum(np.ptp(places, axis=0), 1e-9)
    chosen = [int(np.argmin(((places - places.mean(axis=0)) ** 2).sum(axis=1)))][:count]
    while len(chosen) < min(count, len(shapes)):
        distances = ((places[:, None] - places[None, chosen]) ** 2).sum(axis=-1).min(axis=1)
        chosen.append(int(np.argmax(distances)))
    return [shapes[index] for index in chosen]


class Probes:
    """The first parts of trainings of interleaved networks. A whole training reads the same text in each vocabulary.

    valid: figures on valid, by shape and share of the training.
    """

    def __init__(self, config: Config, corpora: dict[int, Corpus], folder: Path, context: DeviceContext):
        self.config, self.corpora, self.folder, self.context = config, corpora, folder, context
        tokens = {size: len(corpus.tokens("train")) for size, corpus in corpora.items()}
        self.steps = {size: retraining_steps(config, count_steps(config, count)) for size, count in tokens.items()}
        self.valid: dict[tuple[NetworkShape, float], dict] = {}

    def run(self, shapes: list[NetworkShape], share: float) -> None:
        """Train each shape until a share of its steps. Raises RunError if one fails."""
        print(f"{share:g} of a training of {', '.join(map(str, shapes))}", flush=True)
        trials = []
        for shape in shapes:
            steps = self.steps[shape.vocab_size]
            options = options_of(shape, self.config)
            trials.append(
                Trial(str(shape), interleaved(shape.blocks), steps, rung_steps(share, RUNGS[0][0], steps), options)
            )
        figures = run_trials(trials, self.folder / CONFIG, self.folder, self.context)
        self.valid |= {(shape, share): figures[str(shape)] for shape in shapes}

    def law(self) -> Law:
        return Law([Point(*key, figures["bits_per_byte"]) for key, figures in self.valid.items()])


def choice_record(
    best: NetworkShape, probes: Probes, costs: ShapeCosts, budget: float, shapes: list[NetworkShape]
) -> dict:
    """The content of choice.yaml.

    `behind` is the relative difference of a shape's loss to that of the chosen one, by the law, at the end of a
    training. The law knows no absolute loss of the end, because it has seen no decay of the learning rates.
    """
    law = probes.law()
    losses = dict(zip(shapes, law.predict(shapes).tolist(), strict=True))
    intervals = dict(zip(shapes, (NORMAL_95 * law.errors(shapes, best)).tolist(), strict=True))
    return {
        "format": "par-shape/1",
        "shape": best._asdict(),
        "reference": costs.own._asdict(),
        "budget": budget,
        "unit": f"{costs.unit} for 1,000 bytes of text",
        "reference_cost": costs.cost(costs.own),
        "ratio": costs.ratio(best),
        "probes": [
            {**shape._asdict(), "share": share, "bits_per_byte": figures["bits_per_byte"]}
            for (shape, share), figures in probes.valid.items()
        ],
        "shapes": [
            {
                **shape._asdict(),
                "cost": costs.cost(shape),
                "ratio": costs.ratio(shape),
                "behind": losses[shape] / losses[best] - 1,
                "interval": intervals[shape],
            }
            for shape in sorted(shapes, key=losses.get)
        ],
    }
