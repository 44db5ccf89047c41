"""The search among networks by trials, in a run folder."""

from dataclasses import asdict
from pathlib import Path

from nas.core.config import Config, milliseconds
from nas.core.errors import InputError, world_size
from nas.core.files import read_yaml, write_jsonl, write_yaml
from nas.core.run_folder import CHOICE, CONFIG, FLOPS_TABLE, LATENCY, PI, TRIALS, RunFolder, provenance
from nas.costs.printing import for_text, least_ratio
from nas.data.corpus import Corpus, prepare
from nas.jobs.tasks import workers
from nas.search.candidate_costs import Candidates, count_costs, find_costs, open_candidates
from nas.search.choice import choice_record, networks_table, overfit_warning, pi_lines
from nas.search.halving import successive_halving
from nas.search.network_costs import NetworkCosts
from nas.search.space import cheapest, first_candidates, read_network, with_sizes
from nas.search.strategy import Strategy
from nas.search.trials import BATCH, LOGS, Estimate, Trials, batches
from nas.training.device import DeviceContext
from nas.training.passes import passes_warning, resolve_auto

COSTS, ESTIMATE, STAGE = "costs.yaml", "estimate.yaml", "search"


def choose_network(config: Config, run: Path, context: DeviceContext) -> tuple[Config, dict]:
    """The configuration with the sizes of the best network, and the content of choice.yaml.

    Trials and choice are kept in the run folder, so that a resumed run repeats them. Raises InputError if no network is
    within the budget or another process runs the trials, and RunError if every trial of a rung fails.
    """
    opened = RunFolder(run / TRIALS, config, STAGE)  # refuses other options than those of an earlier call
    config = opened.resolve_auto(config)
    if not (run / CHOICE).exists():
        record, history = search_networks(config, opened, context)
        write_jsonl(run / PI, history)
        write_yaml(run / CHOICE, record)
    choice = read_yaml(run / CHOICE)
    print(networks_table(choice))
    if warning := overfit_warning(choice):
        print(warning)
    return with_sizes(config, choice["network"]["vocab_size"], choice["network"]["d_model"]), choice


def chosen_costs(given: Config, run: Path, choice: dict) -> dict[str, NetworkCosts]:
    """The cost files of a run: those of the chosen sizes and of the reference. given: the configuration of the search.

    choice: the content of choice.yaml.
    """
    network, reference = read_network(choice["network"]), read_network(choice["reference"])
    data = (with_sizes(given, *one[:2]).data for one in (network, reference))
    corpora = {one.vocab_size: Corpus(prepare(own)) for one, own in zip((network, reference), data, strict=True)}
    costs = {FLOPS_TABLE: count_costs(Candidates(given, corpora, [network[:2]], reference))}
    if given.search.latency.in_milliseconds:
        costs[LATENCY] = NetworkCosts.read(run / TRIALS / COSTS).only(network[:2])
    return costs


def search_networks(config: Config, run: RunFolder, context: DeviceContext) -> tuple[dict, list[dict]]:
    """The content of choice.yaml, and the lines of pi.jsonl. Raises InputError and RunError as choose_network().

    run: the folder of the trials.
    """
    strategy = open_search(config, run.path, context)
    trials, size = strategy.trials, strategy.costs.reference.vocab_size
    run.start(config, provenance(config, trials.corpora[size].meta, context))
    run.write(CONFIG, {"stage": STAGE, **asdict(config)})  # with the present text and device, which trials read
    run.write(COSTS, strategy.costs.to_dict())
    what = "candidates" if config.search.latency.source == "none" else "within the budget"
    parts = batches(trials.rungs)
    most = f"{sum(share * count for share, count in parts):.3g}"
    print(f"{len(strategy.networks)} networks are {what} at first; trials take the steps of at most {most} trainings")
    corpus = trials.corpora[size]
    if warning := passes_warning(resolve_auto(config, corpus), corpus):
        print(warning)
    if not (run.path / LOGS).exists():
        estimate = trial_estimate(strategy, run.path)
        minutes = estimate.seconds(parts) / 60
        print(f"the trials take about {minutes:.2g} minutes, {estimate.at_once} at a time", flush=True)
    chosen = successive_halving(strategy)
    return choice_record(strategy, chosen), pi_lines(strategy)


def open_search(config: Config, folder: Path, context: DeviceContext) -> Strategy:
    """The strategy before the first trial. The costs are those of an earlier call, or are measured.

    Raises InputError if no network is within the budget.
    """
    if world_size() > 1:
        raise InputError("trials run in processes of their own: start the search without torchrun")
    candidates = open_candidates(config, context)
    costs = find_costs(candidates, folder / COSTS, context, keep=True)
    tables, budget = {shape: costs.tables[shape] for shape in candidates.shapes}, config.search.latency.target
    if (absolute := milliseconds(budget)) is not None:
        budget = absolute / costs.reference_cost
    if config.search.latency.source == "none":  # any network
        budget = max(table.overhead + config.model.blocks * max(table.blocks.values()) for table in tables.values())
        budget /= costs.reference_cost
    limit = budget * costs.reference_cost
    networks = first_candidates(config, tables, limit)
    if not networks:
        least, shape = min((cheapest(config, table), shape) for shape, table in tables.items())
        raise InputError(
            f"no network is within search.latency.target={config.search.latency.target}: the cheapest, of {shape[0]} "
            f"pieces and width {shape[1]}, costs {least_ratio(least / costs.reference_cost)} of the reference, "
            f"{for_text(least, costs.unit)}; give at least that, or smaller sizes"
        )
    return Strategy(Trials(config, candidates.corpora, folder, context), costs, budget, networks)


def trial_estimate(strategy: Strategy, folder: Path) -> Estimate:
    """The seconds of trials: those that nas.run has measured with one epoch, or measured now."""
    config, file = strategy.config, folder / ESTIMATE
    if not file.exists() or config.train.epochs is None:
        return strategy.trials.estimate(strategy.propose_first(BATCH))
    known = read_yaml(file)
    return Estimate(known["start"], known["training"] * config.train.epochs, workers(strategy.trials.context))
