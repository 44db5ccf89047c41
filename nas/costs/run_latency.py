"""Latency of patterns at the settings of a search run."""

from dataclasses import replace
from pathlib import Path

from nas.core.config_loading import load_config
from nas.core.errors import InputError, RunError
from nas.core.pattern import interleaved
from nas.core.provenance import check_text, data_digests
from nas.core.run_folder import CONFIG, FLOPS_TABLE, LATENCY
from nas.costs.cost_table import read_costs
from nas.costs.measurement import current_costs, measure_pattern
from nas.data.corpus import Corpus
from nas.data.preprocess import prepare
from nas.training.device import set_up_device


class RunLatency:
    """The latency table of a search run, which predicts patterns, and measurements of patterns on this device.

    Nothing is measured if the run's text is missing or has changed, or if the table is of another device.
    """

    def __init__(self, run: Path):
        file = run / LATENCY
        self.config, self.corpus = load_config(run / CONFIG, []), None
        self.context = set_up_device(self.config.seed, self.config.train)
        self.measured: dict[tuple[str, ...], dict] = {}
        try:
            corpus = Corpus(prepare(self.config.data))
            check_text(run, data_digests(corpus.meta))
            table = current_costs(self.config, corpus.counts(), self.context, file)
            self.corpus = None if self.config.search.latency.table else corpus
        except (InputError, RunError) as error:
            print(f"NOTICE: latencies come from {file} and are not measured again: {error}")
            table = read_costs(file, self.config.search.operations)
        flops, plain = read_costs(run / FLOPS_TABLE, []), interleaved(self.config.model.blocks)
        reference = table.reference_cost or (flops.reference_cost and table.cost(plain) / flops.ratio(plain))
        self.table = replace(table, reference_cost=reference, bytes_per_token=flops.bytes_per_token)

    def of(self, pattern: list[str]) -> dict:
        """Predicted and measured latency, and the conditions of both, in the form of pattern files."""
        key = tuple(pattern)
        if key not in self.measured:
            latency = self.table.predict(pattern)
            if self.corpus:
                latency = measure_pattern(pattern, self.config, self.corpus, self.context, latency)
            self.measured[key] = latency | {"holds_for": self.table.holds_for}
        return dict(self.measured[key])
