"""The history of pi: the lines of pi.jsonl, and warnings about their end. N blocks, O candidate operations."""

import numpy as np
from torch import Tensor

from nas.core.pattern import abbreviate
from nas.costs.cost_table import MILLISECONDS, CostTable
from nas.search.pi_statistics import MARGIN, undecided_message
from nas.search.sampling import PathDistribution, PathsWithinBudget

IDENTITY_SHARE, LATE = 0.5, 0.1  # see pi_warnings()


def pi_line(step: int, operations: list[str], logits: Tensor, paths: PathDistribution, costs: CostTable) -> dict:
    """A line of pi.jsonl. Within a budget it also holds the probabilities in paths that are drawn within it."""
    marginals = paths.marginals(logits)
    return {
        "step": step,
        "temperature": 1.0,
        "operations": operations,
        "pi": logits.detach().double().softmax(dim=-1).tolist(),
        **({"pi_within_budget": marginals.tolist()} if isinstance(paths, PathsWithinBudget) else {}),
        "expected_latency_ms": costs.expected(marginals, operations).item() if costs.unit == MILLISECONDS else None,
        "expected_cost_ratio": costs.expected_ratio(marginals, operations).item(),
    }


def drawn_pi(line: dict) -> np.ndarray:
    """The probabilities [N, O] of a line: those within the budget, if there is one."""
    return np.array(line.get("pi_within_budget", line["pi"]))


def likeliest(line: dict) -> str:
    """The likeliest operation of each block, abbreviated."""
    return abbreviate([line["operations"][index] for index in drawn_pi(line).argmax(axis=1)])


def pi_warnings(history: list[dict]) -> list[str]:
    """Warnings about a doubtful outcome, one sentence each. history: the lines of one seed, from its first step.

    They tell if more than half of the blocks choose identity, if the best two operations of a block differ by less than
    0.1, and if a block changed its choice in the last tenth of the steps.
    """
    pi, operations, warnings = drawn_pi(history[-1]), history[-1]["operations"], []
    chosen = [operations[index] for index in pi.argmax(axis=1)]
    if chosen.count("identity") > IDENTITY_SHARE * len(chosen):
        warnings.append(f"{chosen.count('identity')} of {len(chosen)} blocks choose identity")
    for number, row in enumerate(pi if len(operations) > 1 else [], start=1):
        second, first = np.argsort(row, kind="stable")[-2:]
        if row[first] - row[second] < MARGIN:
            message = undecided_message(number, operations[first], operations[second], row[first] - row[second])
            warnings.append(message)
    first, last = history[0]["step"], history[-1]["step"]
    late = [likeliest(line) for line in history if line["step"] >= last - LATE * (last - first)]
    changed = [str(number) for number, names in enumerate(zip(*late, strict=True), start=1) if len(set(names)) > 1]
    if changed:
        blocks = f"block {', '.join(changed)}"
        warnings.append(f"the pattern has not settled: {blocks} changed in the last {LATE:.0%} of the steps of pi")
    return warnings
