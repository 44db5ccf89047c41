"""Derivation: from pi by argmax, from trials, several seeds, confidence, files, and what is printed."""

import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nas.core.config import Config
from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import FORMAT, expand, interleaved, read_pattern
from nas.costs.cost_table import MILLISECONDS
from nas.derivation import selection as choice
from nas.derivation.runs import Choice, check_seeds, confidence_warnings, current_pattern, pattern_record, read_run
from nas.derivation.selection import confidence_table, pareto_table, print_choice, print_notices, trials_table
from nas.search.space import NetworkCosts
from tests.making import COSTS, NAMES, one_hot, plain, search_run


def seeds_of(*pis, **more):
    return [search_run(pi, path=f"runs/{index}", seed=index, **more) for index, pi in enumerate(pis)]


def argmax_pattern(*pis):
    return record([NAMES[index] for index in np.mean(pis, axis=0).argmax(axis=1)], *seeds_of(*pis))


def record(blocks, *runs, budget=None):
    return pattern_record(Choice(blocks, budget, list(runs)), COSTS)


def write_flops(run: Path) -> None:
    """COSTS as the costs of a run with default sizes."""
    sizes = Config().data.vocab_size or 9, Config().model.d_model
    write_yaml(run / "flops.yaml", NetworkCosts({sizes: COSTS}, plain(*sizes, 2)).to_dict())


def test_argmax_takes_the_likeliest_operations_and_records_confidence(tmp_path):
    pattern = argmax_pattern([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])
    assert pattern["blocks"] == ["attention", "identity"]
    first = pattern["confidence"][0]
    assert first["margin"] == pytest.approx(0.5) and first["second"] == "dense" and not first["undecided"]
    assert first["entropy"] == pytest.approx(0.801819, abs=1e-6)
    assert pattern["flops_ratio_to_interleaved"] == pytest.approx(16 / 20)
    assert confidence_warnings(pattern) == []
    assert pattern["d_model"] == 8
    assert pattern["sizes"] == {"attention": {"heads": 4, "key_heads": 4}, "identity": {}}
    write_yaml(tmp_path / "pattern.yaml", pattern)
    assert read_pattern(tmp_path / "pattern.yaml") == pattern
    table = confidence_table(pattern).splitlines()
    assert len(table) == 3 and "0.700" in table[1] and "identity" in table[2]


def test_ties_and_undecided_blocks_cause_warnings():
    pattern = argmax_pattern([[0.4, 0.4, 0.2], [0.36, 0.32, 0.32], [0.9, 0.05, 0.05]])
    messages = confidence_warnings(pattern)
    assert len(messages) == 2
    assert "block 1 is a TIE between attention and dense" in messages[0]
    assert "block 2 is UNDECIDED: attention leads dense by only 0.040" in messages[1]
    assert "undecided: dense as good" in confidence_table(pattern).splitlines()[2]
    assert confidence_warnings(record(["dense"], search_run([[1.0]], operations=["dense"]))) == []


def test_several_seeds_give_mean_pi_agreement_and_standard_error():
    sure, split, lone = [0.9, 0.05, 0.05], [0.98, 0.01, 0.01], [0.01, 0.98, 0.01]
    pattern = argmax_pattern([sure, split], [sure, lone], [[0.8, 0.1, 0.1], split])
    first, second = pattern["confidence"]
    assert (first["agreement"], second["agreement"]) == (1.0, pytest.approx(2 / 3, abs=1e-4))
    assert second["pi"]["attention"] == pytest.approx((0.98 + 0.01 + 0.98) / 3, abs=1e-6)
    margins = np.array([0.97, -0.97, 0.97])
    assert second["margin"] == pytest.approx(margins.mean(), abs=1e-6)
    assert second["margin_error"] == pytest.approx(margins.std(ddof=1) / math.sqrt(3), abs=1e-6)
    # The margin of 0.32 is large enough for one run, but it is not significant over the seeds.
    assert (first["undecided"], second["undecided"]) == (False, True)
    (warning,) = confidence_warnings(pattern)
    assert "block 2 is UNDECIDED" in warning and "standard error of the lead over the seeds: 0.64" in warning
    lines = confidence_table(pattern).splitlines()
    assert "100%" in lines[1] and lines[1].endswith("decided")
    assert "67%" in lines[2] and lines[2].endswith("undecided: dense as good")


