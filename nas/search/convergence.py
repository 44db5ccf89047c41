"""Convergence of a search: the step since which each block has kept its choice, and warnings about the outcome."""

from torch import Tensor

from nas.core.config import SearchOptions
from nas.search.pi_statistics import undecided_message
from nas.search.supernet import SuperNet


class Convergence:
    """Tracks the likeliest operation of each of N blocks."""

    def __init__(self, supernet: SuperNet, options: SearchOptions, path: list[int]):
        """path: the likeliest path at first."""
        self.supernet, self.options, self.path = supernet, options, path
        self.changed_at = [0] * len(self.path)  # the step at which each block's choice last changed

    def update(self, step: int, path: list[int]) -> None:
        """path: the likeliest path after the step."""
        self.changed_at = [
            since if old == new else step for since, old, new in zip(self.changed_at, self.path, path, strict=True)
        ]
        self.path = path

    def stop_reason(self, step: int, first_step: int) -> str | None:
        """The reason to stop early, or None. first_step: the first step at which the logits trained."""
        share, steps = self.options.stable_share, self.options.stable_steps
        stable = sum(step - max(since, first_step) >= steps for since in self.changed_at)
        if share and stable >= share * len(self.path):
            return f"{stable} of {len(self.path)} blocks kept their choice for {steps} steps"
        return None

    def warnings(self, step: int, first_step: int, pi: Tensor) -> list[str]:
        """Warnings about a doubtful outcome, one sentence each.

        first_step: the first step at which the logits trained; pi [N, O]: the probabilities of the paths drawn.
        """
        limits, result = self.options.warnings, []
        names = self.supernet.names(self.path)
        if names.count("identity") > limits.identity_share * len(names):
            result.append(f"{names.count('identity')} of {len(names)} blocks choose identity")
        ranked = pi.topk(min(2, len(self.supernet.operations)))
        for number, (best, order) in enumerate(zip(ranked.values.tolist(), ranked.indices.tolist(), strict=True), 1):
            if len(best) > 1 and best[0] - best[1] < limits.margin:
                result.append(undecided_message(number, *self.supernet.names(order), best[0] - best[1]))
        late_from = step - limits.late_share * (step - first_step)
        late = [str(i) for i, since in enumerate(self.changed_at, 1) if since > late_from]
        if late:
            when = f"the last {limits.late_share:.0%} of the logits' steps"
            result.append(f"the pattern has not settled: block {', '.join(late)} changed in {when}; give more steps")
        return result

    def state_dict(self) -> dict:
        return {"path": self.path, "changed_at": self.changed_at}

    def load_state_dict(self, state: dict) -> None:
        self.path, self.changed_at = state["path"], state["changed_at"]
