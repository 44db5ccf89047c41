"""What the benchmarks compute, not their speeds."""

import itertools
import json
from types import SimpleNamespace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from nas.core.pattern import expand
from tests.making import load_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def throughput():
    return load_script("bench/throughput")


@pytest.mark.parametrize("name", ["search_soft", "search_hard", "retrain_adadad", "retrain_adddad"])
def test_flops_of_the_throughput_table_equal_those_of_a_step(name, throughput):
    workload = throughput.Workload(name, 32, throughput.zipf_corpus(100_000), div_value=1)
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


def test_recipes_train_in_turns_for_their_shares_of_the_steps(quality, small_yaml, monkeypatch, capsys):
    """A turn is a step of three seconds, or two for the last step, by a clock that counts its calls."""
    clock = itertools.count()
    monkeypatch.setattr(quality, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(quality, "TURN_S", 1.5)
    options = ["--pattern", "ad", "--shares", "0.5", "1.0", "--seeds", "1", "2", "--config", str(small_yaml)]
    options += ["--previous", "train.optimizer=adamw train.lr=0.004"]
    options += ["--all", "train.steps=4", "train.warmup_steps=0", "model.dropout=0.5"]
    monkeypatch.setattr("sys.argv", ["quality.py", "train.muon_lr=0.02", *options])
    built, begin, take_turn = [], quality.Training.__init__, quality.Training.take_turn

    def spy(training):
        present = built[-3:]  # the trainings of one seed
        assert training.progress == min(other.progress for other in present)
        take_turn(training)

    monkeypatch.setattr(quality.Training, "__init__", lambda self, *given: (begin(self, *given), built.append(self))[0])
    monkeypatch.setattr(quality.Training, "take_turn", spy)
    real_nll = quality.Training.nll
    losses = {("adamw", 4): 2.5, ("muon", 2): 3.0, ("muon", 4): 2.0}
    monkeypatch.setattr(quality.Training, "nll", lambda self: losses[self.phase.config.train.optimizer, self.steps])
    quality.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(("| 1", "| 2"))]
    recipes = [
        ["previous", "4", "11", "2.5000"],
        *(["train.muon_lr=0.02", *row] for row in (["2", "5", "3.0000"], ["4", "11", "2.0000"])),
    ]
    assert rows == [[seed, *row] for seed in "12" for row in recipes]
    figures = json.loads(lines[-1])["train.muon_lr=0.02"]
    assert figures["wall_time_ratio"] == pytest.approx((5 / 11) ** 0.5, abs=1e-4)
    assert figures["steps_ratio"] == pytest.approx(0.5**0.5, abs=1e-4)
    assert (figures["nll_old"], figures["nll_new"]) == (2.5, 2.0) and len(figures["ratios"]) == 2
    found = [training.phase.config for training in built]
    rates = [(config.seed, config.train.lr, config.train.muon_lr) for config in found]
    assert rates == [(seed, *pair) for seed in (1, 2) for pair in ((0.004, 0.015), (0.003, 0.02), (0.003, 0.02))]
    alone = quality.Training(expand("ad"), found[2], built[2].phase.corpus)
    while not alone.finished:
        take_turn(alone)
    assert real_nll(alone) == real_nll(built[2])  # the other trainings have not used its random numbers


def test_the_crossover_with_dense_attention_lies_between_two_lengths():
    crossover = load_script("bench/sequence").crossover
    assert crossover({512: 2.0, 1024: 0.5, 2048: 0.2}) == 724  # 512 * sqrt(2)
    assert crossover({512: 0.9, 1024: 1.1, 2048: 0.5}) > 1024  # for good
    assert crossover({512: 0.9, 1024: 0.5}) == 512 and crossover({512: 0.9, 1024: 1.0}) is None


def test_the_benchmark_of_generation_has_a_rate_for_each_pattern_and_length(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["generation.py", "--rounds", "1", "--lengths", "4", "8"])
    load_script("bench/generation").main()
    *rows, last = capsys.readouterr().out.splitlines()
    rates = json.loads(last)["tokens_per_s"]
    assert list(rates) == [f"{short}, {length}" for length in (4, 8) for short in ("adadad", "wdwdwd", "ldldld")]
    assert all(rate > 0 for columns in rates.values() for rate in columns.values())
    assert rows[0] == "| pattern | segment = memory | evaluation | 1 sample | 16 samples | recomputed |"
    assert len(rows) == 2 + len(rates)
