"""The search among networks by trials, in a run folder, what it has found, and the trainings that fit some minutes.

P networks, N blocks, O operations.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import numpy as np

from nas.core.config import COUNTS_SHARE, Config
from nas.core.errors import CannotSearch, InputError, world_size
from nas.core.files import read_yaml, write_jsonl, write_yaml
from nas.core.outcome import size_line
from nas.core.pattern import interleaved
from nas.core.run_folder import CHOICE, CONFIG, FLOPS_TABLE, LATENCY, PI, TRIALS, RunFolder, data_digests, provenance
from nas.costs.budget import as_ratio
from nas.costs.cost_table import CostTable, for_text, least_ratio
from nas.costs.sizes import bytes_beside
from nas.data.corpus import Corpus, prepare
from nas.jobs.engines import open_engine
from nas.search.candidate_costs import SINGLE_TOKEN, Candidates, candidates_of, count_costs, find_costs, open_candidates
from nas.search.pace import Pace
from nas.search.space import (
    Network,
    NetworkCosts,
    cheapest,
    first_candidates,
    make_network,
    read_network,
    simple_patterns,
    with_sizes,
    within_budget,
)
from nas.search.strategy import EQUAL_LOSS, LONG_ENOUGH, Strategy, successive_halving
from nas.search.trials import (
    BATCH,
    FEWEST_RUNGS,
    LOGS,
    RUNGS,
    Estimate,
    Rung,
    Trials,
    batches,
    part_of,
    rung_steps,
    scaled_rungs,
)
from nas.training.device import Runtime
from nas.training.passes import judged_sixteenths, most_passes, passes_warning, resolve_auto

COSTS, ESTIMATE, PACE, STAGE = "costs.yaml", "estimate.yaml", "pace.jsonl", "search"
RECORDED, SHOWN = 60, 6  # networks
NORMAL_95 = 1.96
AFTER_S = 30  # derivation, cache and counts alone, latencies, pictures and report
FEWEST_STEPS = 16  # of a trial in the first rung
DROPOUT_TIME = 1.2  # of a training step with dropout, to one without (experiments/passes)
LEAST_S = 20  # before a search is given up
FEW_MINUTES, PREPARING = 4, 0.25  # minutes for one vocabulary and width; share of them for preparing others
EVALUATIONS = 4  # of a training on valid, before its end
EPOCHS_CHOICES = 500  # numbers of passes that nas.run --minutes chooses from


def choose_network(config: Config, run: Path, runtime: Runtime) -> tuple[Config, dict]:
    """The configuration with the sizes of the best network, and the content of choice.yaml, which a resumed run keeps.

    Raises InputError if no network fits the budget or another process runs the trials, RunError if a whole rung fails.
    """
    opened = RunFolder(run / TRIALS, config, STAGE)  # refuses other options than those of an earlier call
    config = opened.resolve_auto(config)
    if not (run / CHOICE).exists():
        record, history = search_networks(config, opened, runtime)
        write_jsonl(run / PI, history)
        write_yaml(run / CHOICE, record)
    choice = read_yaml(run / CHOICE)
    print(networks_table(choice))
    if warning := overfit_warning(choice):
        print(warning)
    return with_sizes(config, choice["network"]["vocab_size"], choice["network"]["d_model"]), choice


def chosen_costs(given: Config, run: Path, choice: dict) -> dict[str, NetworkCosts]:
    """The cost files of the chosen sizes and of the reference. given: the search's options. choice: of choice.yaml."""
    shape = read_network(choice["network"])[:2]
    costs = {FLOPS_TABLE: count_costs(candidates_of(given, *shape))}
    if given.search.latency.in_milliseconds:
        costs[LATENCY] = NetworkCosts.read(run / TRIALS / COSTS).only(shape)
    return costs


