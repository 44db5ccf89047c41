"""The role of cost in a search: the penalty, the budget of the paths, and what a search says about them."""

import types
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from nas.search.objective import describe_target, path_distribution

from nas.core.config import LatencyOptions, SearchOptions
from nas.core.errors import InputError
from nas.costs.cost_table import MILLISECONDS, CostTable
from tests.making import COSTS, make_search
from tests.reference import expected_loss

LATENCY = CostTable(MILLISECONDS, 1.0, {"attention": 3.0, "dense": 1.0, "identity": 0.1})


@pytest.mark.parametrize("source", ["flops", "measured"])
def test_the_penalty_has_the_exact_gradient_of_the_expected_cost(small_config, source):
    """The reference enumerates all 27 paths and averages their costs, relative to the interleaved pattern."""
    price = ["search.latency.weight=2", "search.latency.mode=penalty", f"search.latency.source={source}"]
    phase = make_search(small_config(*price), latency=LATENCY if source == "measured" else None)
    logits, names = torch.randn(3, 3, dtype=torch.float64, requires_grad=True), phase.supernet.operations
    table = LATENCY if source == "measured" else phase.flops
    by_paths = 2 * expected_loss(logits, lambda path: torch.tensor(table.ratio([names[i] for i in path])))
    by_sum = phase.penalty(logits)
    assert by_sum.item() == pytest.approx(by_paths.item())
    slow, fast = (torch.autograd.grad(value, logits)[0] for value in (by_paths, by_sum))
    torch.testing.assert_close(slow, fast)


def test_the_penalty_acts_only_above_the_target(small_config):
    for target, charged in ((0.9, True), (5.0, False)):
        phase = make_search(
            small_config("search.latency.source=flops", "search.latency.mode=target", f"search.latency.target={target}")
        )
        with torch.no_grad():
            phase.supernet.logits[:, 0] += 3  # attention, above the interleaved pattern
        phase.supernet.logits.grad = torch.zeros_like(phase.supernet.logits)
        before = phase.supernet.logits.clone()
        phase.update_logits(24)
        assert torch.equal(before, phase.supernet.logits) != charged


def test_a_target_that_no_pattern_reaches_is_refused_with_the_lowest_cost(small_config):
    target = ["search.latency.source=flops", "search.latency.mode=target"]
    least = make_search(small_config()).flops.least_budget(["identity"] * 3)
    with pytest.raises(InputError, match=f"cannot be met: the cheapest pattern costs {least}"):
        make_search(small_config(*target, "search.latency.target=0.01"))
    make_search(small_config(*target, f"search.latency.target={least}"))
    with pytest.raises(InputError, match=r"no pattern fits a budget of 0.01: the cheapest costs 0\.\d{3} of"):
        make_search(small_config("search.latency.source=flops", "search.latency.target=0.01"))
    reachable = ["search.latency.target=0.01", "search.latency.mode=penalty"]
    make_search(small_config("search.latency.source=flops", *reachable))


def test_the_expected_cost_is_logged(small_config):
    phase = make_search(small_config("search.latency.source=measured", "search.latency.mode=target"), latency=LATENCY)
    lines = []
    run = types.SimpleNamespace(append=lambda name, line: lines.append(line))
    phase.record(run, 0, logged=True)
    assert lines[0]["expected_latency_ms"] == pytest.approx(1.0 + 3 * (3.0 + 1.0 + 0.1) / 3)
    assert phase.scalars(phase.total_steps)["latency_ms"] == lines[0]["expected_latency_ms"]
    make_search(small_config()).record(run, 0, logged=True)
    assert lines[1]["expected_latency_ms"] is None and "pi_within_budget" not in lines[1]


def test_within_a_budget_the_probabilities_of_drawn_patterns_are_logged(small_config):
    phase = make_search(small_config("search.latency.source=flops", "search.latency.target=0.6"))
    lines = []
    phase.record(types.SimpleNamespace(append=lambda name, line: lines.append(line)), 0, logged=True)
    pi, within = np.array(lines[0]["pi"]), np.array(lines[0]["pi_within_budget"])
    names = phase.supernet.operations
    fitting = [path for path in product(range(3), repeat=3) if phase.flops.ratio([names[i] for i in path]) <= 0.6]
    expected = np.mean([np.eye(3)[list(path)] for path in fitting], axis=0)  # pi is uniform
    np.testing.assert_allclose(within, expected, atol=1e-9)
    assert np.allclose(pi, 1 / 3) and within[0, 0] < 0.3


def test_the_weight_of_the_penalty_scales_its_gradient(small_config):
    gradients = []
    for weight in (1.0, 3.0):
        price = ["search.latency.source=flops", "search.latency.mode=penalty", f"search.latency.weight={weight}"]
        phase = make_search(small_config(*price))
        phase.supernet.logits.grad = torch.zeros_like(phase.supernet.logits)
        seen = []
        phase.logits_optimizer.step = lambda seen=seen, phase=phase: seen.append(phase.supernet.logits.grad.clone())
        phase.update_logits(24)
        gradients += seen
    torch.testing.assert_close(gradients[1], 3 * gradients[0])
    assert gradients[0].abs().max() > 0


def test_a_budget_without_room_for_attention_causes_a_warning():
    def options(target, mode="budget", source="flops", **more):
        return SearchOptions(latency=LatencyOptions(source=source, mode=mode, target=target), **more)

    about, warning = describe_target(options(0.79), 2, COSTS)
    assert "so the blocks may cost 58% of" in about  # 0.79 * 20 - 10 of 10
    assert "WARNING" in warning and "give search.latency.target=0.800 or more" in warning
    assert len(describe_target(options(0.8), 2, COSTS)) == 1
    assert len(describe_target(options(0.7, operations=["dense", "identity"]), 2, COSTS)) == 1
    with pytest.raises(InputError, match=r"only ii is within search.latency.target=0.69, .* give 0.700 or more"):
        path_distribution(options(0.69), 2, COSTS)
    assert describe_target(options(0.1, mode="penalty"), 2, COSTS) == []
    assert describe_target(options(0.1, source="none"), 2, COSTS) == []
    costly = replace(COSTS, blocks=COSTS.blocks | {"sparse_fixed": 9.0, "identity": 1.0})
    more = options(0.79, operations=["sparse_fixed", "attention", "dense", "identity"])
    assert "give search.latency.target=0.850" in describe_target(more, 2, costly)[1]  # 10 + 6 + 1 of 20
