"""What the benchmarks compute, not their speeds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from nas.core.config_loading import load_config
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


@pytest.fixture(scope="module")
def quality():
    return load_script("bench/quality")


def test_the_time_to_a_loss_is_interpolated_in_the_logarithm_of_time(quality):
    curve = [(0.25, 3.0), (1.0, 2.0)]
    assert quality.ratio_at(2.5, curve) == pytest.approx(0.5)
    assert quality.ratio_at(2.0, curve) == pytest.approx(1.0)
    assert quality.ratio_at(1.9, curve) is None and quality.ratio_at(3.1, curve) is None


def test_both_recipes_have_the_same_sizes_and_steps(quality):
    root = Path(__file__).parents[1] / "experiments"
    present, previous = (load_config(root / name, []) for name in ("bench/quality.yaml", "compare/retrain.yaml"))
    assert present.data == previous.data and present.evaluate == previous.evaluate
    assert replace(present.model, tie_embeddings=True) == previous.model
    for name in ("steps", "batch_size", "segment", "memory", "threads"):
        assert getattr(present.train, name) == getattr(previous.train, name)


def test_recipes_train_in_turns_for_their_shares_of_the_steps(quality, small_yaml, monkeypatch, capsys):
    monkeypatch.setattr(quality, "TURN_S", 0.01)
    options = [
        "--pattern",
        "ad",
        "--shares",
        "0.5",
        "1.0",
        "--seeds",
        "1",
        "2",
        "--config",
        str(small_yaml),
        "--previous",
        str(small_yaml),
    ]
    options += ["--all", "train.steps=4", "train.warmup_steps=0"]
    monkeypatch.setattr("sys.argv", ["quality.py", "train.optimizer=adamw", *options])
    built, begin, take_turn = [], quality.Training.__init__, quality.Training.take_turn

    def spy(training):
        present = built[-3:]  # the trainings of one seed
        assert training.progress == min(other.progress for other in present)
        take_turn(training)

    monkeypatch.setattr(quality.Training, "__init__", lambda self, *given: (begin(self, *given), built.append(self))[0])
    monkeypatch.setattr(quality.Training, "take_turn", spy)
    quality.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(("| 1", "| 2"))]
    assert [row[:3] for row in rows[:3]] == [["1", "previous", "4"], *(["1", "train.optimizer=adamw", n] for n in "24")]
    figures = json.loads(lines[-1])["train.optimizer=adamw"]
    assert len(figures["ratios"]) == 2 and figures["nll_old"] > 0 and figures["nll_new"] != figures["nll_old"]
