"""Costs of interleaved networks of several shapes, for the same text."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import read_yaml
from nas.core.pattern import interleaved
from nas.costs.cost_table import MILLISECONDS
from nas.costs.flops import batch_shape, count_flops
from nas.costs.latency import ROUNDS, SECONDS, segment_works, timed_rounds
from nas.data.corpus import Corpus, bytes_per_token
from nas.shapes.space import NetworkShape, own_shape, with_shape
from nas.training.build import resolve_auto
from nas.training.device import DeviceContext

TIMED_BLOCKS = 8  # of the networks that give the time of a block


@dataclass(frozen=True)
class ShapeCosts:
    """Costs for 1,000 bytes of text.

    unit: milliseconds or FLOPs. parts: of embedding and output layer, of an attention block and of a dense block, by
    vocabulary and width. own: the reference.
    """

    unit: str
    parts: dict[tuple[int, int], tuple[float, float, float]]
    own: NetworkShape

    def to_dict(self) -> dict:
        """The content of costs.yaml."""
        return {"unit": self.unit, "parts": [[list(key), list(parts)] for key, parts in self.parts.items()]}

    @classmethod
    def read(cls, path: Path, own: NetworkShape) -> "ShapeCosts":
        content = read_yaml(path)
        return cls(content["unit"], {tuple(key): tuple(parts) for key, parts in content["parts"]}, own)

    def cost(self, shape: NetworkShape) -> float:
        """Cost of the interleaved network of a shape."""
        overhead, attention, dense = self.parts[shape.vocab_size, shape.d_model]
        return overhead + (shape.blocks + 1) // 2 * attention + shape.blocks // 2 * dense

    def ratio(self, shape: NetworkShape) -> float:
        """Cost relative to that of the configuration's own shape."""
        return self.cost(shape) / self.cost(self.own)


def shape_costs(
    config: Config, corpora: dict[int, Corpus], shapes: list[NetworkShape], context: DeviceContext
) -> ShapeCosts:
    """The costs of the vocabularies and widths of these shapes. corpora: of each vocabulary."""
    own, measured = own_shape(config), config.search.latency.source == "measured"
    tokens = math.prod(batch_shape(config)[:2]) if measured else 1
    configs, counts = {}, {size: corpus.counts() for size, corpus in corpora.items()}
    for size, d_model in sorted({shape[:2] for shape in (*shapes, own)}):
        shaped = with_shape(config, NetworkShape(size, d_model, own.blocks))
        configs[size, d_model] = resolve_auto(shaped, corpora[size], tell=lambda text: None)
    if measured:
        parts = measured_parts(configs, counts, context)
    else:
        tables = {key: count_flops(shaped, counts[key[0]], interleaved(2)) for key, shaped in configs.items()}
        parts = {key: (table.overhead, *(table.blocks[n] for n in interleaved(2))) for key, table in tables.items()}
    for (size, d_model), values in parts.items():
        parts[size, d_model] = tuple(1000 / (bytes_per_token(corpora[size]) * tokens) * value for value in values)
    return ShapeCosts(MILLISECONDS if measured else "FLOPs", parts, own)


def measured_parts(configs: dict, counts: dict[int, np.ndarray], context: DeviceContext) -> dict:
    """Milliseconds of ShapeCosts.parts for a batch of segments. Blocks are measured once for each width."""
    print(f"measuring {len(configs)} pairs of vocabulary and width", flush=True)
    one_of, works = {width: (size, width) for size, width in sorted(configs, reverse=True)}, {}
    with context.fork_rng():
        for key, config in configs.items():
            names = interleaved(2) if key in one_of.values() else []
            patterns = [[], *([name] * TIMED_BLOCKS for name in names)]
            for name, work in zip(("none", *names), segment_works(patterns, config, counts[key[0]], context)):
                works[key, name] = work
        times = {key: float(np.median(taken)) * 1e3 for key, taken in timed_rounds(works, ROUNDS, SECONDS).items()}
    blocks = {
        key: [(times[key, name] - times[key, "none"]) / TIMED_BLOCKS for name in interleaved(2)]
        for key in one_of.values()
    }
    if min(map(min, blocks.values())) <= 0:
        raise InputError("a block was measured to take no time: stop other programs, and search again")
    return {key: (times[key, "none"], *blocks[one_of[key[1]]]) for key in configs}
