"""The mean of the weights over the last steps."""

from dataclasses import replace

import pytest
import torch

from nas.core.config import Config
from nas.core.run_folder import RunFolder
from nas.mixture.mixture import open_mixture
from nas.training.device import choose_runtime
from nas.training.evaluation import read_text
from nas.training.optimizer import TailAverage
from nas.training.passes import judged_text
from tests.making import make_retraining
from tests.training import Training

PATTERN = ["attention", "dense"]
AVERAGE = ["train.steps=12", "train.average_share=0.34", "model.dropout=0.2"]  # of steps 8 to 12


def weights_of(phase) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in phase.train_weights.optimizer.parameters]


def valid_nll(phase) -> float:
    return phase.metrics(phase.train_weights.average)["nll"]


def assert_mean(found, kept: list[list[torch.Tensor]]) -> None:
    for own, *samples in zip(found, *kept, strict=True):
        torch.testing.assert_close(own, torch.stack(samples).mean(dim=0), rtol=1e-5, atol=1e-7)


def test_the_mean_is_that_of_the_last_steps_in_float64():
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for share, first in ((0.3, 8), (1.0, 1), (0.05, 11)):  # 0.05 of 10 steps is no whole step
        average, kept = TailAverage([parameter], share, 10), []
        for step in range(1, 11):
            parameter.data = torch.randn(3, dtype=torch.float64)
            average.update(step)
            kept += [parameter.detach().clone()] if step >= first else []
        last = parameter.detach().clone()
        with average.in_use():
            torch.testing.assert_close(parameter.detach(), torch.stack(kept).mean(dim=0) if kept else last)
        assert torch.equal(parameter, last)


@pytest.mark.parametrize("short_share", [0, 0.85])
def test_a_training_ends_with_the_mean_and_does_not_change_before(small_config, tmp_path, short_share):
    more = [*AVERAGE, f"train.short_share={short_share}"]
    plain = make_retraining(small_config(*more, "train.average_share=0"), PATTERN)
    averaged = make_retraining(small_config(*more), PATTERN)
    run = RunFolder(tmp_path, Config(), "retrain")
    kept = []
    for step in range(1, 13):
        nlls = []
        for phase in (plain, averaged):
            torch.manual_seed(step)  # of the dropout
            nlls.append(phase.step(step)[0])
        assert torch.equal(*nlls)
        kept += [weights_of(plain)] if step >= 8 else []
        if step == 10:
            before = weights_of(averaged)
            averaged.evaluate(run, step)
            assert all(map(torch.equal, before, weights_of(averaged)))
            best = torch.load(tmp_path / "best.pt", weights_only=True)["model"]
            assert_mean([best[name] for name, _ in averaged.model.named_parameters()], kept)
    averaged.end()
    assert_mean(weights_of(averaged), kept)


def test_a_trial_is_judged_by_the_mean_of_its_last_half_and_goes_on_as_if_there_was_none(small_config):
    config, kept = small_config(*AVERAGE), []

    def continued(phase, until):
        other = make_retraining(config, PATTERN, until=until)
        other.load_state_dict(phase.state_dict())
        return other

    plain, trial = make_retraining(config, PATTERN), make_retraining(config, PATTERN, until=6)
    for step in range(1, 10):
        for phase in (plain, trial):
            torch.manual_seed(step)  # of the dropout
            phase.step(step)
        kept += [weights_of(trial)] if 4 <= step <= 6 else []
        trial = continued(trial, 6 if step < 6 else None) if step in (5, 7) else trial
        if step == 6:
            with trial.trial_average.in_use():
                assert_mean(weights_of(trial), kept)
            assert trial.trial_metrics()["network"]["valid"]["nll"] != valid_nll(plain)
            longer = continued(trial, 8)
            assert longer.trial_average.count == 0  # the mean of a shorter trial is not part of it
        assert valid_nll(trial) == valid_nll(plain)


def test_a_trial_is_judged_at_the_lengths_that_its_steps_have_read(small_config):
    cases = (6, 0.5, 8, (4, 4)), (6, 0.5, 2, (4, 2)), (7, 0.5, 8, (8, 8)), (6, 0, 8, (8, 8))
    for until, share, memory, lengths in cases:
        config = small_config(*AVERAGE, "train.segment=8", f"train.memory={memory}", f"train.short_share={share}")
        phase = make_retraining(config, PATTERN, until=until)
        for step in range(1, until + 1):
            phase.step(step)
        found, own = phase.trial_metrics()["network"]["valid"]["nll"], phase.metrics(phase.trial_average)["nll"]
        phase.config = replace(config, evaluate=replace(config.evaluate, segment=lengths[0], memory=lengths[1]))
        assert found == pytest.approx(phase.metrics(phase.trial_average)["nll"], rel=1e-6)
        assert (found == pytest.approx(own, rel=1e-6)) == (lengths == (8, memory))


def test_a_trial_is_judged_by_the_mixture_of_its_mean(small_config, monkeypatch):
    monkeypatch.setattr("nas.retraining.phase.GATE_TOKENS", most := 50)
    phase = make_retraining(
        small_config("mixture.states=50", "mixture.cache=[1,2]", "mixture.counts=2"), PATTERN, until=3
    )
    for step in range(1, 4):
        phase.step(step)
    found, (tokens, _) = phase.trial_metrics(), judged_text(phase.config, phase.corpus)
    with phase.trial_average.in_use():
        nll, hidden = read_text(phase.config, phase.model, tokens, phase.runtime)
    mixture = open_mixture(phase.config.beside, phase.corpus, phase.model.d_model)
    total, others = (mixture.fit(tokens, nll, hidden, count).sum() for count in (most, 100_000))
    assert found["network"]["valid"]["nll"] == pytest.approx(nll.sum())
    assert found["valid"]["nll"] == pytest.approx(total) and others != total < 0.99 * nll.sum()


def test_training_without_a_run_folder_ends_with_the_mean(small_config):
    config, kept, corpus = small_config(*AVERAGE), [], make_retraining(small_config(), PATTERN).corpus

    def keep(step, phase):
        if step >= 8:
            kept.append(weights_of(phase))

    training = Training(PATTERN, config, corpus, choose_runtime(config.train), keep)
    training.end()
    assert_mean([parameter.detach() for parameter in training.model.parameters()], kept)
