"""The choice of a pattern: candidates, their judges, and what is printed about them."""

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nas.core.errors import InputError
from nas.core.files import write_yaml
from nas.core.pattern import expand, network
from nas.costs.cost_table import MILLISECONDS, CostTable
from nas.derivation import choice
from nas.derivation.pattern_record import Candidate, Choice, pattern_record
from nas.derivation.printing import candidates_table, print_choice, print_notices, trials_table
from nas.derivation.runs import check_seeds
from tests.making import COSTS, NAMES, make_weights, one_hot, search_run


def drawn(*paths, steps=10):
    """Lines of paths.jsonl; the last fifth of the steps draws the given paths."""
    early = [{"step": step, "paths": [[2] * len(paths[0])], "nll": [1.0]} for step in range(1, steps - 1)]
    return [*early, *({"step": step, "paths": paths, "nll": [1.0]} for step in (steps - 1, steps))]


@pytest.fixture
def judged(monkeypatch):
    """judged(losses) lets shared weights judge paths: {pattern: nll}, 9.0 for others."""

    def judge(losses, *runs):
        table = {tuple(NAMES.index(name) for name in expand(short)): nll for short, nll in losses.items()}
        weights = SimpleNamespace(nll=lambda path: table.get(tuple(path), 9.0))
        monkeypatch.setattr(choice, "load_shared_weights", lambda run: weights)

    return judge


def by_pattern(candidates):
    return {candidate.pattern: candidate.names for candidate in candidates}


def test_candidates_are_pi_its_seeds_its_runners_up_and_rules_each_network_once():
    seeds = one_hot(0, 0, 1), one_hot(1, 0, 1)
    evaluated = drawn([0, 0, 1], [0, 1, 2], [2, 0, 1], [1, 1, 1]) * 2
    run = replace(search_run(*seeds, search={"logits_steps": 10}), evaluated=evaluated)
    found = by_pattern(choice.find_candidates([run], COSTS, 9.0))
    assert found["aad"] == ["pi", "seed of pi", "runner-up of pi"] and found["dad"] == ["seed of pi"]
    assert found["adi"] == ["runner-up of pi"] and found["ddd"] == ["runner-up of pi"]
    assert found["ada"] == ["interleaved", "sandwich"] and found["add"] == ["par", "one attention"]
    assert len(found) == len({network(expand(short)) for short in found}) == 6 and "iii" not in found
    within = choice.find_candidates([run], COSTS, 0.8)  # rules are shortened
    (adi,) = [one for one in within if network(expand(one.pattern)) == "ad"]
    assert {"pi", "runner-up of pi", "interleaved", "sandwich", "par", "one attention"} <= {*adi.names}
    without = choice.find_candidates([search_run(one_hot(2, 2, 1))], COSTS, None)  # rules cost at most as much as pi
    assert by_pattern(without) == {"iid": ["pi"]}


def test_runners_up_are_the_most_frequent_paths_within_the_budget():
    rare, often = [[0, 0, 2], [0, 1, 2], [1, 1, 2]], [list(path) for path in product(range(2), repeat=3)]
    run = replace(search_run(one_hot(2, 2, 1), search={"logits_steps": 10}), evaluated=drawn(*rare, *often, *often))
    found = by_pattern(choice.find_candidates([run], COSTS, None))
    assert {short for short, names in found.items() if "runner-up of pi" in names} == {
        "".join("ad"[index] for index in path) for path in often
    }
    within = choice.find_candidates([run], COSTS, 0.8)  # pi was learned within another budget, or with other costs
    assert max(COSTS.ratio(expand(one.pattern)) for one in within) <= 0.8


