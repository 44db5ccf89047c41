"""Derivation by perturbation: the operation whose removal hurts the SuperNet's loss most."""

import numpy as np
import pytest
import torch
from nas.derivation.perturbation import losses_without, perturb
from nas.derivation.supernet_evaluator import PARTS, SuperNetEvaluator

from nas.core.errors import InputError
from nas.core.provenance import data_digests
from nas.core.run_folder import open_run
from nas.derivation import perturbation
from nas.training.evaluation import total_nll
from nas.training.trainer import Trainer
from tests.making import make_search


@pytest.fixture(params=["hard", "soft"])
def searched(request, small_config, tmp_path):
    config = small_config(f"search.sampling={request.param}")
    run, phase = open_run(tmp_path / "run", config, "search", False), make_search(config)
    run.start(config, data_digests(phase.corpus.meta))
    with torch.no_grad():
        phase.supernet.logits.copy_(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))
    Trainer(phase, run).fit()
    return run.path, phase


def test_the_probability_of_a_removed_operation_goes_to_the_others(searched):
    path, phase = searched
    evaluator = SuperNetEvaluator(path)
    assert torch.equal(evaluator.supernet.logits, phase.supernet.logits)
    seen = []
    evaluator.nll = lambda pi: seen.append(pi) or np.array([len(seen), 10.0 * len(seen)])
    pi = phase.supernet.pi()
    assert losses_without(evaluator, pi, 1).tolist() == [[1, 2, 3], [10, 20, 30]]
    for operation, without in enumerate(seen):
        others = [i for i in range(3) if i != operation]
        torch.testing.assert_close(without[1, others], pi[1, others] / pi[1, others].sum())
        assert without[1, operation] == 0 and torch.equal(without[[0, 2]], pi[[0, 2]])


def test_the_others_share_equally_if_the_removed_operation_had_all_probability(searched):
    evaluator, seen = SuperNetEvaluator(searched[0]), []
    evaluator.nll = lambda pi: seen.append(pi) or np.zeros(1)
    losses_without(evaluator, torch.tensor([[1.0, 0.0, 0.0]] * 3), 0)
    assert seen[0][0].tolist() == pytest.approx([0.0, 0.5, 0.5]) and seen[1][0].tolist() == pytest.approx([1.0, 0, 0])


def parts_of(text):
    size = (len(text) - 1) // PARTS
    starts = [part * (len(text) - 1 - size) // (PARTS - 1) for part in range(PARTS)]
    return [text[start : start + size + 1] for start in starts]


def test_the_loss_under_one_hot_pi_is_that_of_the_path(searched):
    path, phase = searched
    evaluator = SuperNetEvaluator(path)
    phase.supernet.set_path([0, 1, 2])
    for found, text in zip(evaluator.nll(torch.eye(3)), parts_of(phase.corpus.tokens("valid")), strict=True):
        total, counted = total_nll(phase.supernet, text, 16, 8, 8, 3)
        assert found == pytest.approx(total / counted, rel=1e-5)


def test_losses_mix_or_sample_by_pi_with_the_same_noise_in_each_call(searched):
    path, phase = searched
    evaluator, pi = SuperNetEvaluator(path), torch.full((3, 3), 1 / 3)
    assert (evaluator.nll(pi) == evaluator.nll(pi)).all()
    phase.supernet.set_mixture(pi)
    mixed = [total_nll(phase.supernet, text, 4, 8, 8, 3) for text in parts_of(phase.corpus.tokens("valid"))]
    same = evaluator.nll(pi) == pytest.approx([total / counted for total, counted in mixed], rel=1e-6)
    assert same == (evaluator.config.search.sampling == "soft")


def test_the_choice_has_the_highest_loss_and_decided_blocks_run_only_it(searched, monkeypatch):
    path, _ = searched
    losses = {0: [3.0, 1.0, 2.0], 1: [1.0, 1.5, 1.2], 2: [0.1, 0.2, 0.3]}
    seen = []

    def losses_without(self, pi, block):
        seen.append((block, pi.clone()))
        return np.array([losses[block]])

    monkeypatch.setattr(perturbation, "losses_without", losses_without)
    chosen, means = perturb([path])
    assert chosen == [0, 1, 2] and [mean.tolist() for mean in means] == [[losses[0]], [losses[1]], [losses[2]]]
    decided = []
    for block, pi in seen:
        for other in range(3):
            certain = sorted(pi[other].tolist()) == [0, 0, 1]
            assert certain == (other in decided)
        decided.append(block)
    assert sorted(decided) == [0, 1, 2]


def test_losses_of_several_runs_are_averaged(searched, monkeypatch):
    path, _ = searched
    answers = iter([[3.0, 1.0, 0.0], [0.0, 4.0, 0.0]] * 3)
    monkeypatch.setattr(perturbation, "losses_without", lambda *_: np.array([next(answers)]))
    chosen, losses = perturb([path, path])
    assert chosen == [1, 1, 1] and losses[0].tolist() == [[3.0, 1.0, 0.0], [0.0, 4.0, 0.0]]


def test_a_run_without_checkpoint_is_reported(searched):
    path, _ = searched
    (path / "checkpoint.pt").unlink()
    with pytest.raises(InputError, match=r"holds no checkpoint\.pt with the SuperNet's weights"):
        perturb([path])
