"""The choice of a pattern, and what is printed about it."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import expand
from nas.costs.cost_table import MILLISECONDS
from nas.derivation import selection as choice
from nas.derivation.printing import print_choice, print_notices, trials_table
from nas.derivation.runs import Choice, pattern_record
from tests.making import COSTS, one_hot, search_run


def test_trials_give_their_network_or_the_best_of_its_sizes_within_another_budget(tmp_path, small_config):
    """Attention is better than dense in the trials, and costs 6 instead of 4, beside an overhead of 10."""
    config = small_config("search.method=trials", "search.operations=[attention,dense,identity]", "model.blocks=3")
    write_yaml(tmp_path / "config.yaml", asdict(config))
    sizes, own = {"vocab_size": 50, "d_model": 16}, ["attention", "attention"]
    losses = {"aa": 2.0, "ad": 2.1, "dd": 2.4, "a": 2.2, "d": 2.5}
    trials = [sizes | {"name": s, "blocks": expand(s), "share": 0.5, "bits_per_byte": x} for s, x in losses.items()]
    network = sizes | {"blocks": own}
    content = {"network": network, "trials": trials, "trial": {"folder": "runs/one/trials/aa"}}
    content["surrogate"] = {"mean_log_sizes": [3.9, 2.8, 1], "text": {"passes": 1.0, "bytes": 10_000}}
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
    with pytest.raises(InputError, match=r"no network is within 0.5 of the reference's cost; give at least 0.539"):
        choice.tried_choice(run, content, COSTS, 0.5)


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
