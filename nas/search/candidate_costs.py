"""The costs of a search's candidates: those of a file if they fit, else measured or counted."""

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from nas.core.config import Config
from nas.core.errors import CannotSearch, InputError
from nas.core.pattern import interleaved
from nas.costs.flops import batch_shape, count_flops
from nas.costs.measurement import Sizes, device_conditions, measure_tables, size_conditions, work_conditions
from nas.costs.sizes import bytes_beside, operation_bytes
from nas.data.corpus import Corpus, bytes_per_token, prepare
from nas.mixture.without_network import measured_ms
from nas.search.space import Network, NetworkCosts, candidate_sizes, make_network, with_sizes
from nas.training.build import open_streams
from nas.training.device import Runtime
from nas.training.passes import resolve_auto

SINGLE_TOKEN = 2.5  # bytes of the counts of each token


@dataclass(frozen=True)
class Candidates:
    """The candidates for vocabulary and width. corpora: the text in each vocabulary."""

    config: Config
    corpora: dict[int, Corpus]
    shapes: list[Sizes]
    reference: Network

    @cached_property
    def configs(self) -> dict[Sizes, Config]:
        """The configuration of each candidate and of the reference, without auto."""
        shapes = sorted({*self.shapes, self.reference[:2]})
        return {shape: resolve_auto(with_sizes(self.config, *shape), self.corpora[shape[0]]) for shape in shapes}


def open_candidates(config: Config, runtime: Runtime, seconds: float = math.inf) -> Candidates:
    """Prepare the text in each vocabulary; `auto` leaves out those that it is too short for. Raises InputError.

    seconds: after which the vocabularies that are not prepared yet are left out, besides data.vocab_size.
    """
    began = time.monotonic()
    own = Corpus(prepare(config.data, print))
    size = config.data.vocab_size or own.vocab_size
    corpora, shapes = {size: own}, candidate_sizes(config, size, own.meta["splits"]["train"]["bytes"])
    for other in sorted({shape[0] for shape in shapes} - corpora.keys()):
        if time.monotonic() - began > seconds:
            print(f"NOTICE: preparing the text takes too long, so the vocabulary of {other} is left out", flush=True)
            continue
        try:
            corpora[other] = Corpus(prepare(replace(config.data, vocab_size=other), print))
        except InputError:
            if config.search.vocab_size != "auto":
                raise
    for corpus in corpora.values():
        open_streams(corpus, config, runtime)
    possible = [shape for shape in shapes if shape[0] in corpora]
    if not possible:
        raise CannotSearch(
            f"preparing the text took too long for search.vocab_size; give more minutes, or include {size}"
        )
    return Candidates(config, corpora, possible, reference_network(config, size))


def candidates_of(config: Config, vocab_size: int, d_model: int) -> Candidates:
    """One vocabulary and width, and the reference."""
    own, corpus = (Corpus(prepare(data)) for data in (config.data, with_sizes(config, vocab_size, d_model).data))
    reference = reference_network(config, config.data.vocab_size or own.vocab_size)
    return Candidates(config, {reference.vocab_size: own, vocab_size: corpus}, [(vocab_size, d_model)], reference)


def reference_network(config: Config, vocab_size: int) -> Network:
    return make_network(vocab_size, config.model.d_model, interleaved(config.model.blocks))


def find_costs(candidates: Candidates, file: Path, runtime: Runtime, keep: bool = False) -> NetworkCosts:
    """The costs of a file or, without one, of search.latency.source=FILE.yaml, if they fit; else measured or counted.

    keep: a file fits from any device, because a search goes on with the costs that it began with. Raises InputError if
    a given file is for other sizes.
    """
    latency = candidates.config.search.latency
    if file.exists() or latency.table:
        source = file if file.exists() else Path(latency.table)
        costs = NetworkCosts.read(source)
        wanted = wanted_conditions(candidates, runtime, keep)
        if not (reason := costs.differ(candidates.config, wanted, candidates.reference)):
            return with_room(costs, candidates)
        if latency.table:
            given = file if source == file else f"search.latency.source={source}"
            raise InputError(f"{given} does not fit this search: {reason}; measure again with nas.latency")
        print(f"NOTICE: {file} does not fit: {reason}; measuring again", flush=True)
    return measure_costs(candidates, runtime) if latency.in_milliseconds else count_costs(candidates)


def with_room(costs: NetworkCosts, candidates: Candidates) -> NetworkCosts:
    """The costs with the bytes of operations and the room for them, if the search limits the size."""
    options = candidates.config
    tables = {shape: replace(table, bytes={}, room=None) for shape, table in costs.tables.items()}  # a file may differ
    for shape, own in candidates.configs.items() if options.search.size.target else ():
        corpus = candidates.corpora[shape[0]]
        room = options.search.size.target - bytes_beside(own, corpus) - (options.mixture.size or 0)
        if options.mixture.size and options.mixture.size < SINGLE_TOKEN * shape[0]:
            room = -1  # not even the counts of single tokens fit
        tables[shape] = replace(tables[shape], bytes=operation_bytes(own, corpus), room=room)
    return replace(costs, tables=tables)


def wanted_conditions(candidates: Candidates, runtime: Runtime, keep: bool) -> dict[Sizes, dict]:
    """The conditions that known costs must have been measured under."""
    config, latency = candidates.config, candidates.config.search.latency
    if not latency.in_milliseconds or (keep and not latency.table):
        return dict.fromkeys(candidates.configs, work_conditions(config) if latency.in_milliseconds else {})
    device = {"timing": latency.timing} if latency.table else device_conditions(config, runtime)
    return {
        shape: device | size_conditions(own, candidates.corpora[shape[0]], config.search.operations)
        for shape, own in candidates.configs.items()
    }


def count_costs(candidates: Candidates) -> NetworkCosts:
    """FLOPs of the candidates and of the reference."""
    tables = {}
    for shape, own in candidates.configs.items():
        corpus = candidates.corpora[shape[0]]
        tables[shape] = count_flops(own, corpus.counts()).scaled(1000 / bytes_per_token(corpus))
    return with_room(NetworkCosts(tables, candidates.reference), candidates)


def measure_costs(candidates: Candidates, runtime: Runtime) -> NetworkCosts:
    """Milliseconds of the candidates and of the reference. Raises InputError if a cost is unusable."""
    configs, tables = candidates.configs, {}
    device, tokens = device_conditions(candidates.config, runtime), math.prod(batch_shape(candidates.config)[:2])
    counts = {size: corpus.counts() for size, corpus in candidates.corpora.items()}
    for shape, table in measure_tables(configs, counts, runtime).items():
        corpus = candidates.corpora[shape[0]]
        holds_for = device | size_conditions(configs[shape], corpus, list(table.blocks))
        per_text = 1000 / bytes_per_token(corpus)
        beside = per_text * measured_ms(candidates.config, corpus, shape[1])
        tables[shape] = replace(table.scaled(per_text / tokens), holds_for=holds_for, mixture=beside)
    return with_room(NetworkCosts(tables, candidates.reference), candidates)
