"""What the benchmarks compute, not their speeds."""

import json

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.making import load_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def throughput():
    return load_script("bench/throughput")


@pytest.mark.parametrize("name", ["search_soft", "retrain_adadad", "retrain_adddad"])
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


def test_recipes_are_compared_with_the_first_one(quality, small_yaml, tmp_path, monkeypatch, capsys):
    """Each recipe trains once with each seed, and a training does not depend on the others."""
    monkeypatch.setattr(quality, "CONFIG", small_yaml)
    monkeypatch.setattr(quality, "ROUNDS", 2)
    recipes = ["", "train.muon_lr=0.001", "model.activation=gelu model.d_ffn=8x"]
    options = ["train.steps=6", "train.warmup_steps=1", "--pattern", "a c d d2x", "--seeds", "1", "2"]
    for recipe in recipes:
        options += ["--recipe", recipe]

    def table(*more, out="out") -> dict:
        monkeypatch.setattr("sys.argv", ["quality.py", *options, "--out", str(tmp_path / out), *more])
        quality.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    found = table("--latency")
    results = [
        [json.loads((tmp_path / "out" / f"{quality.job_name(recipe, seed)}.json").read_text()) for seed in (1, 2)]
        for recipe in recipes
    ]
    assert list(found) == ["default", *recipes[1:]] and len({one["nll"] for pair in results for one in pair}) == 6
    means = [sum(one["word_perplexity"] for one in pair) / 2 for pair in results]
    for figures, mean in zip(found.values(), means, strict=True):
        assert figures["word_perplexity"] == pytest.approx(mean, abs=0.01) and figures["latency"] > 0
        assert figures["change"] == pytest.approx(mean / means[0] - 1, abs=1e-4)
    assert found["default"]["latency"] == 1.0 and results[0][0]["parameters"] < results[2][0]["parameters"]
    monkeypatch.setattr(quality, "train", None)  # a second call trains nothing
    assert [one["change"] for one in table().values()] == [one["change"] for one in found.values()]
    monkeypatch.undo()
    monkeypatch.setattr(quality, "CONFIG", small_yaml)
    table("--only", "train.muon-lr-0.001-2", out="alone")
    (alone,) = (json.loads(path.read_text()) for path in (tmp_path / "alone").glob("*-2.json"))
    assert alone["nll"] == results[1][1]["nll"]


def test_the_crossover_with_dense_attention_lies_between_two_lengths():
    crossover = load_script("bench/sequence").crossover
    assert crossover({512: 2.0, 1024: 0.5, 2048: 0.2}) == 724  # 512 * sqrt(2)
    assert crossover({512: 0.9, 1024: 1.1, 2048: 0.5}) > 1024  # for good
    assert crossover({512: 0.9, 1024: 0.5}) == 512 and crossover({512: 0.9, 1024: 1.0}) is None


def test_the_benchmark_of_generation_has_rates_of_both_commits_and_a_bound(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["generation.py", "--rounds", "1", "--lengths", "4", "--before", "HEAD"])
    load_script("bench/generation").main()
    *rows, last = capsys.readouterr().out.splitlines()
    rates = json.loads(last)["tokens_per_s"]
    assert list(rates) == [f"{short}, 4, {count}" for short in ("adadad", "wdwdwd", "ldldld") for count in (1, 16)]
    assert all(list(row) == ["now", "before", "bound"] and min(row.values()) > 0 for row in rates.values())
    assert rows[0] == "| pattern | segment = memory |  | tokens/s | before | times | bound | times the bound |"
    assert len(rows) == 2 + len(rates)