def search_networks(config: Config, run: RunFolder, runtime: Runtime) -> tuple[dict, list[dict]]:
    """The content of choice.yaml and the lines of pi.jsonl. run: folder of the trials. Raises as choose_network()."""
    strategy = open_search(config, run.path, runtime)
    trials, config = strategy.trials, strategy.config
    corpus = trials.corpora[strategy.costs.reference.vocab_size]
    run.start(config, provenance(config, corpus.meta, runtime))
    run.write(CONFIG, {"stage": STAGE, **asdict(config)})  # with the present text and device, which trials read
    run.write(COSTS, strategy.costs.to_dict())
    what = "candidates" if config.search.latency.source == "none" else "within the budget"
    parts = trials.batches
    most = f"{sum(share * count for share, count in parts):.3g}"
    print(f"{len(strategy.networks)} networks are {what} at first; trials take the steps of about {most} trainings")
    if warning := passes_warning(resolve_auto(config, corpus), corpus):
        print(warning)
    begun = (run.path / LOGS).exists()
    if not begun or (run.path / ESTIMATE).exists():
        estimate = trial_estimate(strategy, run.path)
    if not begun:
        minutes = estimate.seconds(parts) / 60
        print(f"the trials take about {minutes:.2g} minutes, {estimate.at_once} at a time", flush=True)
    chosen = successive_halving(strategy)
    return choice_record(strategy, chosen), pi_lines(strategy)


def open_search(config: Config, folder: Path, runtime: Runtime, seconds: float = math.inf) -> Strategy:
    """The strategy before the first trial. seconds: for preparing the text. Raises InputError if no network fits."""
    if world_size() > 1:
        raise InputError("trials run in processes of their own: start the search without torchrun")
    engine = open_engine(config, runtime, folder)
    candidates = open_candidates(config, runtime, seconds)
    costs = find_costs(candidates, folder / COSTS, runtime, keep=True)
    tables = {shape: costs.tables[shape] for shape in candidates.shapes}
    budget = as_ratio(config.search.latency.target, costs.table(*costs.reference[:2]), config.model.blocks)
    if config.search.latency.source == "none":  # any network
        budget = max(table.overhead + config.model.blocks * max(table.blocks.values()) for table in tables.values())
        budget /= costs.reference_cost
    limit = budget * costs.reference_cost
    networks = first_candidates(config, tables, limit)
    if not networks:
        fitting = [
            make_network(*shape, blocks)
            for shape, table in tables.items()
            for blocks in filter(within_budget(replace(table, room=None), limit), chain(*simple_patterns(config)))
        ]
        if fitting:
            raise InputError(no_room(candidates, tables, fitting))
        least, shape = min((cheapest(config, table), shape) for shape, table in tables.items())
        own = tables[shape].mixture
        mixed = f" ({own:.4g} of them for caches and counts; mixture.states=0 takes less)" if own else ""
        raise InputError(
            f"no network is within search.latency.target={config.search.latency.target}: the cheapest, of {shape[0]} "
            f"pieces and width {shape[1]}, costs {least_ratio(least / costs.reference_cost)} of the reference, "
            f"{for_text(least, costs.unit)}{mixed}; give at least that, or smaller sizes"
        )
    return Strategy(Trials(config, candidates.corpora, folder, runtime, engine), costs, budget, networks)


def no_room(candidates: Candidates, tables: dict, networks: list[Network]) -> str:
    """Why no network is within search.size.target, with the smallest size that has one. tables: of each shape.
    networks: those that fit otherwise.
    """
    config = candidates.config
    target, counts = config.search.size.target, config.mixture.size or 0
    grows, size = counts == int(COUNTS_SHARE * target), 0  # else it is given
    if not grows and counts < (least := min(SINGLE_TOKEN * pieces for pieces, *_ in networks)):
        least = math.ceil(least / 1000)
        return f"mixture.size={counts} has no room for the counts of single tokens; give {least}kB or more"
    while (least := least_size(candidates, tables, networks, None if grows else counts)) > size:
        size = 1000 * math.ceil(least / 1000)
        own = replace(config.search, size=replace(config.search.size, target=size))  # auto depends on it
        candidates = replace(candidates, config=replace(config, search=own))
    given = f"search.size.target={target}, with counts of {counts:,} bytes"
    return f"no network is within {given}; give {size // 1000}kB or more"


def least_size(candidates: Candidates, tables: dict, networks: list[Network], counts: int | None) -> float:
    """The least search.size.target with room for one of the networks. counts: their bytes; None: COUNTS_SHARE."""
    found, beside = [], {}
    for *shape, blocks in networks:
        shape = tuple(shape)
        if shape not in beside:
            beside[shape] = bytes_beside(candidates.configs[shape], candidates.corpora[shape[0]])
        needed = beside[shape] + sum(map(tables[shape].bytes.__getitem__, blocks))
        single = SINGLE_TOKEN * shape[0] if candidates.config.mixture.counts else 0
        if counts is None:
            found.append(max(needed / (1 - COUNTS_SHARE), single / COUNTS_SHARE))
        elif single <= counts:
            found.append(needed + counts)
    return min(found)


