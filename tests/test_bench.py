"""The FLOPs in the throughput benchmark equal those that its steps compute. Its speeds are not tested."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from nas.search import sampling
from tests.making import load_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def throughput():
    return load_script("bench/throughput")


@pytest.mark.parametrize("name", ["search_soft", "search_hard", "retrain_adadad", "retrain_adddad"])
def test_flops_of_the_throughput_table_equal_those_of_a_step(name, throughput, monkeypatch):
    monkeypatch.setattr(sampling, "sample_path", throughput.balanced_path)
    workload = throughput.Workload(name, 32, throughput.ZipfCorpus(100_000), div_value=1)
    workload.turn()  # fills the memories
    with FlopCounterMode(display=False) as counter:
        tokens = workload.turn()
    # The first block's positions need no gradient, and the shares of the clusters vary from batch to batch.
    assert counter.get_total_flops() / tokens == pytest.approx(workload.flops_per_token, rel=0.02)
