"""search.py, derive.py and nas.latency as a user types them: their files, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from nas.core.files import write_yaml
from tests.making import GUMBEL, assert_same_run
from tests.processes import refuse, succeed

pytestmark = pytest.mark.slow
BUDGET = ["search.latency.source=flops", "search.latency.target=0.8"]


@pytest.fixture(scope="module")
def within(tmp_path_factory, small_yaml):
    """The run folder of a finished search with a latency term."""
    run = tmp_path_factory.mktemp("within") / "run"
    assert "so the blocks may cost" in succeed("search", small_yaml, "--run", run, *BUDGET)
    return run


def test_a_search_logs_pi_and_its_outcome_and_derive_meets_its_budget(within, tmp_path):
    lines = [json.loads(line) for line in (within / "pi.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, *range(3, 25, 3)]
    assert lines[0]["temperature"] == 1.0 and lines[-1]["temperature"] == pytest.approx(0.1)
    outcome = yaml.safe_load((within / "outcome.yaml").read_text())
    assert outcome["train_steps"] == 24 and outcome["train_tokens"] == 24 * 32 and outcome["wall_time_s"] > 0
    assert len(outcome["pattern"]) == 3 and outcome["valid"]["nll_per_token"] > 0
    succeed("derive", within, "--pareto", "0.5,0.7", "--out", tmp_path / "pareto.yaml")
    for budget in (0.5, 0.7):
        pattern = yaml.safe_load((tmp_path / f"pareto-{budget}.yaml").read_text())
        assert pattern["flops_ratio_to_interleaved"] <= budget


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


MEASURED = ["search.latency.source=measured", "search.latency.target=2"]


def test_derive_and_animate_report_missing_runs(tmp_path, retrained, searched):
    assert "holds no pi.jsonl" in refuse("derive", tmp_path / "none")
    assert "holds no pi.jsonl with a logged step" in refuse("derive", retrained)
    shutil.copytree(searched, tmp_path / "whole" / "search")
    assert f"step; give {tmp_path / 'whole' / 'search'}" in refuse("derive", tmp_path / "whole")
    (tmp_path / "pi.jsonl").write_text((searched / "pi.jsonl").read_text().splitlines()[0] + "\n")
    assert "pi has not changed until step 0" in refuse("animate", tmp_path)
    incomplete = shutil.copytree(searched, tmp_path / "incomplete")
    (incomplete / "pi.jsonl").unlink()
    assert "holds no pi.jsonl" in refuse("animate", incomplete)
    assert "must end in .gif" in refuse("animate", searched, "--out", tmp_path / "x.mp4")


def test_derive_replaces_a_pattern_only_by_force(searched, tmp_path):
    out = tmp_path / "mine.yaml"
    succeed("derive", searched, "--out", out)
    edited = out.read_text().replace("blocks:", "# my own choice\nblocks:")
    out.write_text(edited)
    assert "mine.yaml exists; give another file with --out" in refuse("derive", searched, "--out", out)
    assert out.read_text() == edited
    succeed("derive", searched, "--out", out, "--force")
    assert out.read_text() != edited
    out.write_text("a text of mine\n")
    assert "mine.yaml is not a pattern file" in refuse("derive", searched, "--out", out, "--force")
    assert out.read_text() == "a text of mine\n"
    refused = refuse("derive", searched, "--out", tmp_path / "none" / "x.yaml")
    assert f"there is no folder {tmp_path / 'none'}" in refused


@pytest.fixture(scope="module")
def seeds(tmp_path_factory, small_yaml) -> list[Path]:
    """Three seeds of a search by the paper's method, with measured latencies."""
    folder = tmp_path_factory.mktemp("seeds")
    runs = [folder / f"seed{seed}" for seed in (1, 2, 3)]
    for seed, run_dir in enumerate(runs, start=1):
        succeed("search", small_yaml, "--run", run_dir, *MEASURED, *GUMBEL, f"seed={seed}")
    return runs


def test_a_search_with_measured_latency_keeps_its_table_and_resumes_with_it(seeds, small_yaml, tmp_path):
    table = yaml.safe_load((seeds[0] / "latency.yaml").read_text())
    (costs,), conditions = table["tables"], table["conditions"]
    assert costs["unit"] == "ms" and costs["blocks"].keys() == {"attention", "dense", "identity"}
    assert (conditions["batch_size"], conditions["segment"], conditions["memory"]) == (16, 8, 8)
    first = json.loads((seeds[0] / "pi.jsonl").read_text().splitlines()[0])
    attention, dense = costs["blocks"]["attention"], costs["blocks"]["dense"]
    ratio = (costs["overhead"] + attention + dense) / (costs["overhead"] + 2 * attention + dense)
    assert first["expected_cost_ratio"] == pytest.approx(ratio)  # of uniform pi; identity costs 0
    stopped = tmp_path / "stopped"
    shutil.copytree(seeds[0], stopped)
    for name in ("outcome.yaml", "checkpoint.pt", "pi.jsonl", "metrics.jsonl"):
        (stopped / name).unlink()
    shown = succeed("search", small_yaml, "--run", stopped, "--resume", *MEASURED, *GUMBEL)  # with the same table
    assert "measuring again" not in shown
    assert_same_run(seeds[0], stopped, "supernet")


