"""Sequential searches: the schedule, budgets, seeds of pi, weights of another search, shared projections."""

import json
import re
import shutil
from itertools import product

import numpy as np
import pytest
import torch
import yaml

from models.operations import BlockConfig
from nas.core.errors import InputError
from nas.core.pattern import abbreviate
from nas.search.sampling import fair_paths, weight_groups
from nas.search.schedule import describe_maturity
from nas.search.supernet import SuperNet
from tests.making import generator, make_search
from tests.processes import refuse, succeed
from tests.test_sampling import assert_unbiased

SEQUENTIAL = [
    "search.schedule=sequential",
    "search.warmup_steps=null",
    "search.logits_steps=8",
    "search.estimator=risk_seeking",
]
FIVE = ["attention", "sparse_strided", "sparse_fixed", "dense", "identity"]


@pytest.fixture
def sequential_config(small_config):
    return lambda *overrides: small_config(*SEQUENTIAL, *overrides)


def test_the_weights_train_first_and_then_the_logits(sequential_config):
    phase = make_search(sequential_config("train.steps=6"))
    assert phase.total_steps == 14
    for step in range(1, 15):
        weights = [p.clone() for p in phase.supernet.backbone.parameters()]
        logits = phase.supernet.logits.clone()
        nll, _ = phase.step(step)
        moved = any(not torch.equal(a, b) for a, b in zip(weights, phase.supernet.backbone.parameters(), strict=True))
        assert moved == (nll is not None) == (step <= 6)
        assert torch.equal(logits, phase.supernet.logits) == (step <= 6)
        about_logits = {"heldout_nll", "temperature", "entropy"}
        assert phase.scalars(step).keys() & {"lr", *about_logits} == ({"lr"} if step <= 6 else about_logits)
    assert phase.annealed_temperature(14) == 0.1


@pytest.mark.parametrize(("schedule", "share"), [(SEQUENTIAL, 0.5), (["search.warmup_steps=6"], 0)])
def test_the_weights_train_on_short_segments_first_as_in_a_training(small_config, schedule, share):
    phase = make_search(small_config(*schedule, "train.steps=12", "train.short_share=0.5"))
    seen = []
    for step in range(1, 13):
        phase.step(step)
        seen.append(phase.stream.memories is None)
    assert seen == [step <= 12 * share for step in range(1, 13)]


def test_the_learning_rate_ends_with_the_weights_steps(sequential_config):
    phase = make_search(sequential_config("train.steps=6", "train.warmup_steps=2"))
    for step in range(1, 7):
        phase.step(step)
    assert phase.train_weights.optimizer.lr == pytest.approx(0.25 * 3e-3)


def test_seeds_of_pi_begin_anew_with_the_same_weights(sequential_config):
    phase = make_search(sequential_config("train.steps=3", "search.logits_seeds=3"))
    assert phase.total_steps == 3 + 3 * 8 and phase.schedule.restarts == (11, 19)
    pis = []
    for step in range(1, phase.total_steps + 1):
        if step in (12, 20):
            pis.append(phase.supernet.pi())
        phase.step(step)
        if step in (12, 20):  # one step of Adam moves each logit by at most its learning rate
            assert phase.supernet.logits.abs().max() <= 0.05 + 1e-6
    pis.append(phase.supernet.pi())
    torch.testing.assert_close(phase.pi_of_seeds(), torch.stack(pis).double(), atol=1e-6, rtol=0)
    assert (pis[0] - pis[1]).abs().max() > 1e-4


def test_a_resumed_seed_of_pi_is_exact(sequential_config):
    config = sequential_config("train.steps=3", "search.logits_seeds=2", "model.dropout=0")
    whole, first, resumed = (make_search(config) for _ in range(3))
    for step in range(1, 20):
        whole.step(step)
    for step in range(1, 14):
        first.step(step)
    resumed.load_state_dict(first.state_dict())
    for step in range(14, 20):
        resumed.step(step)
    assert torch.equal(whole.supernet.logits, resumed.supernet.logits)
    assert torch.equal(whole.pi_of_seeds(), resumed.pi_of_seeds())