def test_the_weights_of_all_runs_judge(monkeypatch):
    runs = [search_run(one_hot(0, 1, 1), one_hot(1, 0, 1), path=path) for path in ("one", "two")]
    losses = {"one": {(0, 1, 1): 2.0, (1, 0, 1): 3.0}, "two": {(0, 1, 1): 4.5, (1, 0, 1): 3.0}}
    judges = {name: SimpleNamespace(nll=lambda path, of=of: of.get(tuple(path), 9.0)) for name, of in losses.items()}
    monkeypatch.setattr(choice, "load_shared_weights", lambda run: judges[str(run)])
    made = choice.choose_pattern(runs, COSTS, None)
    assert made.blocks == expand("dad") and made.candidates[0].nll == 3.0


def test_the_best_by_shared_weights_is_chosen_and_rules_may_win(judged):
    run = search_run(one_hot(0, 1, 1), one_hot(1, 0, 1))
    for losses, best in (({"add": 2.0, "dad": 3.0}, "add"), ({"add": 3.0, "dad": 2.0}, "dad"), ({"ada": 1.0}, "ada")):
        judged(losses)
        made = choice.choose_pattern([run], COSTS, None)
        assert made.blocks == expand(best) and made.candidates[0].nll == min(losses.values())
        assert made.trial is None and made.runs == [run]


def test_pi_is_learned_anew_for_another_budget_or_another_unit():
    own = {"search": {"latency": {"source": "flops", "target": 0.6}}}
    run, measured = search_run(one_hot(0), **own), CostTable(MILLISECONDS, 1.0, COSTS.blocks)
    assert not choice.needs_learning([run], COSTS, 0.6) and not choice.needs_learning(
        [search_run(one_hot(0))], measured, None
    )
    assert choice.needs_learning([run], measured, 0.6) and choice.needs_learning([run], COSTS, 0.5)


def test_pi_of_another_budget_is_learned_within_it(small_config, monkeypatch):
    made = make_weights(small_config("search.latency.source=flops", "search.latency.target=0.9"))
    monkeypatch.setattr(choice, "load_shared_weights", lambda run: made)
    run = search_run(one_hot(0, 0, 0))
    learned = choice.learn_anew(run, COSTS, 0.7)
    paths = [path for line in learned.evaluated for path in line["paths"]]
    assert max(COSTS.ratio([NAMES[i] for i in path]) for path in paths) <= 0.7
    assert learned.seed_pi.shape == (1, 3, 3) and not np.allclose(learned.seed_pi, run.seed_pi)


def test_trials_give_their_network_or_the_best_of_its_sizes_within_another_budget(tmp_path, small_config):
    """Attention is better than dense in the trials, and costs 6 instead of 4, beside an overhead of 10."""
    config = small_config("search.method=trials", "search.operations=[attention,dense,identity]", "model.blocks=3")
    write_yaml(tmp_path / "config.yaml", asdict(config))
    sizes, own = {"vocab_size": 50, "d_model": 16}, ["attention", "attention"]
    losses = {"aa": 2.0, "ad": 2.1, "dd": 2.4, "a": 2.2, "d": 2.5}
    trials = [sizes | {"name": s, "blocks": expand(s), "share": 0.5, "bits_per_byte": x} for s, x in losses.items()]
    network = sizes | {"blocks": own}
    content = {"network": network, "trials": trials, "trial": {"folder": "runs/one/trials/aa"}}
    search = {"method": "trials", "latency": {"source": "flops", "target": 1.0}}
    run = search_run([[1, 0, 0]] * 3, path=tmp_path, search=search)
    made = choice.tried_choice(run, content, COSTS, 1.0)
    assert made.blocks == own and made.trial == Path("runs/one/trials/aa") and made.trials == trials
    other = choice.tried_choice(run, content, COSTS, 16.5 / COSTS.reference(3))
    assert other.blocks == ["attention"] and other.trial is None
    (pi,) = other.runs[0].seed_pi
    assert pi[0, 0] > 0.9 and (pi[1:, 2] == 1).all()  # one block fits
    assert pattern_record(other, COSTS)["confidence"][0]["pi"]["attention"] > 0.9
    with pytest.raises(InputError, match=r"no network is within 0.5 of the reference's cost; give at least 0.539"):
        choice.tried_choice(run, content, COSTS, 0.5)


# --- what is printed