def test_a_choice_against_pi_is_reported():
    pattern = record(["dense"] * 2, search_run([[0.9, 0.1, 0.0], [0.5, 0.45, 0.05]]))
    lines = confidence_table(pattern).splitlines()
    assert "pi prefers attention" in lines[1] and "undecided: attention as good" in lines[2]
    (warning,) = confidence_warnings(pattern)
    assert warning == "block 2 is UNDECIDED: attention leads dense by only 0.050; dense may be as good"
    block = record(["identity"], search_run([[0.27, 0.49, 0.24]]))["confidence"][0]
    assert not block["undecided"] and (block["second"], block["margin"]) == ("dense", pytest.approx(-0.25))


def test_the_certainty_within_a_budget_is_that_of_patterns_within_it():
    pi = [[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]]
    pairs = {(0, 1), (1, 0), (0, 2), (2, 0), (1, 1), (1, 2), (2, 1), (2, 2)}  # two attentions cost 1.1
    expected = sum(pi[0][a] * pi[1][b] for a, b in pairs if a == 0) / sum(pi[0][a] * pi[1][b] for a, b in pairs)
    block = record(["attention", "dense"], search_run(pi), budget=1.0)["confidence"][0]
    assert block["pi"]["attention"] == pytest.approx(expected, abs=1e-6) and expected < 0.5


def test_seeds_of_different_searches_are_refused_with_the_difference():
    pi, two = [[0.5, 0.3, 0.2]], partial(search_run, path="runs/two")
    one = search_run(pi)
    free = {"seed": 2, "data": {"source": "x", "cache": "/elsewhere"}, "train": {"threads": 3}}
    assert check_seeds([one, two([[0.4, 0.4, 0.2]], **free)]) == []
    names = {"operations": ["dense", "identity"]}
    for told, other in (
        ("runs/two searched 1 blocks of dense, identity, and runs/one 1 of attention", two([[0.5, 0.5]], **names)),
        ("runs/two searched 2 blocks", two(pi * 2)),
        (r"model\.d_model is 16 in runs/two and 8 in runs/one", two(pi, model={"d_model": 16})),
        ("runs/one is given twice", one),
    ):
        with pytest.raises(InputError, match=told):
            check_seeds([one, other])
    (fraction,) = check_seeds([one, two(pi, search={"arch_fraction": 0.3}, seed=2)])
    (same,) = check_seeds([one, two(pi)])
    assert "search.arch_fraction is 0.3 in runs/two and 0.2 in runs/one" in fraction
    assert "has the same seed as runs/one" in same


def test_the_current_pattern_is_the_latest_known_and_within_the_budget(tmp_path):
    line = {"step": 8, "temperature": 1.0, "operations": NAMES, "pi": [[0.5, 0.4, 0.1], [0.1, 0.2, 0.7]]}
    (tmp_path / "pi.jsonl").write_text(json.dumps(line) + "\n")
    write_flops(tmp_path)  # overhead 10, attention 6, dense 4, identity 0; interleaved 20
    budget = {"source": "flops", "target": 0.75}
    for latency, expected in ({}, [NAMES[0], NAMES[2]]), (budget, [NAMES[1], NAMES[2]]):
        write_yaml(tmp_path / "config.yaml", {"search": {"method": "trials", "latency": latency}})
        assert current_pattern(tmp_path) == expected
    write_yaml(tmp_path / "pattern.yaml", {"format": FORMAT, "blocks": ["dense", "dense"]})
    assert current_pattern(tmp_path) == ["dense", "dense"]