def trial_estimate(strategy: Strategy, folder: Path) -> Estimate:
    """The seconds of trials: those that nas.run has measured with one epoch, or measured now."""
    config, file = strategy.config, folder / ESTIMATE
    if not file.exists() or config.train.epochs is None:
        return strategy.trials.estimate(strategy.propose(BATCH))
    known, trials = read_yaml(file), strategy.trials
    corpus = trials.corpora[strategy.costs.reference.vocab_size]
    estimate = with_epochs(Estimate(**known["seconds"], at_once=len(trials.engine.places)), config, corpus)
    if "left" in known:
        last = last_seconds(estimate, trials.rungs)
        strategy.pace = Pace(folder / PACE, known["left"] - AFTER_S, estimate, last)
    return estimate


def choice_record(strategy: Strategy, best: Network) -> dict:
    """The content of choice.yaml."""
    trials, costs = strategy.trials, strategy.costs
    plain = make_network(*best[:2], interleaved(strategy.config.model.blocks))
    return {
        "format": "par-choice/4",
        "name": str(best),
        "network": best.to_dict(),
        "reference": costs.reference.to_dict(),
        "budget": strategy.budget,
        "unit": f"{costs.unit} for 1,000 bytes of text",
        "reference_cost": costs.reference_cost,
        "ratio": costs.ratio(best),
        "interleaved_ratio": costs.ratio(plain),
        **size_record(strategy.config, costs.tables[best[:2]], best.blocks),
        "text": trials.text._asdict(),
        "trial": {"folder": str(trials.folder / str(best)), **trials.results[best]},
        "trials": [
            {"name": str(one.network), **one.network.to_dict(), "share": one.share, "bits_per_byte": one.loss}
            for one in trials.points
        ],
        "networks": network_records(strategy, best),
        **spent(trials),
    }


def size_record(config: Config, table: CostTable, blocks: Iterable[str]) -> dict:
    """The bytes of a network with all beside it, by search.size.target; empty without one."""
    if table.room is None:
        return {}
    target, counts = config.search.size.target, (config.mixture.size or 0) + table.spare(blocks)
    return {
        "size": {"target": target, "weights": config.search.size.weights, "counts": counts, "others": target - counts}
    }


def network_records(strategy: Strategy, best: Network) -> list[dict]:
    """Networks with predictions, the best first: the most likely ones, those with trials, and interleaved ones.

    `behind`: the relative difference of the predicted loss at the end of a training to the chosen network's. Where no
    trial ends a training, the surrogate knows no absolute loss of the end.
    """
    surrogate, costs, tried = strategy.fit(), strategy.costs, strategy.trials.results
    networks = list(dict.fromkeys([*strategy.networks, costs.reference]))  # the reference may be beyond the budget
    losses, errors = surrogate.predict(networks), surrogate.errors(networks, best)
    probabilities = np.zeros(len(networks))
    probabilities[: len(strategy.networks)] = surrogate.probability_best(strategy.networks)
    own = losses[networks.index(best)]
    likely = np.argsort(-probabilities, kind="stable")[:RECORDED]
    shown = {*likely.tolist(), *(i for i, one in enumerate(networks) if one in tried or one.is_interleaved)}
    return [
        {
            "name": str(networks[index]),
            **networks[index].to_dict(),
            "cost": costs.cost(networks[index]),
            "ratio": costs.ratio(networks[index]),
            "behind": float(losses[index] / own - 1),
            "interval": float(NORMAL_95 * errors[index]),
            "probability_best": float(probabilities[index]),
        }
        for index in sorted(shown, key=losses.__getitem__)
    ]


def spent(trials: Trials) -> dict:
    results, train = trials.results.values(), trials.config.train
    steps = sum(one["step"] for one in results)
    tokens, seconds = steps * train.batch_size * train.segment, sum(one["wall_time_s"] for one in results)
    trainings = sum(one["step"] / one["of_steps"] for one in results)
    return {"trainings": trainings, "train_steps": steps, "train_tokens": tokens, "wall_time_s": seconds}


