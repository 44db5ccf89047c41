"""The search among networks by trials, in a run folder."""

from dataclasses import asdict, replace
from pathlib import Path

from nas.core.config import Config
from nas.core.config_checks import milliseconds
from nas.core.errors import InputError, world_size
from nas.core.files import read_yaml, write_jsonl, write_yaml
from nas.core.pattern import interleaved
from nas.core.provenance import provenance
from nas.core.run_folder import CHOICE, CONFIG, PI, TRIALS, RunFolder, open_run
from nas.costs.cost_table import CostTable, least_ratio
from nas.costs.flops import count_flops
from nas.data.corpus import Corpus, bytes_per_token
from nas.data.preprocess import prepare
from nas.jobs.tasks import workers
from nas.search.choice import choice_record, networks_table, overfit_warning, pi_lines
from nas.search.halving import successive_halving
from nas.search.network_costs import NetworkCosts, network_costs
from nas.search.space import candidate_sizes, cheapest, first_candidates, make_network, read_network, with_sizes
from nas.search.strategy import Strategy
from nas.search.trials import BATCH, LOGS, Estimate, Trials, batches
from nas.training.build import open_streams, passes_warning, resolve_auto
from nas.training.device import DeviceContext

COSTS, ESTIMATE, STAGE = "costs.yaml", "estimate.yaml", "search"


def choose_network(config: Config, run: Path, context: DeviceContext) -> tuple[Config, dict]:
    """The configuration with the sizes of the best network, and the content of choice.yaml.

    Trials and choice are kept in the run folder, so that a resumed run repeats them. Raises InputError if no network is
    within the budget or another process runs the trials, and RunError if every trial of a rung fails.
    """
    opened = open_run(run / TRIALS, config, STAGE)  # refuses other options than those of an earlier call
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


def chosen_tables(given: Config, config: Config, corpus: Corpus, run: Path, choice: dict) -> list[CostTable | None]:
    """[FLOPs, milliseconds or None] of the operations at the chosen sizes. Their reference is that of the search.

    given: the configuration of the search; config, corpus: with the chosen sizes.
    """
    plain, per_token = interleaved(config.model.blocks), bytes_per_token(corpus)
    first = Corpus(prepare(given.data))  # in the vocabulary of the reference
    share = per_token / bytes_per_token(first)  # tokens of the reference per token of the chosen network
    reference = share * count_flops(resolve_auto(given, first, tell=lambda text: None), first.counts()).cost(plain)
    flops = replace(count_flops(config, corpus.counts()), reference_cost=reference, bytes_per_token=per_token)
    if not config.search.latency.in_milliseconds:
        return [flops, None]
    costs = NetworkCosts.read(run / TRIALS / COSTS)
    table = costs.of_segments(read_network(choice["network"]), config, corpus)
    return [flops, replace(table, reference_cost=table.cost(plain) / choice["interleaved_ratio"])]


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
    if warning := passes_warning(config, trials.corpora[size]):
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
    corpora, shapes, costs = open_costs(config, folder / COSTS, context)
    tables, budget = {shape: costs.tables[shape] for shape in shapes}, config.search.latency.target
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
            f"{least:.4g} {costs.unit} for 1,000 bytes of text; give at least that, or smaller sizes"
        )
    return Strategy(Trials(config, corpora, folder, context), costs, budget, networks)


def trial_estimate(strategy: Strategy, folder: Path) -> Estimate:
    """The seconds of trials: those that nas.run has measured with one epoch, or measured now."""
    config, file = strategy.config, folder / ESTIMATE
    if not file.exists() or config.train.epochs is None:
        return strategy.trials.estimate(strategy.propose_first(BATCH))
    known = read_yaml(file)
    return Estimate(known["start"], known["training"] * config.train.epochs, workers(strategy.trials.context))


def open_costs(
    config: Config, file: Path, context: DeviceContext
) -> tuple[dict[int, Corpus], list[tuple[int, int]], NetworkCosts]:
    """The text in each vocabulary, the candidates for vocabulary and width, and their costs: those of a file if it
    has these candidates, else measured. With a table from another device: that one.

    Raises InputError if the table is for other sizes.
    """
    corpora, shapes = candidate_corpora(config)
    for corpus in corpora.values():  # report a text that is too short before anything is measured
        open_streams(corpus, config, context)
    own = make_network(next(iter(corpora)), config.model.d_model, interleaved(config.model.blocks))
    table = config.search.latency.table
    known = file if file.exists() else table
    costs = NetworkCosts.read(Path(known)) if known else None
    if costs and (reason := costs.differ(config, shapes, own, corpora[own.vocab_size])):
        if table:
            raise InputError(f"{table} does not fit this search: {reason}; measure again with nas.latency --networks")
        costs = None
    costs = costs or network_costs(config, corpora, shapes, own, context)
    return corpora, shapes, costs


def candidate_corpora(config: Config) -> tuple[dict[int, Corpus], list[tuple[int, int]]]:
    """The text in each vocabulary, the configuration's first, and the candidates for vocabulary and width.

    `auto` leaves out vocabularies that the text does not allow.
    """
    own = Corpus(prepare(config.data, print))
    size = config.data.vocab_size or own.vocab_size
    corpora, shapes = {size: own}, candidate_sizes(config, size, own.meta["splits"]["train"]["bytes"])
    for size in sorted({shape[0] for shape in shapes} - corpora.keys()):
        try:
            corpora[size] = Corpus(prepare(replace(config.data, vocab_size=size), print))
        except InputError:
            if config.search.vocab_size != "auto":
                raise
    return corpora, [shape for shape in shapes if shape[0] in corpora]