def test_the_table_of_budgets():
    pi = np.array([[0.5, 0.4, 0.1]] * 2)
    found = (expand("di"), 0.7), (expand("ad"), 1.0)
    patterns = [record(blocks, search_run(pi), budget=budget) for blocks, budget in found]
    patterns[1]["latency"] = {"ms_per_1000_bytes": 0.25, "ratio_to_interleaved": 0.98}
    rows = pareto_table(patterns, COSTS).splitlines()[-2:]
    assert rows == ["| 0.7 | di | 0 | 0.700 |  |  |", "| 1 | ad | 1 | 1.000 | 0.250 | 0.980 |"]


def test_the_significance_of_a_lead_follows_students_t():
    """Over three seeds a lead of 2.5 standard errors is not significant (t quantile 2.92); one of 3.5 is."""
    for errors, undecided in ((2.5, True), (3.5, False)):
        spread = 0.3 / errors * math.sqrt(3)  # standard deviation of a lead of 0.3
        leads = 0.3 + spread * np.array([-1.0, 0.0, 1.0])
        rows = [[[(1 + lead) / 2, (1 - lead) / 2, 0.0]] for lead in leads]
        record = argmax_pattern(*rows)["confidence"][0]
        found = record["margin"], record["margin_error"], record["undecided"]
        assert found == (pytest.approx(0.3), pytest.approx(0.3 / errors, abs=1e-5), undecided)


def test_a_third_operation_can_be_as_good():
    """Dense is second on average and never leads; identity leads in one seed."""
    record = argmax_pattern([[0.6, 0.4, 0.0]], [[0.6, 0.4, 0.0]], [[0.4, 0.0, 0.6]])["confidence"][0]
    assert record["undecided"]
    record = argmax_pattern([[0.62, 0.38, 0.0]], [[0.6, 0.4, 0.0]], [[0.4, 0.15, 0.45]])["confidence"][0]
    assert record["undecided"] and (record["second"], record["as_good"]) == ("dense", "identity")
    assert record["margin"] == pytest.approx(0.54 - 0.3100, abs=1e-4)