def pi_lines(strategy: Strategy) -> list[dict]:
    """The lines of pi.jsonl, one before the first trial and one for each."""
    config, trials = strategy.config, strategy.trials
    operations = sorted(config.search.operations, key="identity".__eq__)  # identity last
    ratios = np.array([strategy.costs.ratio(network) for network in strategy.networks])
    lines, reached = [], {}
    for count, point in enumerate(chain([None], trials.points)):
        if point:
            reached[point.network] = trials.until(point.network, point.share)
        probabilities = strategy.fit(count).probability_best(strategy.networks)
        pi = block_probabilities(strategy.networks, probabilities, operations, config.model.blocks)
        line = {"step": sum(reached.values()), "temperature": 1.0, "operations": operations, "pi": pi.tolist()}
        lines.append(
            line | {"trials": count, "expected_latency_ms": None, "expected_cost_ratio": float(probabilities @ ratios)}
        )
    return [line | {"of_steps": lines[-1]["step"]} for line in lines]


def block_probabilities(
    networks: list[Network], probabilities: np.ndarray, operations: list[str], most: int
) -> np.ndarray:
    """pi [N, O] of the best network; blocks that it lacks are identity. probabilities [P]: to be the best, of each."""
    pi = np.zeros((most, len(operations)))
    for network, probability in zip(networks, probabilities, strict=True):
        blocks = [*network.blocks, *["identity"] * (most - len(network.blocks))]
        pi[range(most), [operations.index(block) for block in blocks]] += probability
    return pi


def networks_table(choice: dict) -> str:
    """The predicted best networks within the budget, a line for each. choice: the content of choice.yaml."""
    head = f"networks within {choice['budget']:.4g} of the reference's {choice['reference_cost']:.4g} {choice['unit']}"
    rows = [f"{head}; predicted loss against the chosen one, and probability of being the best:"]
    for one in [one for one in choice["networks"] if one["ratio"] <= choice["budget"] * (1 + 1e-9)][:SHOWN]:
        cost = f"{one['cost']:.4g}, {one['ratio']:.3f}"
        loss = f"loss {round(one['behind'], 3) + 0:+.1%} ± {one['interval']:.1%}"  # never -0.0%
        rows.append(f"  {one['name']:<28}{cost:<18}{loss:<24}{one['probability_best']:.0%}")
    most = max(one["share"] for one in choice["trials"])
    why = f"the best prediction of those with {part_of(most)}, or the cheapest of equal ones"
    rows += [size_line(choice)] if "size" in choice else []
    return "\n".join([*rows, f"chosen: {choice['name']}, {why}; {choice['trainings']:.2f} trainings in all"])


def overfit_warning(choice: dict) -> str | None:
    """A warning if the chosen network was better after an earlier trial than with the best weights of its training."""
    losses = {one["share"]: one["bits_per_byte"] for one in choice["trials"] if one["name"] == choice["name"]}
    best = min(losses, key=losses.get)
    if 1.0 not in losses or losses[1.0] <= (1 + EQUAL_LOSS) * losses[best]:
        return None
    return (
        f"WARNING: {choice['name']} had {losses[best]:.4f} bits per byte on valid after {part_of(best)}, and "
        f"{losses[1.0]:.4f} with the best weights of all, so it may overfit; give fewer train.epochs or --minutes, or "
        "more model.dropout"
    )


