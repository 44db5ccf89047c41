"""Searches as a user types them: their files, and what is refused."""

import json
import shutil

import pytest
import yaml

from nas.core.files import write_yaml
from tests.processes import refuse, succeed

pytestmark = pytest.mark.slow
BUDGET = ["search.latency.source=flops", "search.latency.target=0.8"]


@pytest.fixture(scope="module")
def within(tmp_path_factory, small_yaml):
    """The run folder of a finished search with a latency term."""
    run = tmp_path_factory.mktemp("within") / "run"
    assert "so the blocks may cost" in succeed("search", small_yaml, "--run", run, *BUDGET)
    return run


def test_a_search_logs_pi_and_its_outcome(within):
    lines = [json.loads(line) for line in (within / "pi.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, *range(3, 25, 3)]
    assert lines[0]["temperature"] == 1.0 and lines[-1]["temperature"] == pytest.approx(0.1)
    outcome = yaml.safe_load((within / "outcome.yaml").read_text())
    assert outcome["train_steps"] == 24 and outcome["train_tokens"] == 24 * 32 and outcome["wall_time_s"] > 0
    assert len(outcome["pattern"]) == 3 and outcome["valid"]["nll_per_token"] > 0


def test_derive_finds_the_likeliest_pattern_of_each_budget(within, tmp_path):
    succeed("derive", within, "--out", tmp_path / "own.yaml")
    assert "own.yaml exists" in refuse("derive", within, "--out", tmp_path / "own.yaml")
    succeed("derive", within, "--pareto", "0.5,0.7", "--out", tmp_path / "pareto.yaml")
    for budget in (0.5, 0.7):
        pattern = yaml.safe_load((tmp_path / f"pareto-{budget}.yaml").read_text())
        assert pattern["flops_ratio_to_interleaved"] <= budget


def test_a_finished_search_keeps_its_outcome_on_resume(within, small_yaml):
    before = (within / "outcome.yaml").read_bytes()
    succeed("search", small_yaml, "--run", within, "--resume", *BUDGET)
    assert (within / "outcome.yaml").read_bytes() == before


def test_logits_that_have_not_learned_are_refused(within, tmp_path):
    early = shutil.copytree(within, tmp_path / "early")
    (early / "pi.jsonl").write_text((within / "pi.jsonl").read_text().splitlines()[0] + "\n")
    (early / "outcome.yaml").unlink()
    assert "pi is still uniform at step 0 of 24" in refuse("derive", early)


def test_a_search_takes_its_costs_from_a_table_of_another_device(small_yaml, tmp_path):
    table, wide = tmp_path / "table.yaml", ["search.method=trials", "search.d_model=[16,24]", "model.ngram_rows=auto"]
    generation = [*wide, "search.latency.timing=generation", "search.latency.target=1.2"]
    succeed("latency", small_yaml, "--out", table, *generation)
    content = yaml.safe_load(table.read_text())
    assert {tuple(one["sizes"]) for one in content["tables"]} == {(38, 16), (38, 24)}
    content["conditions"]["processor"] = "a telephone"
    for one in content["tables"]:  # attention costs nearly nothing there; the budget has room for one other block
        dear = {name: one["overhead"] for name in one["blocks"] if name != "identity"}
        one["blocks"] |= dear | {"attention": 1e-6}
    write_yaml(table, content)
    given, run = [f"search.latency.source={table}", *generation], tmp_path / "run"
    told = succeed("search", small_yaml, "--run", run, *given)
    assert "measuring" not in told
    assert "NOTICE: latencies" not in succeed("derive", run)
    pattern = yaml.safe_load((run / "pattern.yaml").read_text())
    assert pattern["latency"]["holds_for"]["processor"] == "a telephone"
    assert "ms_per_1000_bytes" not in pattern["latency"]
    assert len(pattern["blocks"]) - pattern["blocks"].count("attention") <= 1
    succeed("derive", run, "--latency-budget", "1000ms", "--out", tmp_path / "other.yaml")
    for changed, other in (
        ("model.d_ffn=32", "it was measured with dense d_ffn=24"),
        ("search.d_model=[16,32]", "it lacks a vocabulary of 38 with a width of 32"),
    ):
        told = refuse("search", small_yaml, "--run", tmp_path / "other", *given, changed)
        assert f"{table} does not fit this search: {other}; measure again with nas.latency" in told


def test_the_method_of_the_paper_takes_a_table_of_another_device(small_yaml, tmp_path):
    table, run = tmp_path / "table.yaml", tmp_path / "run"
    given = [f"search.latency.source={table}", "search.latency.target=1000ms"]
    succeed("latency", small_yaml, "--out", table)
    table.write_text(table.read_text().replace("threads: 1", "threads: 64"))
    told = succeed("search", small_yaml, "--run", run, *given)
    assert "measuring" not in told and "threads: 64" in (run / "latency.yaml").read_text()
    assert "NOTICE: latencies" not in succeed("derive", run)
    refused = refuse("search", small_yaml, "--run", tmp_path / "other", *given, "search.latency.timing=training")
    assert f"search.latency.source={table} does not fit this search: it was measured with timing inference" in refused
