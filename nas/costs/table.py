"""What operations cost, as a table that adds up to the cost of a pattern. Imports no torch.

The same table holds FLOPs, which follow from the sizes, or milliseconds measured on a device (nas/latency.py).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from nas.core.errors import InputError
from nas.core.files import read_yaml, write_yaml
from nas.core.pattern import interleaved

FLOPS, MILLISECONDS = "FLOPs per token, forward", "ms"


@dataclass(frozen=True)
class CostTable:
    """Cost of each operation in a block, and of the rest, which every pattern has: embedding and output layer.

    unit: FLOPS or MILLISECONDS; quartiles: the spread of measured costs; holds_for: the sizes, and the device where
    costs were measured.
    """

    unit: str
    overhead: float
    blocks: dict[str, float]
    holds_for: dict = field(default_factory=dict)
    quartiles: dict[str, list[float]] = field(default_factory=dict)

    def pattern(self, blocks: list[str]) -> float:
        """Cost of a whole model with these blocks."""
        return self.overhead + sum(self.blocks[name] for name in blocks)

    def ratio(self, blocks: list[str]) -> float:
        """The same, over the interleaved pattern of as many blocks."""
        return self.pattern(blocks) / self.pattern(interleaved(len(blocks)))

    def least_ratio(self, operations: list[str], blocks: int) -> float:
        """Of the cheapest pattern of so many blocks."""
        return self.ratio([min(operations, key=self.blocks.__getitem__)] * blocks)

    def expected(self, pi, operations: list[str]):
        """Expected cost of a pattern drawn from pi [N, O], probabilities of `operations`: exact, since costs add up.

        pi: an array, or a torch tensor, whose gradients the result follows.
        """
        return self.overhead + sum(pi[:, index].sum() * self.blocks[name] for index, name in enumerate(operations))

    def expected_ratio(self, pi, operations: list[str]):
        """expected() over the cost of the interleaved pattern."""
        return self.expected(pi, operations) / self.pattern(interleaved(len(pi)))

    def predict(self, blocks: list[str]) -> dict:
        """What files hold of a pattern's predicted latency, of a table in milliseconds."""
        return {"predicted_ms": self.pattern(blocks), "predicted_ratio_to_interleaved": self.ratio(blocks)}

    def rows(self, blocks: int) -> list[tuple[str, str, str, str]]:
        """(name, cost, its spread, its share in the interleaved pattern of so many blocks) for each cost, in words."""
        usual, found = self.pattern(interleaved(blocks)), []
        for name, cost in {"embedding and output layer": self.overhead, **self.blocks}.items():
            quartiles = self.quartiles.get(name if name in self.blocks else "overhead", [])
            spread = " ... ".join(f"{quartile:.3f}" for quartile in quartiles)
            found.append((name, f"{cost:.3f}", spread, f"{cost / usual:.1%}"))
        return [*found, (f"interleaved, {blocks} blocks", f"{usual:.3f}", "", "")]

    def text(self, blocks: int) -> str:
        """The same for a terminal."""
        rows = [(self.unit, "median", "quartiles", "of interleaved"), *self.rows(blocks)]
        return "\n".join(f"{name:<28}{cost:>10}{spread:>20}{share:>16}".rstrip() for name, cost, spread, share in rows)

    def to_dict(self) -> dict:
        """What files hold."""
        content = {"unit": self.unit, "overhead": self.overhead, "blocks": self.blocks}
        if self.quartiles:
            content["quartiles"] = self.quartiles
        return content | {"holds_for": self.holds_for}

    def write(self, path: Path) -> None:
        write_yaml(path, self.to_dict())


def read_costs(path: Path, operations: list[str]) -> CostTable:
    """Raises InputError where the table lacks a cost of one of the operations, or of the interleaved pattern's."""
    content = read_yaml(path)
    blocks, overhead = content.get("blocks"), content.get("overhead")
    needed = {*operations, *interleaved(2)}
    costs = [overhead, *blocks.values()] if isinstance(blocks, dict) else []
    numbers = all(isinstance(cost, (int, float)) and 0 <= cost < math.inf for cost in costs)
    about = [content.get(key) or {} for key in ("holds_for", "quartiles")]
    if not (
        costs and numbers and needed <= blocks.keys() and sum(costs) > 0 and all(isinstance(a, dict) for a in about)
    ):
        raise InputError(
            f"{path} is damaged: it must give `overhead` and, in `blocks`, each of {', '.join(operations)}: numbers from 0"
        )
    return CostTable(content.get("unit", FLOPS), overhead, blocks, *about)


TOLERATED = 0.10  # how far a measured latency may be from the predicted one before it is warned of


def latency_words(about: dict) -> list[str]:
    """What a person is told of a latency that was measured: a line, and a warning where it is far from predicted.

    about: as nas.latency.measure_beside gives it, and as files hold it; nothing is said of an empty one.
    """
    if not about:
        return []
    if "median_ms" not in about:
        return [f"latency: predicted {about['predicted_ms']:.2f} ms, not measured"]
    measured, ratio = about["median_ms"], about["ratio_to_interleaved"]
    shape = f"{about['batch_size']} x {about['segment']} tokens with {about['memory']} of memory"
    line = f"latency ({about['timing']}, {shape}): measured {measured:.2f} ms, {ratio:.2f} of the interleaved pattern's"
    if "predicted_ms" not in about:
        return [line]
    predicted, predicted_ratio = about["predicted_ms"], about["predicted_ratio_to_interleaved"]
    words = [f"{line}; predicted {predicted:.2f} ms, {predicted_ratio:.2f}"]
    off = measured / predicted - 1
    if abs(off) > TOLERATED:
        whole = measured / ratio / (predicted / predicted_ratio)  # how much the interleaved pattern changed meanwhile
        words.append(
            f"WARNING: the measured latency is {off:+.0%} off the predicted one; the interleaved pattern takes "
            f"{whole:.2f} times what the table says: if that is far from 1, the machine's speed has changed, and the "
            "ratios are what compares"
        )
    return words