def test_a_run_is_read_with_its_costs(tmp_path):
    lines = [{"step": 0, "temperature": 1.0, "operations": NAMES, "pi": [[0.2, 0.3, 0.5]]}]
    lines.append({**lines[0], "step": 9, "of_steps": 10, "pi": [[0.1, 0.8, 0.1]]})
    (tmp_path / "pi.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_yaml(tmp_path / "config.yaml", {"stage": "search", "seed": 5})
    write_flops(tmp_path)
    run = read_run(tmp_path)
    assert (run.step, run.of_steps, run.pi.tolist(), run.options["seed"]) == (9, 10, [[0.1, 0.8, 0.1]], 5)
    assert run.flops.cost(interleaved(2)) == 20


def test_trials_give_their_network_or_the_best_of_its_sizes_within_another_budget(tmp_path, small_config):
    """Attention is better than dense in the trials, and costs 6 instead of 4, beside an overhead of 10."""
    config = small_config("search.method=trials", "search.operations=[attention,dense,identity]", "model.blocks=3")
    write_yaml(tmp_path / "config.yaml", asdict(config))
    sizes, own = {"vocab_size": 50, "d_model": 16}, ["attention", "attention"]
    losses = {"aa": 2.0, "ad": 2.1, "dd": 2.4, "a": 2.2, "d": 2.5}
    trials = [sizes | {"name": s, "blocks": expand(s), "share": 0.5, "bits_per_byte": x} for s, x in losses.items()]
    network = sizes | {"blocks": own}
    content = {"network": network, "trials": trials, "trial": {"folder": "runs/one/trials/aa"}}
    content["text"] = {"passes": 1.0, "bytes": 10_000}
    search = {"method": "trials", "latency": {"source": "flops", "target": 1.0}}
    run = search_run([[1, 0, 0]] * 3, path=tmp_path, search=search)
    made = choice.tried_choice(run, content, COSTS, 1.0)
    assert made.blocks == own and made.trial == Path("runs/one/trials/aa") and made.trials == trials
    assert choice.tried_choice(run, content, replace(COSTS, unit=MILLISECONDS), 1.0).trial is None  # another budget
    other = choice.tried_choice(run, content, COSTS, 16.5 / COSTS.reference(3))
    assert other.blocks == ["attention"] and other.trial is None
    pi = other.runs[0].pi
    assert pi[0, 0] > 0.9 and (pi[1:, 2] == 1).all()  # one block fits
    assert pattern_record(other, COSTS)["confidence"][0]["pi"]["attention"] > 0.9
    assert choice.tried_choice(run, content, COSTS, 0.5).blocks == ["identity"]  # embedding and output layer
    with pytest.raises(InputError, match=r"no network is within 0.3 of the reference's cost; give at least 0.385"):
        choice.tried_choice(run, content, COSTS, 0.3)


# --- what is printed


def record_of(letters):
    made = Choice(expand(letters), 1.0, [search_run(one_hot(0, 1, 1))])
    return made, pattern_record(made, COSTS)


def test_the_table_of_trials_begins_with_the_longest_and_best():
    losses = {("a", 0.125): 2.5, ("d", 0.125): 2.4, ("ad", 0.125): 2.3, ("a", 0.25): 2.2, ("d", 0.25): 2.1}
    losses["dd", 0.25] = 2.3
    trials = [{"name": name, "share": share, "bits_per_byte": loss} for (name, share), loss in losses.items()]
    _, *rows = trials_table(trials).splitlines()
    assert [row.split() for row in rows] == [
        ["d", "2.4000", "2.1000"], ["a", "2.5000", "2.2000"], ["dd", "2.3000"], ["ad", "2.3000"]
    ]  # fmt: skip
    assert len(rows[2]) == len(rows[0]) == len(rows[3]) + 9  # a network may have no first trial


@pytest.mark.parametrize(
    ("letters", "same"), [("iad", " (the network ad, because identity does nothing)"), ("add", "")]
)
def test_the_pattern_is_shown_with_its_network_and_a_warning_without_attention(capsys, letters, same):
    print_choice(*record_of(letters), COSTS)
    shown = capsys.readouterr().out
    assert f"pattern {letters}: {', '.join(expand(letters))}{same}\n" in shown and "WARNING: the pattern" not in shown
    print_choice(*record_of("ddi"), COSTS)
    assert "WARNING: the pattern has no attention" in capsys.readouterr().out


def test_the_spread_over_runs_is_shown(capsys):
    pis = {"one": one_hot(0, 1), "two": one_hot(1, 1), "three": one_hot(1, 0)}
    runs = [search_run(pi, path=f"runs/{name}") for name, pi in pis.items()]
    made = Choice(["attention", "dense"], None, runs)
    print_choice(made, pattern_record(made, COSTS), COSTS)
    shown = capsys.readouterr().out
    assert "runs/one: ad\nruns/two: dd\nruns/three: da\n1.3 of 2 blocks differ between two of these patterns" in shown


def test_a_pattern_far_from_the_target_of_the_papers_method_causes_a_notice(capsys):
    price = {"latency": {"source": "flops", "target": 0.75}}
    for method, ratio, told in (("gumbel", 0.43, True), ("gumbel", 0.78, False), ("trials", 0.43, False)):
        run = search_run(one_hot(0), search={"method": method} | price)
        print_notices([run], run.budget, ratio)
        assert ("target is 0.75 of the reference's cost, and this" in capsys.readouterr().out) == told
    print_notices([search_run(one_hot(0), search={"method": "gumbel"} | price)], 0.5, 0.43)  # another budget is given
    assert "target is" not in capsys.readouterr().out
