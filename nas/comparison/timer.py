"""Measured latencies of patterns, under the recipe that trains them."""

import copy
from pathlib import Path

import numpy as np

from nas.comparison.spec import GIVEN, Contender
from nas.core.config import Config
from nas.core.pattern import interleaved
from nas.costs.cost_table import CostTable
from nas.costs.latency import ROUNDS, current_costs, measure_models, measurement_conditions
from nas.training.device import DeviceContext

REPORT_ROUNDS = 60  # for the latencies in the report


class Timer:
    """Measures patterns of `blocks` blocks.

    Args:
        operations: the operations of the cost table.
        counts: how often the training text has each token [V].
    """

    def __init__(self, recipe: Config, operations: list[str], blocks: int, counts: np.ndarray, context: DeviceContext):
        self.config, self.counts, self.context = copy.deepcopy(recipe), counts, context
        self.config.search.operations, self.config.model.blocks = operations, blocks

    def table(self, path: Path) -> CostTable:
        """Milliseconds of each operation: read from the file if it is valid for this device, else
        measured and written.
        """
        table = current_costs(self.config, self.counts, self.context, path)
        table.write(path)
        return table

    def measure(self, contenders: list[Contender], rounds: int = ROUNDS) -> dict[str, dict]:
        """{contender's key: latency}, all measured in the same rounds.

        Ratios refer to the interleaved pattern at the recipe's d_ffn.
        """
        baseline = Contender("", GIVEN, interleaved(self.config.model.blocks))
        distinct = {contender.key: contender for contender in [baseline, *contenders]}
        models = [(contender.blocks, with_d_ffn(self.config, contender.d_ffn)) for contender in distinct.values()]
        return dict(zip(distinct, measure_models(models, self.counts, self.context, rounds), strict=True))

    def measure_or_reuse(self, contenders: list[Contender], before: dict) -> dict:
        """{"patterns": {contender's key: latency}, "holds_for": conditions}

        Args:
            before: an earlier result, returned if it has all contenders under the present conditions.
        """
        operations = sorted({name for contender in contenders for name in contender.blocks})
        now = measurement_conditions(self.config, len(self.counts), operations, self.context)
        keys = {contender.key for contender in contenders}
        if before.get("holds_for") == now and keys <= before["patterns"].keys():
            return before
        print(f"measuring the latency of {len(keys)} patterns", flush=True)
        return {"patterns": self.measure(contenders, REPORT_ROUNDS), "holds_for": now}


def with_d_ffn(config: Config, d_ffn: int | None) -> Config:
    """A copy of the configuration with this d_ffn, or with its own if that is None."""
    config = copy.deepcopy(config)
    config.model.d_ffn = config.model.d_ffn if d_ffn is None else d_ffn
    return config
