"""Searches as a user types them: their files, the weights of another search, and what is refused."""

import json
import shutil

import pytest
import yaml

from nas.core.pattern import abbreviate
from tests.processes import refuse, succeed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def searched(tmp_path_factory, small_yaml):
    """(configuration file, run folder) of a finished sequential search within a budget."""
    folder = tmp_path_factory.mktemp("sequential")
    content = yaml.safe_load(small_yaml.read_text())
    latency = {"source": "flops", "target": 0.8}
    content["search"] = {"method": "single_path", "logits_steps": 8, "logits_seeds": 2, "paths": 4, "latency": latency}
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    shown = succeed("search", folder / "mine.yaml", "--run", folder / "run")
    assert "24 steps of 32 tokens train each operation of a block 8 times" in shown
    assert "so the blocks may cost" in shown and "cost: the wall time of" in shown
    return folder / "mine.yaml", folder / "run"


def test_a_search_logs_pi_at_every_step_of_the_logits(searched):
    lines = [json.loads(line) for line in (searched[1] / "pi.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, *range(25, 41)]
    assert {line["logits_seed"] for line in lines if line["step"] > 32} == {2}
    evaluated = [json.loads(line) for line in (searched[1] / "paths.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluated] == list(range(1, 17))
    assert all(len(line["paths"]) == len(line["nll"]) == 4 and len(line["paths"][0]) == 3 for line in evaluated)
    metrics = [json.loads(line) for line in (searched[1] / "metrics.jsonl").read_text().splitlines()]
    heldout = [line["step"] for line in metrics if line["split"] == "heldout"]
    assert heldout == [27, 30, 33, 36, 39, 40]
    outcome = yaml.safe_load((searched[1] / "outcome.yaml").read_text())
    assert outcome["cost_in_trainings"] > 1


def test_an_interrupted_search_learns_pi_on_exactly(searched, tmp_path):
    mine, run = searched
    stopped = shutil.copytree(run, tmp_path / "stopped")
    (stopped / "outcome.yaml").unlink()
    for name, lines in (("paths.jsonl", 5), ("pi.jsonl", 8)):
        kept = (run / name).read_text().splitlines()[:lines]
        (stopped / name).write_text("\n".join([*kept, '{"step": 6, "pa']))  # the last line is cut short
    shown = succeed("search", mine, "--run", stopped, "--resume")
    assert "continuing from step 24 of 24" in shown
    for name in ("pi.jsonl", "paths.jsonl", "metrics.jsonl"):
        assert (stopped / name).read_bytes() == (run / name).read_bytes()


def test_weights_of_a_finished_search_serve_another_budget(searched, tmp_path):
    """A search with the weights of another equals a derivation for its budget, but for the seed."""
    mine, run = searched
    again = [f"search.weights_from={run}", "search.latency.target=0.6"]
    succeed("search", mine, "--run", tmp_path / "again", *again)
    outcome = yaml.safe_load((tmp_path / "again/outcome.yaml").read_text())
    assert outcome["train_steps"] == 16 and outcome["cost_in_trainings"] is None
    for source, name, more in ((run, "one", ["--latency-budget", "0.6"]), (tmp_path / "again", "two", [])):
        succeed("derive", source, *more, "--out", tmp_path / f"{name}.yaml")
    one, two = (yaml.safe_load((tmp_path / f"{name}.yaml").read_text()) for name in ("one", "two"))
    assert one["blocks"] == two["blocks"] and one["confidence"] == two["confidence"]
    assert one["derived_from"]["candidates"] == two["derived_from"]["candidates"]
    assert one["flops_ratio_to_interleaved"] <= 0.6


def test_derive_chooses_among_candidates(searched, tmp_path):
    _, run = searched
    shown = succeed("derive", run, "--out", tmp_path / "own.yaml")
    own = yaml.safe_load((tmp_path / "own.yaml").read_text())
    candidates = own["derived_from"]["candidates"]
    assert own["flops_ratio_to_interleaved"] <= 0.8 and "blocks differ between two of these patterns" in shown
    assert abbreviate(own["blocks"]) == min(candidates, key=lambda one: one["nll"])["pattern"]
    names = {name for one in candidates for name in one["names"]}
    assert {"pi", "seed of pi", "runner-up of pi", "one attention"} <= names
    assert all(3 < one["nll"] < 6 for one in candidates)
    assert "own.yaml exists" in refuse("derive", run, "--out", tmp_path / "own.yaml")
    succeed("derive", run, "--pareto", "0.5,0.7", "--out", tmp_path / "pareto.yaml")
    for budget in (0.5, 0.7):
        pattern = yaml.safe_load((tmp_path / f"pareto-{budget}.yaml").read_text())
        assert pattern["flops_ratio_to_interleaved"] <= budget


def test_weights_that_do_not_fit_are_refused(searched, tmp_path, text_folder):
    mine, run = searched

    def refused(*more, source=run):
        return refuse("search", mine, "--run", tmp_path / "refused", f"search.weights_from={source}", *more)

    assert "has model.d_ffn=24, not 32; give the options of that search" in refused("model.d_ffn=32")
    assert "has search.operations=" in refused("search.operations=[attention,dense]")
    assert "has search.arch_fraction=0.2, not 0.3" in refused("search.arch_fraction=0.3")
    assert "needs search.method=single_path" in refused("search.method=gumbel")
    other = tmp_path / "text"
    shutil.copytree(text_folder, other)
    (other / "valid.txt").write_text("another text .\n" * 40)
    assert "was trained on another text: data_sha256 differs" in refused(f"data.source={other}")
    assert "holds no finished search" in refused(source=tmp_path)
    assert "no pattern fits a budget of 0.01: the cheapest costs" in refused("search.latency.target=0.01")
    assert not (tmp_path / "refused").exists()


def test_a_finished_search_keeps_its_outcome_on_resume(searched):
    mine, run = searched
    before = (run / "outcome.yaml").read_bytes()
    shown = succeed("search", mine, "--run", run, "--resume")
    assert (run / "outcome.yaml").read_bytes() == before
    assert f"{yaml.safe_load(before)['cost_in_trainings']:.2f} trainings of an average pattern" in shown


def test_a_text_that_has_changed_since_the_search_is_refused(searched, tmp_path):
    _, run = searched
    shutil.copytree(run, tmp_path / "run")
    record = yaml.safe_load((run / "provenance.yaml").read_text())
    record["data_sha256"]["valid"] = "0"
    (tmp_path / "run/provenance.yaml").write_text(yaml.safe_dump(record))
    message = refuse("derive", tmp_path / "run", "--out", tmp_path / "pattern.yaml")
    assert "was trained on another text: data_sha256 differs" in message
    assert not (tmp_path / "pattern.yaml").exists()


def test_logits_that_have_not_learned_are_refused(searched, tmp_path):
    _, run = searched
    lines = (run / "pi.jsonl").read_text().splitlines()
    shutil.copytree(run, tmp_path / "early")
    (tmp_path / "early/pi.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["step"] <= 24) + "\n")
    (tmp_path / "early/outcome.yaml").unlink()
    assert "pi is still uniform at step 0 of 40" in refuse("derive", tmp_path / "early")
