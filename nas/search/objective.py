"""The role of cost in a search: a budget for the paths that are drawn, or a penalty in the logits' loss."""

from torch import Tensor

from nas.core.config import LatencyOptions, SearchOptions
from nas.core.errors import InputError
from nas.core.pattern import ATTENDING, abbreviate, interleaved
from nas.costs.budget import patterns_within
from nas.costs.cost_table import CostTable
from nas.search.sampling import PathDistribution, PathsWithinBudget


def path_distribution(options: SearchOptions, blocks: int, costs: CostTable) -> PathDistribution:
    """The distribution of the paths that are drawn. Raises InputError if fewer than two paths are within the budget."""
    if options.latency.source == "none" or options.latency.mode != "budget":
        return PathDistribution()
    target = options.latency.target
    paths = PathsWithinBudget(patterns_within(target, blocks, options.operations, costs))
    cheapest = costs.cheapest(options.operations, blocks)
    if others := [name for name in options.operations if name != cheapest[0]]:
        second = [*costs.cheapest(others, 1), *cheapest[1:]]
        if costs.ratio(second) > target:
            raise InputError(
                f"only {abbreviate(cheapest)} is within search.latency.target={target:g}, so there is nothing to "
                f"search; give {costs.least_budget(second)} or more"
            )
    return paths


def describe_target(options: SearchOptions, blocks: int, costs: CostTable) -> list[str]:
    """Sentences about what search.latency.target leaves for the blocks; none if the search has no target."""
    if options.latency.source == "none" or options.latency.mode == "penalty":
        return []
    target, baseline = options.latency.target, costs.cost(interleaved(blocks))
    share = max(0.0, target * baseline - costs.overhead) / (baseline - costs.overhead)
    lines = [
        f"search.latency.target={target:g} is {target * baseline:.4g} of the interleaved pattern's {baseline:.4g} "
        f"{costs.unit}; embedding and output layer take {costs.overhead:.4g}, so the blocks may cost "
        f"{share:.0%} of what the interleaved pattern's blocks cost"
    ]
    if attending := [name for name in options.operations if name in ATTENDING]:
        pattern = [*costs.cheapest(attending, 1), *costs.cheapest(options.operations, blocks - 1)]
        if costs.ratio(pattern) > target:
            lines.append(
                f"WARNING: no pattern within search.latency.target={target:g} has an attention block; give "
                f"search.latency.target={costs.least_budget(pattern)} or more"
            )
    return lines


class LatencyPenalty:
    """The penalty in nats on the expected cost of a pattern drawn from pi.

    r is the expected cost divided by the cost of the interleaved pattern. The penalty is weight * max(0, r - target),
    as in PLANER (arXiv 2208.14580), or weight * r with search.latency.mode=penalty. Costs add up over blocks, so the
    expectation and its gradient are exact.
    """

    def __init__(self, options: LatencyOptions, operations: list[str], blocks: int, costs: CostTable):
        """Raises InputError if no pattern reaches search.latency.target."""
        self.options, self.operations, self.costs = options, operations, costs
        cheapest = costs.cheapest(operations, blocks)
        if options.mode == "target" and options.target < costs.ratio(cheapest):
            raise InputError(
                f"search.latency.target={options.target:g} cannot be met: the cheapest pattern costs "
                f"{costs.least_budget(cheapest)} of the interleaved pattern's; give at least that"
            )

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [N, O] -> a scalar."""
        ratio = self.costs.expected_ratio(logits.softmax(dim=-1), self.operations)
        excess = ratio if self.options.mode == "penalty" else (ratio - self.options.target).clamp_min(0)
        return self.options.weight * excess
