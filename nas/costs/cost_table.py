"""The cost table: costs of operations in FLOPs or milliseconds. Their sum is the cost of a pattern."""

from dataclasses import dataclass, field, replace

from nas.core.pattern import interleaved

FLOPS, MILLISECONDS = "FLOPs", "ms"


@dataclass(frozen=True)
class CostTable:
    """Cost of each operation in a block, and the overhead of every pattern: embedding and output layer.

    holds_for: the conditions of measured costs. quartiles: of measured costs; the overhead has its own.
    reference_cost: of the reference for as much text; None: the reference is interleaved with as many blocks.
    """

    unit: str  # FLOPS or MILLISECONDS
    overhead: float
    blocks: dict[str, float]
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    holds_for: dict = field(default_factory=dict)
    reference_cost: float | None = None

    def cost(self, blocks: list[str]) -> float:
        """Cost of a whole model with these blocks."""
        return self.overhead + sum(self.blocks[name] for name in blocks)

    def reference(self, blocks: int) -> float:
        """Cost of the reference: reference_cost, or that of interleaved with `blocks` blocks."""
        return self.reference_cost or self.cost(interleaved(blocks))

    def ratio(self, blocks: list[str]) -> float:
        """Cost relative to the reference."""
        return self.cost(blocks) / self.reference(len(blocks))

    def ratio_to_interleaved(self, blocks: list[str]) -> float:
        """Cost relative to the interleaved pattern with the same number of blocks."""
        return self.cost(blocks) / self.cost(interleaved(len(blocks)))

    def cheapest(self, operations: list[str], blocks: int) -> list[str]:
        """The pattern of the lowest cost."""
        return [min(operations, key=self.blocks.__getitem__)] * blocks

    def expected_ratio(self, pi, operations: list[str]):
        """Expected cost of a pattern that is sampled from pi [N, O], an array or tensor, relative to the reference.

        It is exact, because costs add up. PLANER (arXiv 2208.14580) penalises it.
        """
        costs = (pi[:, index].sum() * self.blocks[name] for index, name in enumerate(operations))
        return (self.overhead + sum(costs)) / self.reference(len(pi))

    def scaled(self, factor: float) -> "CostTable":
        """The costs of `factor` times as much text."""
        blocks = {name: factor * cost for name, cost in self.blocks.items()}
        quartiles = {name: [factor * cost for cost in both] for name, both in self.quartiles.items()}
        return replace(self, overhead=factor * self.overhead, blocks=blocks, quartiles=quartiles)


def changed_conditions(recorded: dict, current: dict) -> str:
    """The current conditions that were recorded otherwise, with the recorded values, as text; "" if there are none."""
    differ = [key for key in current if recorded.get(key) != current[key]]
    # 40 characters, because a condition may be a digest or a long list.
    return ", ".join(f"{key} {str(recorded[key])[:40]}" if key in recorded else f"no {key}" for key in differ)
