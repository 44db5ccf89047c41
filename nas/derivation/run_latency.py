"""Latency of patterns at the settings of a search run."""

from pathlib import Path

from nas.core.config_loading import load_config
from nas.core.errors import InputError, RunError
from nas.core.run_folder import CONFIG, LATENCY, TRIALS, check_text, data_digests
from nas.costs.measurement import measure_pattern
from nas.data.corpus import Corpus, prepare
from nas.search.candidate_costs import Candidates, find_costs, in_milliseconds, reference_network
from nas.search.network_costs import NetworkCosts
from nas.training.device import set_up_device


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