def record_of(*candidates, **more):
    made = Choice(expand(candidates[0].pattern), 1.0, [search_run(one_hot(0, 1, 1))], list(candidates), **more)
    return made, pattern_record(made, COSTS)


def test_the_table_of_candidates_has_a_line_each_and_names_what_wins():
    pi, par = Candidate(["pi"], "aid", 3.35), Candidate(["par", "sandwich"], "add", 3.25)
    table = candidates_table(record_of(par, pi)[1]["derived_from"])
    _, first, second, notice = table.splitlines()
    assert first.split() == ["add", "3.2500", "par;", "sandwich"] and second.split() == ["aid", "3.3500", "pi"]
    assert notice == "NOTICE: 'par' is derived: it is 0.1000 ahead of pi's pattern"
    assert "NOTICE" not in candidates_table(record_of(pi, par)[1]["derived_from"])


def test_the_table_of_trials_begins_with_the_longest_and_best():
    losses = {("a", 0.125): 2.5, ("d", 0.125): 2.4, ("ad", 0.125): 2.3, ("a", 0.25): 2.2, ("d", 0.25): 2.1}
    trials = [{"name": name, "share": share, "bits_per_byte": loss} for (name, share), loss in losses.items()]
    _, *rows = trials_table(trials).splitlines()
    assert [row.split() for row in rows] == [["d", "2.4000", "2.1000"], ["a", "2.5000", "2.2000"], ["ad", "2.3000"]]


@pytest.mark.parametrize(
    ("letters", "same"), [("iad", " (the network ad, because identity does nothing)"), ("add", "")]
)
def test_the_pattern_is_shown_with_its_network_and_a_warning_without_attention(capsys, letters, same):
    print_choice(*record_of(Candidate(["pi"], letters, 3.0)), COSTS)
    shown = capsys.readouterr().out
    assert f"pattern {letters}: {', '.join(expand(letters))}{same}\n" in shown and "WARNING: the pattern" not in shown
    print_choice(*record_of(Candidate(["pi"], "ddi", 3.0)), COSTS)
    assert "WARNING: the pattern has no attention" in capsys.readouterr().out


def test_the_spread_over_seeds_and_runs_is_shown(capsys):
    runs = [search_run(one_hot(0, 1), one_hot(1, 1)), search_run(one_hot(1, 0), path="runs/two")]
    made = Choice(["attention", "dense"], None, runs)
    print_choice(made, pattern_record(made, COSTS), COSTS)
    shown = capsys.readouterr().out
    assert "runs/one: ad, dd\nruns/two: da\n1.3 of 2 blocks differ between two of these patterns" in shown


def test_a_pattern_far_from_the_target_of_the_papers_method_causes_a_notice(capsys):
    price = {"latency": {"source": "flops", "target": 0.75}}
    for method, ratio, told in (("gumbel", 0.43, True), ("gumbel", 0.78, False), ("single_path", 0.43, False)):
        run = search_run(one_hot(0), search={"method": method} | price)
        print_notices([run], run.budget, ratio)
        assert ("target is 0.75 of the reference's cost, and this" in capsys.readouterr().out) == told
    print_notices([search_run(one_hot(0), search={"method": "gumbel"} | price)], 0.5, 0.43)  # another budget is given
    assert "target is" not in capsys.readouterr().out


def test_runs_with_the_same_weights_show_the_spread_of_pi_alone(tmp_path):
    runs = []
    for name, origin in (("first", None), ("second", str(tmp_path / "first"))):
        content = {"search": {"method": "single_path", "weights_from": origin}, "seed": len(runs) + 1}
        (tmp_path / name).mkdir()
        write_yaml(tmp_path / name / "config.yaml", content)
        runs.append(search_run(one_hot(0, 1), path=tmp_path / name, **content))
    assert any("so it shows the spread of pi alone" in notice for notice in check_seeds(runs))
    assert not runs[1].judges_patterns
    (tmp_path / "first/checkpoint.pt").touch()
    assert all(run.judges_patterns for run in runs)