def test_all_paths_of_a_budget_search_are_within_the_budget(sequential_config):
    phase = make_search(sequential_config("train.steps=2", "search.latency.source=flops", "search.latency.target=0.6"))
    drawn = []
    original = phase.paths.sample
    phase.paths.sample = lambda *inputs: drawn.append(original(*inputs)) or drawn[-1]
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
    names = phase.supernet.operations
    ratios = [phase.flops.ratio([names[index] for index in path]) for paths in drawn for path in paths]
    assert len(ratios) == 8 * 4 and max(ratios) <= 0.6 + 1e-9
    assert phase.flops.ratio(phase.supernet.names(phase.paths.best(phase.supernet.logits))) <= 0.6 + 1e-9
    marginals = phase.paths.marginals(phase.supernet.logits)
    assert phase.expected_costs(marginals)["expected_flops_ratio"] == pytest.approx(
        phase.flops.expected_ratio(marginals, names).item()
    )


def test_the_estimate_under_a_budget_is_unbiased(sequential_config):
    """The losses are made up, so that the exact gradient can be computed over all paths within the budget."""
    budget = ["search.latency.source=flops", "search.latency.target=0.6", "search.estimator=leave_one_out"]
    phase = make_search(sequential_config("train.steps=2", *budget))
    names, logits = phase.supernet.operations, phase.supernet.logits
    logits.data = torch.randn(3, 3, generator=generator(1))
    made_up = torch.randn(3, 3, 3, dtype=torch.float64, generator=generator(2))
    fitting = [p for p in product(range(3), repeat=3) if phase.flops.ratio([names[i] for i in p]) <= 0.6 + 1e-9]
    assert 1 < len(fitting) < 27
    copy = logits.detach().double().requires_grad_()
    scores = torch.stack([sum(copy[block, index] for block, index in enumerate(path)) for path in fitting])
    expected = (scores.softmax(dim=0) * torch.stack([made_up[path] for path in fitting])).sum()
    (exact,) = torch.autograd.grad(expected, copy)
    blocks = phase.supernet.backbone.blocks
    phase.estimator.run = lambda batch: (made_up[tuple(block.choice[0][0] for block in blocks)], None)
    draws = []
    for _ in range(2000):
        phase.estimator.estimate(None)
        draws.append(logits.grad.double())
    assert_unbiased(draws, exact)


def test_operations_that_share_projections_have_the_same_parameters():
    supernet = SuperNet(2, FIVE, BlockConfig(16, 2, 24, stride=4), 11, shared_projections=True)
    block = supernet.backbone.blocks[0]
    attention, strided, fixed, dense, _ = block.candidates
    for other in (strided, fixed):
        for (name, one), (other_name, two) in zip(attention.named_parameters(), other.named_parameters(), strict=True):
            assert name == other_name and one is two
    assert sum(p.numel() for p in block.parameters()) == sum(
        p.numel() for operation in (attention, dense) for p in operation.parameters()
    )
    apart = SuperNet(2, FIVE, BlockConfig(16, 2, 24, stride=4), 11)
    assert len(list(apart.parameters())) > len(list(supernet.parameters()))


