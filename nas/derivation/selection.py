"""The choice of a pattern, by the trials of a search or by pi, and its latency at the settings of the search."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from nas.core.config_loading import load_config
from nas.core.errors import InputError, RunError
from nas.core.provenance import check_text, data_digests
from nas.core.run_folder import CONFIG, LATENCY, TRIALS
from nas.costs.budget import likeliest_path
from nas.costs.cost_table import CostTable, least_ratio
from nas.costs.measurement import measure_pattern
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.derivation.runs import Choice, SearchRun
from nas.search.candidate_costs import Candidates, find_costs, in_milliseconds, reference_network
from nas.search.network_search import block_probabilities
from nas.search.space import NetworkCosts, cheapest, first_candidates, read_network, within_budget
from nas.search.strategy import with_neighbours
from nas.search.surrogate import Point, Surrogate, Text
from nas.training.device import set_up_device


def tried_choice(run: SearchRun, content: dict, costs: CostTable, budget: float | None) -> Choice:
    """The network that trials chose or, for another budget, the predicted best of its sizes. content: choice.yaml."""
    own, trials = content["network"], content["trials"]
    if budget is None or (budget == run.budget and costs.unit == run.costs.unit):
        return Choice(own["blocks"], budget, [run], trials=trials, trial=Path(content["trial"]["folder"]))
    shape, config = (own["vocab_size"], own["d_model"]), load_config(run.path / CONFIG, [])
    tried = [read_network(one) for one in trials]
    limit = budget * costs.reference(len(run.pi))
    affordable = within_budget(costs, limit)
    fitting = [one for one in tried if one[:2] == shape and affordable(one.blocks)]
    networks = list(dict.fromkeys([*first_candidates(config, {shape: costs}, limit), *fitting]))
    if not networks:
        least = least_ratio(cheapest(config, costs) / costs.reference(len(run.pi)))
        raise InputError(f"no network is within {budget:.4g} of the reference's cost; give at least {least}")
    points = [Point(one, trial["share"], trial["bits_per_byte"]) for one, trial in zip(tried, trials, strict=True)]
    origin, text = content["surrogate"]["mean_log_sizes"], Text(**content["surrogate"]["text"])
    surrogate = Surrogate(points, [*networks, *tried], config.model.d_ffn, origin, text=text)
    networks = with_neighbours(networks, surrogate, config, {shape: costs}, limit)
    pi = block_probabilities(networks, surrogate.probability_best(networks), run.operations, len(run.pi))
    best = networks[int(np.argmin(surrogate.predict(networks)))]
    return Choice(list(best.blocks), budget, [replace(run, pi=pi)], trials=trials)


def likeliest_choice(runs: list[SearchRun], costs: CostTable, budget: float | None) -> Choice:
    """The likeliest pattern by pi, averaged over the runs."""
    pi = np.mean([run.pi for run in runs], axis=0)
    path = likeliest_path(pi, runs[0].operations, costs, budget)
    return Choice([runs[0].operations[index] for index in path], budget, runs)


class RunLatency:
    """The latency table of a search run, which predicts patterns, and measurements of patterns on this device.

    Nothing is measured if the run's text is missing or has changed, or if the table is of another device.
    """

    def __init__(self, run: Path):
        self.config, self.corpus = load_config(run / CONFIG, []), None
        self.context = set_up_device(self.config.seed, self.config.train)
        self.measured: dict[tuple[str, ...], dict] = {}
        sizes, file = (self.config.data.vocab_size, self.config.model.d_model), run / LATENCY
        try:
            corpus = Corpus(prepare(self.config.data))
            check_text(run, data_digests(corpus.meta))
            self.table = self.current_costs(run, corpus).table(*sizes)
            self.corpus = None if self.config.search.latency.table else corpus
        except (InputError, RunError) as error:
            print(f"NOTICE: latencies come from {file} and are not measured again: {error}")
            self.table = NetworkCosts.read(file).table(*sizes)

    def current_costs(self, run: Path, corpus: Corpus) -> NetworkCosts:
        """The costs of the run, measured again if they are from another device or for other sizes."""
        trials = run / TRIALS / CONFIG  # its values of auto are for any size
        config = load_config(trials if trials.exists() else run / CONFIG, [])
        if not config.search.latency.in_milliseconds:
            config = in_milliseconds(config)
        first, size = Corpus(prepare(config.data)), self.config.data.vocab_size or corpus.vocab_size
        reference = reference_network(config, config.data.vocab_size or first.vocab_size)
        corpora, shape = {reference.vocab_size: first, size: corpus}, (size, self.config.model.d_model)
        return find_costs(Candidates(config, corpora, [shape], reference), run / LATENCY, self.context)

    def of(self, pattern: list[str]) -> dict:
        """Predicted and measured latency, and the conditions of both, in the form of pattern files."""
        key = tuple(pattern)
        if key not in self.measured:
            latency = {
                "predicted_ms_per_1000_bytes": self.table.cost(pattern),
                "predicted_ratio_to_interleaved": self.table.ratio_to_interleaved(pattern),
            }
            if self.corpus:
                latency = measure_pattern(pattern, self.config, self.corpus, self.context, latency)
            self.measured[key] = latency | {"holds_for": self.table.holds_for}
        return dict(self.measured[key])
