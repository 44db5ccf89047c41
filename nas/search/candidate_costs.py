"""The costs of a search's candidates: those of a file if they fit, else measured or counted."""

import math
from dataclasses import replace
from pathlib import Path

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.pattern import interleaved
from nas.costs.conditions import device_conditions, size_conditions, work_conditions
from nas.costs.flops import batch_shape, count_flops
from nas.costs.measurement import measure_tables
from nas.data.corpus import Corpus, bytes_per_token
from nas.data.preprocess import prepare
from nas.search.network_costs import NetworkCosts
from nas.search.space import Network, candidate_sizes, make_network, with_sizes
from nas.training.auto import resolve_auto
from nas.training.device import DeviceContext
from nas.training.streams import open_streams

Shape = tuple[int, int]  # vocabulary and width


def in_milliseconds(config: Config) -> Config:
    """The configuration with costs that are measured in PyTorch."""
    latency = replace(config.search.latency, source="measured")
    return replace(config, search=replace(config.search, latency=latency))


def open_costs(
    config: Config, file: Path, context: DeviceContext, keep: bool = True
) -> tuple[dict[int, Corpus], list[Shape], NetworkCosts]:
    """The text in each vocabulary, the candidates for vocabulary and width, and their costs by find_costs()."""
    corpora, shapes, reference = open_candidates(config, context)
    return corpora, shapes, find_costs(config, corpora, shapes, reference, context, file, keep)


def open_candidates(config: Config, context: DeviceContext) -> tuple[dict[int, Corpus], list[Shape], Network]:
    """The text in each vocabulary, the candidates for vocabulary and width, and the reference.

    Raises InputError if the text is too short, before anything is measured.
    """
    corpora, shapes = candidate_corpora(config)
    for corpus in corpora.values():
        open_streams(corpus, config, context)
    return corpora, shapes, reference_network(config, next(iter(corpora)))


def reference_network(config: Config, vocab_size: int) -> Network:
    return make_network(vocab_size, config.model.d_model, interleaved(config.model.blocks))


def candidate_corpora(config: Config) -> tuple[dict[int, Corpus], list[Shape]]:
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


def find_costs(
    config: Config,
    corpora: dict[int, Corpus],
    shapes: list[Shape],
    reference: Network,
    context: DeviceContext,
    file: Path,
    keep: bool = False,
) -> NetworkCosts:
    """The costs of a file or, without one, of search.latency.source=FILE.yaml, if they fit; else measured or counted.

    keep: a file fits from any device, because a search goes on with the costs that it began with. Raises InputError if
    a given file is for other sizes.
    """
    given = config.search.latency.table
    if file.exists() or given:
        costs = NetworkCosts.read(file if file.exists() else Path(given))
        wanted = wanted_conditions(config, corpora, [*shapes, reference[:2]], context, keep)
        reason = costs.differ(config, wanted, reference)
        if not reason:
            return costs
        if given:
            raise InputError(
                f"search.latency.source={given} does not fit this search: {reason}; measure again with nas.latency"
            )
        print(f"NOTICE: {file} does not fit: {reason}; measuring again", flush=True)
    if config.search.latency.in_milliseconds:
        return measure_costs(config, corpora, shapes, reference, context)
    return count_costs(config, corpora, shapes, reference)


def wanted_conditions(
    config: Config, corpora: dict[int, Corpus], shapes: list[Shape], context: DeviceContext, keep: bool
) -> dict[Shape, dict]:
    """The conditions that known costs must have been measured under."""
    if not config.search.latency.in_milliseconds:
        return {shape: {} for shape in shapes}
    if config.search.latency.table:
        device = {"timing": config.search.latency.timing}
    elif keep:
        return dict.fromkeys(shapes, work_conditions(config))
    else:
        device = device_conditions(config, context)
    names = config.search.operations
    return {
        (size, width): device | size_conditions(own, corpora[size], names)
        for (size, width), own in sized_configs(config, corpora, shapes).items()
    }


def sized_configs(config: Config, corpora: dict[int, Corpus], shapes: list[Shape]) -> dict[Shape, Config]:
    """The configuration of each vocabulary and width, without auto."""
    return {shape: resolve_auto(with_sizes(config, *shape), corpora[shape[0]]) for shape in sorted({*shapes})}


def count_costs(config: Config, corpora: dict[int, Corpus], shapes: list[Shape], reference: Network) -> NetworkCosts:
    """FLOPs of these vocabularies and widths. corpora: of each vocabulary."""
    tables = {}
    for (size, width), own in sized_configs(config, corpora, [*shapes, reference[:2]]).items():
        tables[size, width] = count_flops(own, corpora[size].counts()).scaled(1000 / bytes_per_token(corpora[size]))
    return NetworkCosts(tables, reference)


def measure_costs(
    config: Config, corpora: dict[int, Corpus], shapes: list[Shape], reference: Network, context: DeviceContext
) -> NetworkCosts:
    """Milliseconds of these vocabularies and widths. Raises InputError if a cost is unusable."""
    device, tokens = device_conditions(config, context), math.prod(batch_shape(config)[:2])
    configs, tables = sized_configs(config, corpora, [*shapes, reference[:2]]), {}
    counts = {size: corpus.counts() for size, corpus in corpora.items()}
    for (size, width), table in measure_tables(configs, counts, context).items():
        holds_for = device | size_conditions(configs[size, width], corpora[size], list(table.blocks))
        scaled = table.scaled(1000 / (bytes_per_token(corpora[size]) * tokens))
        tables[size, width] = replace(scaled, holds_for=holds_for)
    return NetworkCosts(tables, reference)
