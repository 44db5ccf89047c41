"""Trials: which patterns are trained from scratch, for how long, and which of them is chosen."""

from itertools import product
from types import SimpleNamespace

from nas.core.config import Config, SearchOptions, TrainOptions
from nas.costs.budget import NoPatternFits
from nas.derivation import trials
from nas.derivation.pattern_record import Choice
from tests.making import COSTS, Evaluator, one_hot, search_run


def compared(**patterns) -> dict:
    return {name: {"pattern": short, "nll": 3.0} for name, short in patterns.items()}


def make_trials(monkeypatch, losses, trained, fewer=()) -> trials.Trials:
    """Trials whose losses are given for each network; `fewer` are the paths that relearning finds, in order."""
    evaluator = Evaluator(dict.fromkeys(product(range(3), repeat=3), 3.05) | {(0, 0, 0): 3.3, (0, 0, 1): 3.2})
    evaluator.config = Config(train=TrainOptions(steps=24), search=SearchOptions(retrain_steps=8))
    evaluator.corpus, evaluator.context = SimpleNamespace(tokens=lambda split: [0] * 100), None

    def train(pattern, config, corpus, context, after_step):
        trained.append("".join(name[0] for name in pattern))
        assert (config.train.steps, config.train.epochs) == (4, None)
        for step in range(1, config.train.steps + 1):
            nll = losses[trained[-1].replace("i", "")]
            after_step(step, SimpleNamespace(valid_figures=lambda nll=nll: {"nll_per_token": nll}))

    monkeypatch.setattr(trials, "train_pattern", train)
    found = iter(fewer)

    def relearn(runs, costs, budgets, most):
        assert budgets == [1.0]
        path = next(found)
        return [Choice([0, 0, 0], *budgets, most, runs=[search_run(one_hot(*path))])]

    monkeypatch.setattr(trials, "relearn", relearn)
    return trials.Trials([search_run(one_hot(0, 0, 0))], COSTS, [evaluator], 4)


def test_trials_choose_the_best_pattern_and_train_each_network_once(monkeypatch):
    trained = []
    tried = make_trials(monkeypatch, {"ad": 2.5, "aa": 2.4, "da": 2.6}, trained)
    rules = compared(pi="adi", par="dai", other="aia", bad="iii")
    rules["bad"]["nll"] = 3.07
    choice = tried.choose(Choice([0, 1, 2], candidates=rules), 1.0)
    rules = choice.candidates
    assert choice.path == [0, 2, 0] and choice.trials == 4 and choice.chosen == "other" and not choice.from_pi
    assert trained == ["adi", "dai", "aia"] and rules["par"]["trial_nll"] == 2.6 and "trial_nll" not in rules["bad"]
    choice = tried.choose(Choice([2, 0, 1], seconds=100, candidates=compared(pi="iad")), 1.0)
    assert choice.path == [2, 0, 1] and choice.seconds >= 100 and len(trained) == 3
    assert choice.candidates["pi"]["trial_nll"] == 2.5


def test_the_best_rule_has_a_trial_however_far_behind_it_is(monkeypatch):
    trained = []
    tried = make_trials(monkeypatch, {"ad": 2.5, "da": 2.4}, trained)
    rules = compared(pi="adi", worse="iia", par="dai", same="dai")
    rules["worse"]["nll"], rules["par"]["nll"], rules["same"]["nll"] = 3.3, 3.2, 3.2
    choice = tried.choose(Choice([0, 1, 2], candidates=rules), 1.0)
    assert choice.chosen == "par" and trained == ["adi", "dai"]
    assert choice.candidates["same"]["trial_nll"] == 2.4 and "trial_nll" not in choice.candidates["worse"]


def test_the_pattern_of_pi_has_a_trial_however_far_behind_it_is(monkeypatch):
    trained = []
    tried = make_trials(monkeypatch, {"ad": 2.4, "da": 2.5}, trained)
    rules = compared(pi="adi", par="dai")
    rules["pi"]["nll"] = 3.2
    choice = tried.choose(Choice([0, 1, 2], candidates=rules), 1.0)
    assert choice.chosen == "pi" and trained == ["adi", "dai"]