def test_deriving_from_three_seeds_gives_one_pattern_with_agreement_and_latency(seeds, tmp_path):
    out = tmp_path / "three.yaml"
    shown = succeed("derive", *seeds, "--out", out)
    assert "agree" in shown.splitlines()[0] and "measured" in shown and "predicted" in shown
    content = yaml.safe_load(out.read_text())
    last = [json.loads((run / "pi.jsonl").read_text().splitlines()[-1])["pi"] for run in seeds]
    for block, about in enumerate(content["confidence"]):
        for index, name in enumerate(["attention", "dense", "identity"]):
            assert about["pi"][name] == pytest.approx(sum(pi[block][index] for pi in last) / 3, abs=1e-6)
        assert about["operation"] == max(about["pi"], key=about["pi"].get)
        assert round(3 * about["agreement"]) in (0, 1, 2, 3)
    assert min(content["latency"][key] for key in ("ms_per_1000_bytes", "predicted_ms_per_1000_bytes")) > 0
    assert content["derived_from"]["runs"] == [str(run) for run in seeds]
    succeed("derive", *seeds)
    assert (seeds[0] / "pattern-of-3-seeds.yaml").exists()


def test_each_budget_gives_a_pattern_and_all_give_a_table(seeds, small_yaml, tmp_path):
    out = tmp_path / "p.yaml"
    shown = succeed("derive", seeds[0], "--pareto", "0.7,1,0.85", "--out", out)
    (table,) = yaml.safe_load((seeds[0] / "latency.yaml").read_text())["tables"]
    usual = table["overhead"] + 2 * table["blocks"]["attention"] + table["blocks"]["dense"]
    for budget in ("0.7", "0.85", "1"):
        content = yaml.safe_load((tmp_path / f"p-{budget}.yaml").read_text())
        cost = table["overhead"] + sum(table["blocks"][name] for name in content["blocks"])
        assert cost <= float(budget) * usual * (1 + 1e-9)
        assert content["derived_from"]["latency_budget"] == float(budget)
    assert "| budget | pattern |" in shown and "| 0.85 |" in (tmp_path / "p-pareto.md").read_text()
    single = tmp_path / "single.yaml"
    succeed("derive", seeds[0], "--latency-budget", "0.7", "--out", single)
    alone, one_of_three = (yaml.safe_load(file.read_text()) for file in (single, tmp_path / "p-0.7.yaml"))
    assert alone["blocks"] == one_of_three["blocks"]
    shown = succeed("retrain", single, small_yaml, "--run", tmp_path / "retrain")
    results = yaml.safe_load((tmp_path / "retrain" / "results.yaml").read_text())
    key = "predicted_ms_per_1000_bytes"
    assert results["latency"][key] == alone["latency"][key]
    assert "measured" in shown and "predicted" in shown


def test_derive_reports_wrong_options_in_one_line(seeds, searched, small_yaml, tmp_path):
    unmet = "no pattern fits a budget of 0.01: the cheapest costs"
    assert unmet in refuse("derive", seeds[0], "--latency-budget", "0.01")
    assert "is not a budget" in refuse("derive", seeds[0], "--pareto", "0.5,x")
    assert "must be one ratio" in refuse("derive", seeds[0], "--latency-budget", "0.5,1")
    other = tmp_path / "other"
    succeed("search", small_yaml, "--run", other, "search.operations=[attention,dense]")
    assert "3 blocks of attention, dense, and" in refuse("derive", seeds[0], other)
    too_low = ["search.latency.source=measured", "search.latency.target=0.01"]
    assert unmet in refuse("search", small_yaml, "--run", tmp_path / "run", *too_low)
    assert not (tmp_path / "run").exists()


def test_the_latency_command_prints_and_writes_a_table(searched, small_yaml, tmp_path):
    command = ["latency", small_yaml, "--out", tmp_path / "latency.yaml"]
    printed = succeed(*command)
    assert "embedding and output layer" in printed and "interleaved, 3 blocks" in printed
    refuse(*command)  # a table is not replaced
    shutil.copytree(searched, tmp_path / "run")
    before = succeed("derive", tmp_path / "run", "--out", tmp_path / "a.yaml")
    (tmp_path / "latency.yaml").rename(tmp_path / "run" / "latency.yaml")
    after = succeed("derive", tmp_path / "run", "--out", tmp_path / "b.yaml")
    assert "predicted" not in before and "predicted" in after