def plan_minutes(config: Config, minutes: float, folder: Path, runtime: Runtime) -> Config:
    """The configuration with the train.epochs, evaluations and warm-up with which all stages take these minutes.

    folder: of the trials; it keeps the measured costs and the estimate. Raises CannotSearch.
    """
    began, corpus = time.monotonic(), Corpus(prepare(config.data, print))
    if minutes < FEW_MINUTES and (config.search.vocab_size or config.search.d_model):
        few = f"NOTICE: --minutes {minutes:g} is too few to search vocabulary and width, which needs {FEW_MINUTES}"
        print(f"{few}; those given are used", flush=True)
        config = replace(config, search=replace(config.search, vocab_size=[], d_model=[]))
    check_time(began, minutes)
    estimate, strategy = measure(config, corpus, folder, runtime, began, minutes)
    if sizes := config.search.vocab_size:  # without those that are left out
        sizes = [size for size in sorted(strategy.trials.corpora) if sizes == "auto" or size in sizes]
        config = replace(config, search=replace(config.search, vocab_size=sizes))
    steps, seconds_spent = min(strategy.trials.steps.values()), time.monotonic() - began
    least, most = FEWEST_STEPS / RUNGS[0].share / steps, most_passes(config)
    if most < least:
        raise InputError(
            f"the text is too short: {most} passes have {most * steps} steps; {least * steps:.0f} are needed"
        )

    def needed(epochs: float, rungs: tuple[Rung, ...] = ()) -> float:
        """Minutes of everything. rungs: if they are others."""
        trained = replace(config, train=replace(config.train, steps=None, epochs=epochs))
        search, own = strategy.config.search, with_epochs(estimate, trained, corpus)
        rungs = rungs or scaled_rungs(strategy.config, epochs > 1)
        return (seconds_spent + own.seconds(batches(rungs, search.batch)) + last_seconds(own, rungs) + AFTER_S) / 60

    choices = np.geomspace(least, most, EPOCHS_CHOICES).tolist()
    fitting = bisect_right(choices, minutes, key=needed)
    epochs, total = choices[max(0, fitting - 1)], needed(choices[max(0, fitting - 1)])
    fewest = FEWEST_RUNGS[0]._replace(networks=strategy.config.search.batch), *FEWEST_RUNGS[1:]
    if not fitting and (total := min(total, needed(least, fewest))) > minutes:  # with fewer trials
        enough = math.ceil(10 * total) / 10
        raise CannotSearch(
            f"--minutes {minutes:g} is too short for this text and device: give at least {enough:g} for a network"
        )
    train = replace(config.train, steps=None, epochs=float(f"{epochs:.3g}"))
    print(f"a training reads the text {train.epochs:g} times; everything takes about {total:.1f} minutes", flush=True)
    about = read_yaml(folder / ESTIMATE)
    write_yaml(folder / ESTIMATE, about | {"left": 60 * minutes - (time.monotonic() - began)})
    whole = max(1, round(train.epochs * steps))
    train.warmup_steps = min(train.warmup_steps, int(rung_steps(RUNGS[0].share, whole) / LONG_ENOUGH))
    train.evaluate_every = train.evaluate_every and math.ceil(whole / (EVALUATIONS + 1))
    return replace(config, train=train)


def check_time(began: float, minutes: float) -> None:
    """Raises CannotSearch if half of the minutes since the time `began` are over before the first trial."""
    if time.monotonic() - began > max(LEAST_S, 30 * minutes):
        raise CannotSearch(
            f"preparing and measuring took {time.monotonic() - began:.0f} s of --minutes {minutes:g}; give more"
        )


def measure(
    config: Config, corpus: Corpus, folder: Path, runtime: Runtime, began: float, minutes: float
) -> tuple[Estimate, Strategy]:
    """The estimate with one epoch, which the folder keeps, and a strategy. began, minutes: as check_time()."""
    epoch = replace(config, train=replace(config.train, steps=None, epochs=1.0))
    file, about = folder / ESTIMATE, asdict(epoch) | data_digests(corpus.meta)
    if file.exists() and read_yaml(file)["about"] != about:
        forget_estimate(folder)
    strategy = open_search(epoch, folder, runtime, PREPARING * 60 * minutes)
    check_time(began, minutes)
    estimate = trial_estimate(strategy, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(folder / COSTS, strategy.costs.to_dict())
    seconds = {name: getattr(estimate, name) for name in ("start", "training", "reading", "looking", "fitting")}
    write_yaml(file, {"seconds": seconds, "about": about})
    return estimate, strategy


def forget_estimate(folder: Path) -> None:
    """Remove costs and estimate of an earlier call with other options, which was refused. folder: of the trials."""
    (folder / COSTS).unlink(missing_ok=True)
    (folder / ESTIMATE).unlink(missing_ok=True)


def with_epochs(estimate: Estimate, config: Config, corpus: Corpus) -> Estimate:
    """The estimate for the train.epochs of a configuration. estimate: with one epoch, which has no dropout."""
    epochs, dropout = config.train.epochs, config.model.dropout
    slower = DROPOUT_TIME if dropout == "auto" and resolve_auto(config, corpus).model.dropout else 1.0
    judged = judged_sixteenths(config, corpus) / 16
    return estimate._replace(training=slower * epochs * estimate.training, judged=judged)


def last_seconds(estimate: Estimate, rungs: tuple[Rung, ...]) -> float:
    """Of the trainings of the found and the usual network, side by side if trials are."""
    both = estimate.training_to_end(1.0, EVALUATIONS)
    return both + (estimate.training_to_end(1.0 - rungs[-1].share, EVALUATIONS) if estimate.at_once == 1 else 0.0)