def test_a_trial_counts_its_best_evaluation_as_a_retraining_does(monkeypatch):
    losses = iter([2.5, 2.4, 2.6])
    tried = make_trials(monkeypatch, {}, [])
    tried.steps, tried.evaluators[0].config.train.evaluate_every = 5, 2

    def train(pattern, config, corpus, context, after_step):
        for step in range(1, 6):
            after_step(step, SimpleNamespace(valid_figures=lambda: {"nll_per_token": next(losses)}))

    monkeypatch.setattr(trials, "train_pattern", train)
    assert tried.nll(["dense"]) == 2.4 and next(losses, None) is None  # after 2, 4 and 5 steps


def test_trials_include_the_best_patterns_with_fewer_attentions(monkeypatch):
    trained, losses = [], {"aaa": 2.6, "ada": 2.7, "add": 2.5}
    tried = make_trials(monkeypatch, losses, trained, fewer=[[0, 1, 0], [0, 1, 1]])
    choice = tried.choose(Choice([0, 0, 0], 0.7, seconds=3, candidates=compared(pi="aaa")), 1.0)
    assert list(choice.candidates) == ["pi", "attention <= 2", "attention <= 1"] and trained == ["aaa", "ada", "add"]
    assert choice.path == [0, 1, 1] and choice.budget == 0.7 and choice.attentions == 1
    assert choice.chosen == "attention <= 1" and choice.from_pi
    again = make_trials(monkeypatch, losses, [], fewer=[[0, 1, 0], [0, 1, 1]])
    assert (
        again.choose(Choice([0, 0, 0], candidates=compared(pi="aaa")), 1.0).budget == 1.0
    )  # a search without a budget


def test_fewer_attentions_are_two_thirds_and_so_on(monkeypatch):
    most_seen = []

    def relearn(runs, costs, budgets, most):
        most_seen.append(most)
        return [Choice([0] * most + [1] * (9 - most), 1.0, most)]

    tried = make_trials(monkeypatch, {}, [])
    monkeypatch.setattr(trials, "relearn", relearn)
    monkeypatch.setattr(trials, "choose_among_seeds", lambda choice, *inputs: choice)
    names = [name for name, _ in tried.with_fewer_attentions(Choice([0] * 9), 1.0)]
    assert most_seen == [6, 4, 2, 1] and names == [f"attention <= {most}" for most in most_seen]


def test_fewer_attentions_end_with_the_first_pattern_that_is_not_promising(monkeypatch):
    trained = []
    tried = make_trials(monkeypatch, {"aaa": 2.6}, trained, fewer=[[0, 0, 1]])
    choice = tried.choose(Choice([0, 0, 0], candidates=compared(pi="aaa")), 1.0)
    assert choice.path == [0, 0, 0]
    assert choice.candidates["attention <= 2"] == {"pattern": "aad", "nll": 3.2} and trained == ["aaa"]


def test_patterns_with_fewer_attentions_beyond_the_budget_have_no_trial(monkeypatch):
    def refuse(*inputs):
        raise NoPatternFits("no pattern fits")

    tried = make_trials(monkeypatch, {"aaa": 2.6}, [])
    monkeypatch.setattr(trials, "relearn", refuse)
    assert tried.choose(Choice([0, 0, 0], candidates=compared(pi="aaa")), 1.0).path == [0, 0, 0]


def test_trials_have_half_of_the_steps_and_warn_if_they_have_fewer(monkeypatch, capsys):
    parts = make_trials(monkeypatch, {}, [])
    for given, steps, warned in ((None, 4, False), (4, 4, False), (3, 3, True)):
        assert trials.Trials(parts.runs, COSTS, parts.evaluators, given).steps == steps
        assert ("WARNING: these trials are too short" in capsys.readouterr().out) == warned