def test_shared_projections_train_as_often_as_one_operation():
    groups = weight_groups(FIVE, shared_projections=True)
    assert groups == [[0, 1, 2], [3], [4]]
    paths = np.array(fair_paths(4, groups, generator(0)))
    for block in paths.T:
        assert np.bincount(block).tolist() == [1, 1, 1, 3, 3]
    assert weight_groups(FIVE, shared_projections=False) == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "train each operation of a block 30 times: search.retrain_steps is not set"),
        (["search.retrain_steps=30"], "30 times, 1.00 of the 30 steps"),
        (["search.retrain_steps=60"], "times, 0.50 of the 60 steps"),
        (["search.retrain_steps=61"], "WARNING: 90 steps .* 0.49 of the 61 steps .* give the search train.steps=92"),
    ],
)
def test_the_maturity_of_the_weights_is_stated(sequential_config, more, expected):
    config = sequential_config("train.steps=90", *more)
    text = describe_maturity(config, 90)
    assert re.search(expected, text) and text.startswith("WARNING") == expected.startswith("WARNING"), text


@pytest.fixture(scope="module")
def searched(tmp_path_factory, small_yaml):
    """(configuration file, run folder) of a finished sequential search within a budget."""
    folder = tmp_path_factory.mktemp("sequential")
    content = yaml.safe_load(small_yaml.read_text())
    latency = {"source": "flops", "target": 0.8}
    content["search"] = {"logits_steps": 8, "logits_seeds": 2, "paths": 4, "latency": latency}
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    shown = succeed("search", folder / "mine.yaml", "--run", folder / "run")
    assert "24 steps of 32 tokens on uniform paths train each operation of a block 8 times" in shown
    assert "so the blocks may cost" in shown and "cost: the wall time of" in shown
    return folder / "mine.yaml", folder / "run"


