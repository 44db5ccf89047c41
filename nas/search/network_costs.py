"""Costs of networks of several vocabularies and widths, for the same text."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nas.core.blocks import describe_sizes
from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.pattern import interleaved
from nas.costs.cost_table import MILLISECONDS, CostTable, are_costs
from nas.costs.flops import batch_shape, cost_options, count_flops
from nas.costs.measurement import (
    ROUNDS,
    SECONDS,
    changed_conditions,
    device_conditions,
    measure_steadily,
    table_of_rounds,
    timed_rounds,
    work_of,
)
from nas.costs.workloads import new_works
from nas.data.corpus import Corpus, bytes_per_token
from nas.search.space import Network, read_network, with_sizes
from nas.training.auto import resolve_auto
from nas.training.device import DeviceContext
from nas.training.passes import whole_passes

TIMED_BLOCKS = 8  # of the networks that give the time of a block


@dataclass(frozen=True)
class NetworkCosts:
    """Costs for 1,000 bytes of text.

    tables: of each vocabulary and width. device: the conditions of measured costs.
    """

    tables: dict[tuple[int, int], CostTable]
    reference: Network
    device: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        """The content of costs.yaml."""
        fields = "unit", "overhead", "blocks"
        tables = [
            {"sizes": [*shape], **{name: getattr(table, name) for name in fields}}
            for shape, table in self.tables.items()
        ]
        about = {"per": "1,000 bytes of text", "device": self.device, "reference": self.reference.to_dict()}
        return about | {"tables": tables}

    @classmethod
    def read(cls, path: Path) -> "NetworkCosts":
        content = read_yaml(path)
        if not {"tables", "reference", "device"} <= content.keys():
            raise InputError(f"{path} is no table of networks; python -m nas.latency --networks writes one")
        try:
            tables = {tuple(table.pop("sizes")): CostTable(**table) for table in content["tables"]}
            costs = cls(tables, read_network(content["reference"]), content["device"])
            valid = all(are_costs([table.overhead, *table.blocks.values()]) for table in tables.values())
            damaged = not valid or costs.reference_cost <= 0
        except (AttributeError, KeyError, TypeError, ValueError):
            damaged = True
        if damaged:
            raise InputError(f"{path} is damaged: each table needs sizes, and costs of 0 or more")
        return costs

    def differ(self, config: Config, shapes: list[tuple[int, int]], reference: Network, corpus: Corpus) -> str:
        """Why they do not fit these vocabularies and widths, this reference and a configuration; "" if they do.

        corpus: in the vocabulary of the reference.
        """
        options, names = config.search.latency, {*self.tables[self.reference[:2]].blocks, "identity"}
        wanted = {"timing": options.timing} if options.in_milliseconds else {}
        if options.table:
            wanted |= shared_conditions(config, corpus)
        if bool(self.device) != options.in_milliseconds:
            return f"it has costs in {self.unit}"
        if not options.table and ("onnxruntime" in self.device) != (options.source == "onnx"):
            return "it was measured in another runtime"
        if lacking := {*config.search.operations, *interleaved(2)} - names:
            return f"it lacks {min(lacking)}"
        if reference != self.reference:
            return f"its reference is {self.reference}"
        if changed := changed_conditions(self.device, wanted):
            return f"it was measured with {changed}"
        shape = next((shape for shape in shapes if shape not in self.tables), None)
        return f"it lacks a vocabulary of {shape[0]} with a width of {shape[1]}" if shape else ""

    @property
    def unit(self) -> str:
        """ms or FLOPs"""
        return self.tables[self.reference[:2]].unit.split()[0]

    @property
    def reference_cost(self) -> float:
        return self.cost(self.reference)

    def of_segments(self, network: Network, config: Config, corpus: Corpus) -> CostTable:
        """Milliseconds of the operations at a network's sizes for a batch of segments, as in latency.yaml.

        config, corpus: with these sizes.
        """
        table, names = self.tables[network[:2]], list(self.tables[network[:2]].blocks)
        conditions = self.device | cost_options(config, corpus.vocab_size, names)
        own = CostTable(MILLISECONDS, 1.0, {}, conditions, bytes_per_token=bytes_per_token(corpus))
        scale = 1 / own.per_kilobyte(1.0)
        blocks = {name: scale * cost for name, cost in table.blocks.items()}
        return replace(own, overhead=scale * table.overhead, blocks=blocks)

    def cost(self, network: Network) -> float:
        return self.tables[network[:2]].cost(network.blocks)

    def ratio(self, network: Network) -> float:
        """Cost relative to that of the reference."""
        return self.cost(network) / self.reference_cost


def shared_conditions(config: Config, corpus: Corpus) -> dict:
    """What measured costs of all vocabularies and widths depend on. corpus: in the vocabulary of the reference.

    Another tokenizer has another number of tokens for the same text.
    """
    sizes = dict(zip(("batch_size", "segment", "memory"), batch_shape(config), strict=True))
    keys = ["d_ffn", "norm", "activation", "cutoffs", "div_value", "tie_embeddings", "ngram_rows", "grid"]
    training = config.search.latency.timing == "training"
    keys += ["dropout", "recompute"] * training
    model = {key: getattr(config.model, key) for key in keys}
    train = corpus.meta["splits"]["train"]
    text = {"train_sha256": train.get("sha256"), "train_tokens": train["tokens"]}
    blocks = {name: describe_sizes(name, config.shape) for name in config.search.operations}
    own = {"optimizer": config.train.optimizer} if training else {}
    if training and config.model.dropout == "auto":  # its values depend on the passes
        own["passes"] = whole_passes(config, train["tokens"])
    return sizes | {"head_width": config.model.d_model // config.model.heads} | model | text | blocks | own


def network_costs(
    config: Config,
    corpora: dict[int, Corpus],
    shapes: list[tuple[int, int]],
    reference: Network,
    context: DeviceContext,
) -> NetworkCosts:
    """The costs of these vocabularies and widths. corpora: of each vocabulary."""
    measured = config.search.latency.in_milliseconds
    tokens = math.prod(batch_shape(config)[:2]) if measured else 1
    configs, counts = {}, {size: corpus.counts() for size, corpus in corpora.items()}
    for shape in sorted({*shapes, reference[:2]}):
        configs[shape] = resolve_auto(with_sizes(config, *shape), corpora[shape[0]])
    if measured:
        parts = measured_parts(configs, counts, context)
    else:
        parts = {shape: count_flops(shaped, counts[shape[0]]) for shape, shaped in configs.items()}
    tables = {}
    for shape, part in parts.items():
        scale = 1000 / (bytes_per_token(corpora[shape[0]]) * tokens)
        blocks = {name: scale * cost for name, cost in part.blocks.items()}
        tables[shape] = CostTable(part.unit, scale * part.overhead, blocks)
    device = {}
    if measured:
        device = device_conditions(config, context) | shared_conditions(config, corpora[reference.vocab_size])
    return NetworkCosts(tables, reference, device)


def measured_parts(configs: dict, counts: dict[int, np.ndarray], context: DeviceContext) -> dict:
    """{shape: milliseconds of embedding and output layer, and of each operation, for a batch of segments}

    Blocks are measured once for each width. Raises InputError if a cost is unusable.
    """
    config = next(iter(configs.values()))
    print(f"measuring {len(configs)} pairs of vocabulary and width: {work_of(config)}", flush=True)
    one_of, works = {width: (size, width) for size, width in sorted(configs, reverse=True)}, {}
    names = [name for name in dict.fromkeys([*config.search.operations, *interleaved(2)]) if name != "identity"]
    with context.fork_rng():
        for number, (key, shaped) in enumerate(configs.items(), start=1):
            own = names if key in one_of.values() else []
            patterns = [[], *([name] * TIMED_BLOCKS for name in own)]
            for name, work in zip(("none", *own), new_works(patterns, shaped, counts[key[0]], context)):
                works[key, name] = work
            if config.search.latency.source == "onnx":  # an export takes seconds
                print(f"[{number}/{len(configs)}] {key[0]} pieces, width {key[1]}: exported", flush=True)

        def measure() -> dict[str, CostTable]:
            times = timed_rounds(works, ROUNDS, SECONDS)
            return {
                f"{size} pieces, width {width}": table_of(times, (size, width), one_of[width], names)
                for size, width in configs
            }

        return dict(zip(configs, measure_steadily(measure, config), strict=True))


def table_of(times: dict, shape: tuple[int, int], own: tuple[int, int], names: list[str]) -> CostTable:
    """Milliseconds of a shape. times: seconds of each work in each round [R]. own: the shape of the timed blocks."""
    none = times[own, "none"]
    rounds = {name: (times[own, name] - none) / TIMED_BLOCKS for name in names}
    rounds |= {"overhead": times[shape, "none"], "identity": np.zeros(len(none))}
    return table_of_rounds({name: 1e3 * taken for name, taken in rounds.items()})
