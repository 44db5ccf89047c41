"""The benchmarks count what they say; how fast anything is, they alone tell."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.attention import relative_attention
from nas import searching
from tests.making import load_script


@pytest.fixture(scope="module")
def throughput():
    return load_script("bench/throughput")


@pytest.mark.parametrize("name", ["search_soft", "search_hard", "retrain_adadad", "retrain_adddad"])
def test_the_flops_of_the_throughput_table_are_those_that_a_step_computes(name, throughput, monkeypatch):
    monkeypatch.setattr(searching, "sample_path", throughput.balanced_path)
    workload = throughput.Workload(name, 32, throughput.ZipfCorpus(100_000), division=1)
    workload.turn()  # fills the memories
    with FlopCounterMode(display=False) as counter:
        tokens = workload.turn()
    # The first block's positions need no gradient, and the shares of the clusters vary from batch to batch.
    assert counter.get_total_flops() / tokens == pytest.approx(workload.flops_per_token, rel=0.02)


def test_a_block_without_position_term_is_attention_without_terms_b_and_d(throughput):
    torch.manual_seed(0)
    query, key_value, position = torch.randn(3, 5, 8), torch.randn(3, 9, 16), torch.zeros(9, 8)
    content, silent = torch.randn(2, 4), torch.zeros(2, 4)
    inputs = [tensor.requires_grad_() for tensor in (query, key_value, content)]
    results = []
    for function in (relative_attention, throughput.without_position):
        mixed = function(query, key_value, position, content, silent)
        results.append([mixed, *torch.autograd.grad(mixed.square().sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