@pytest.mark.slow
def test_a_search_logs_pi_at_every_step_of_the_logits(searched):
    lines = [json.loads(line) for line in (searched[1] / "pi.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["step"] > 24] == list(range(25, 41))
    assert {line["logits_seed"] for line in lines if line["step"] > 32} == {2}
    metrics = [json.loads(line) for line in (searched[1] / "metrics.jsonl").read_text().splitlines()]
    heldout = [line["step"] for line in metrics if line["split"] == "heldout"]
    assert heldout == [27, 30, 33, 36, 39, 40]
    outcome = yaml.safe_load((searched[1] / "outcome.yaml").read_text())
    assert outcome["cost_in_trainings"] > 1


@pytest.mark.slow
def test_weights_of_a_finished_search_serve_another_budget(searched, tmp_path):
    mine, run = searched
    again = [f"search.weights_from={run}", "search.latency.target=0.6", "search.logits_seeds=1", "seed=3"]
    succeed("search", mine, "--run", tmp_path / "again", *again)
    states = [torch.load(path / "checkpoint.pt")["phase"]["supernet"] for path in (run, tmp_path / "again")]
    for key in states[0]:
        assert torch.equal(states[0][key], states[1][key]) == (key != "logits"), key
    assert yaml.safe_load((tmp_path / "again/outcome.yaml").read_text())["train_steps"] == 8


@pytest.mark.slow
def test_derive_keeps_the_budget_of_the_search_and_learns_pi_anew_for_others(searched, tmp_path):
    _, run = searched
    shown = succeed("derive", run, "--out", tmp_path / "own.yaml")
    own = yaml.safe_load((tmp_path / "own.yaml").read_text())
    assert own["derived_from"]["method"] == "budget" and own["flops_ratio_to_interleaved"] <= 0.8
    assert "3 blocks differ between two seeds of pi with the same weights" in shown
    assert "patterns within the same cost, nll with the SuperNet's weights on parts of valid" in shown
    assert own["blocks"] == yaml.safe_load((run / "outcome.yaml").read_text())["pattern"]
    rules = own["derived_from"]["candidates"]
    assert {"pi", "one attention"} <= rules.keys() and all(3 < about["nll"] < 6 for about in rules.values())
    succeed("derive", run, "--pareto", "0.5,0.7", "--out", tmp_path / "pareto.yaml")
    for budget in (0.5, 0.7):
        pattern = yaml.safe_load((tmp_path / f"pareto-{budget}.yaml").read_text())
        assert pattern["derived_from"]["method"] == "relearn" and pattern["flops_ratio_to_interleaved"] <= budget
    shown = succeed("derive", run, "--trials", "2", "--out", tmp_path / "tried.yaml")
    tried = yaml.safe_load((tmp_path / "tried.yaml").read_text())
    rules = tried["derived_from"]["candidates"].values()
    best = min((about for about in rules if "trial_nll" in about), key=lambda about: about["trial_nll"])
    assert abbreviate(tried["blocks"]) == best["pattern"] and f"{best['pattern']}  {best['trial_nll']:.4f}" in shown
    assert tried["derived_from"]["trials"] == 2 and tried["flops_ratio_to_interleaved"] <= 0.8
    succeed("derive", run, "--trials", "--out", tmp_path / "auto.yaml")
    assert yaml.safe_load((tmp_path / "auto.yaml").read_text())["derived_from"]["trials"] == 4  # half of 8 steps
    assert "tried.yaml exists" in refuse("derive", run, "--trials", "2", "--out", tmp_path / "tried.yaml")
    assert "--trials 0 must be at least 1" in refuse("derive", run, "--trials", "0")


@pytest.mark.slow
def test_weights_that_do_not_fit_are_refused(searched, tmp_path, text_folder):
    mine, run = searched

    def refused(*more, source=run):
        return refuse("search", mine, "--run", tmp_path / "refused", f"search.weights_from={source}", *more)

    assert "has model.d_ffn=24, not 32; give the options of that search" in refused("model.d_ffn=32")
    assert "has search.operations=" in refused("search.operations=[attention,dense]")
    assert "has search.arch_fraction=0.2, not 0.3" in refused("search.arch_fraction=0.3")
    other = tmp_path / "text"
    shutil.copytree(text_folder, other)
    (other / "valid.txt").write_text("another text .\n" * 40)
    assert "was trained on another text: data_sha256 differs" in refused(f"data.source={other}")
    assert "holds no finished search" in refused(source=tmp_path)
    assert "no pattern fits a budget of 0.01: the cheapest costs" in refused("search.latency.target=0.01")
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_a_finished_search_keeps_its_outcome_on_resume(searched):
    mine, run = searched
    before = (run / "outcome.yaml").read_bytes()
    shown = succeed("search", mine, "--run", run, "--resume")
    assert (run / "outcome.yaml").read_bytes() == before
    assert f"{yaml.safe_load(before)['cost_in_trainings']:.2f} trainings of an average pattern" in shown


@pytest.mark.slow
def test_a_text_that_has_changed_since_the_search_is_refused(searched, tmp_path):
    _, run = searched
    shutil.copytree(run, tmp_path / "run")
    record = yaml.safe_load((run / "provenance.yaml").read_text())
    record["data_sha256"]["valid"] = "0"
    (tmp_path / "run/provenance.yaml").write_text(yaml.safe_dump(record))
    message = refuse("derive", tmp_path / "run", "--out", tmp_path / "pattern.yaml")
    assert "was trained on another text: data_sha256 differs" in message
    assert not (tmp_path / "pattern.yaml").exists()


@pytest.mark.slow
def test_logits_that_have_not_learned_are_refused(searched, tmp_path):
    _, run = searched
    lines = (run / "pi.jsonl").read_text().splitlines()
    shutil.copytree(run, tmp_path / "early")
    (tmp_path / "early/pi.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["step"] <= 24) + "\n")
    (tmp_path / "early/outcome.yaml").unlink()
    assert "pi is still uniform at step 24 of 40" in refuse("derive", tmp_path / "early")


def test_an_unknown_folder_of_weights_is_refused(sequential_config, tmp_path):
    from nas.search.supernet import inherit_weights

    phase = make_search(sequential_config("train.steps=3"))
    config = sequential_config(f"search.weights_from={tmp_path}")
    with pytest.raises(InputError, match="holds no finished search"):
        inherit_weights(phase.supernet, config, phase.corpus)
