import numpy as np
import pytest
import torch

from nas.core.errors import InputError
from nas.search import estimators
from nas.training.evaluation import total_nll
from tests.making import assert_same_state, make_search


@pytest.mark.parametrize("more", [[], ["search.sampling=soft"], ["search.estimator=straight_through"]])
def test_a_heldout_step_changes_only_the_weights_or_only_the_logits(small_config, more):
    no_identity = "search.operations=[attention,dense]"  # because a straight-through gate of identity has no gradient
    schedule = ["search.split=heldout", "search.warmup_steps=2", "search.arch_fraction=0.25"]
    config = small_config(*schedule, no_identity, *more)
    phase = make_search(config)
    for step in range(1, 13):
        weights = [p.clone() for p in phase.supernet.backbone.parameters()]
        logits = phase.supernet.logits.clone()
        phase.step(step)
        is_logits_step = step > 2 and step % 4 == 0
        moved = any(not torch.equal(a, b) for a, b in zip(weights, phase.supernet.backbone.parameters(), strict=True))
        assert moved != is_logits_step
        assert torch.equal(logits, phase.supernet.logits) != is_logits_step


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.25, 0.3, 0.4, 0.5])
def test_the_logits_get_their_share_of_the_steps(small_config, fraction):
    phase = make_search(small_config("search.warmup_steps=0", f"search.arch_fraction={fraction}", "train.steps=1000"))
    assert sum(phase.schedule.logits_learn(step) for step in range(1, 1001)) == pytest.approx(1000 * fraction, abs=1)


def test_the_training_curve_has_only_training_text(small_config):
    phase = make_search(small_config("search.warmup_steps=0", "search.arch_fraction=0.5"))
    assert phase.step(1)[0] is not None and "heldout_nll" not in phase.scalars(1)
    assert phase.step(2) == (None, 32) and phase.scalars(2)["heldout_nll"] > 0


def test_heldout_text_is_contiguous_and_unseen_by_the_weights(small_config):
    phase = make_search(small_config("search.arch_fraction=0.2"))
    tokens = phase.corpus.tokens("train")
    border = round(0.8 * len(tokens))
    np.testing.assert_array_equal(phase.stream.loader.rows.flatten(), tokens[: phase.stream.loader.rows.size])
    assert phase.stream.loader.rows.size <= border
    held = phase.heldout_stream.loader.rows.flatten()
    np.testing.assert_array_equal(held, tokens[border : border + held.size])


@pytest.mark.parametrize("more", [[], ["search.sampling=soft"], ["search.estimator=straight_through"]])
def test_shared_batches_train_weights_and_logits_after_the_warm_up(small_config, more):
    phase = make_search(small_config("search.split=shared", "search.warmup_steps=2", *more))
    for step in range(1, 6):
        weights, logits = phase.supernet.backbone.embedding.weight.clone(), phase.supernet.logits.clone()
        phase.step(step)
        assert not torch.equal(weights, phase.supernet.backbone.embedding.weight)
        assert torch.equal(logits, phase.supernet.logits) == (step <= 2)


def test_paths_are_evaluated_on_one_batch_without_dropout(small_config):
    phase = make_search(small_config("model.dropout=0.5", "search.warmup_steps=0", "search.paths=2"))
    batch = phase.heldout_stream.next()
    again = []
    for _ in range(2):
        phase.generator.manual_seed(3)
        phase.estimator.estimate(batch)
        again.append(phase.supernet.logits.grad.clone())
    assert torch.equal(*again)


def test_temperature_starts_after_the_warm_up_and_ends_exactly(small_config):
    phase = make_search(small_config("search.temperature.start=2.0", "search.temperature.end=0.3"))
    assert [phase.annealed_temperature(step) for step in (1, 6)] == [2.0, 2.0]
    assert 0.3 < phase.annealed_temperature(7) < 2.0
    assert phase.annealed_temperature(24) == 0.3


def test_evaluation_follows_the_likeliest_path_without_noise(small_config, tmp_path):
    phase = make_search(small_config())
    with torch.no_grad():
        phase.supernet.logits[:, 1] += 1
    first, second = phase.evaluate(None, 0), phase.evaluate(None, 0)
    assert first == second
    assert [block.choice for block in phase.supernet.backbone.blocks] == [([1], None)] * 3


def visits(phase, steps) -> np.ndarray:
    """How often the weights trained with each operation of each block [N, O]."""
    counts = np.zeros((3, 3), dtype=int)
    for step in range(1, steps + 1):
        phase.draw_for_weights(step)
        for index, block in enumerate(phase.supernet.backbone.blocks):
            counts[index, block.choice[0][0]] += 1
    return counts


def test_a_fair_warm_up_trains_every_operation_of_every_block_equally_often(small_config):
    phase = make_search(small_config("search.warmup_steps=21", "train.steps=90"))
    for seen in (3, 6, 21):
        phase.sampler.fair_queue = []
        assert (visits(phase, seen) == seen // 3).all()
    unfair = small_config("search.warmup_steps=21", "train.steps=90", "search.fair_warmup=false")
    assert not (visits(make_search(unfair), 21) == 7).all()


@pytest.mark.parametrize("sampling", ["hard", "soft"])
def test_weights_follow_pi_after_the_warm_up(small_config, sampling):
    options = [f"search.sampling={sampling}", "search.warmup_steps=3", "search.temperature.end=1.0"]
    phase = make_search(small_config(*options, "train.steps=90"))
    phase.supernet.logits.data[:, 0] = 20.0
    if sampling == "hard":
        assert (visits(phase, 30)[:, 0] >= 27).all()  # 3 in the warm-up, then only attention
    else:
        assert (shares(phase, 1000)[:, 0] > 0.99).all()


def shares(phase, draws) -> np.ndarray:
    """Mean weight of each operation of each block over draws after the warm-up [N, O]."""
    total = np.zeros((3, 3))
    for _ in range(draws):
        phase.draw_for_weights(10)
        total += [block.choice[1].tolist() for block in phase.supernet.backbone.blocks]
    return total / draws


def test_fair_paths_are_drawn_block_by_block(small_config):
    phase = make_search(small_config("train.steps=2000", "search.warmup_steps=900"))
    seen = set()
    for step in range(1, 900):
        phase.draw_for_weights(step)
        seen.add(tuple(block.choice[0][0] for block in phase.supernet.backbone.blocks))
    assert len(seen) == 27


def test_search_stops_early_once_the_pattern_is_stable(small_config):
    phase = make_search(small_config("search.stable_share=0.5", "search.stable_steps=5"))
    phase.convergence.changed_at = [0, 3, 11]
    assert phase.finished(14) is None  # steps before the first logits step, step 10, do not count
    assert "2 of 3 blocks kept their choice for 5 steps" in phase.finished(15)
    phase.convergence.changed_at = [0, 11, 12]
    assert phase.finished(15) is None


def test_doubtful_outcomes_cause_warnings(small_config):
    phase = make_search(small_config())
    with torch.no_grad():
        phase.supernet.logits.copy_(torch.tensor([[0.0, 0, 4], [0, 0, 4], [0, 0.05, 0]]))
    phase.convergence.path, phase.convergence.changed_at = [2, 2, 1], [0, 100, 0]
    text = " ".join(phase.convergence.warnings(100, 0, phase.supernet.pi()))
    assert "2 of 3 blocks choose identity" in text
    assert "block 3 is UNDECIDED: dense leads attention by only 0.0" in text and "block 1" not in text
    assert "not settled: block 2 changed in the last 10% of the logits' steps" in text


def test_the_thresholds_of_warnings_are_options(small_config):
    limits = ["search.warnings.identity_share=0.7", "search.warnings.margin=0.01", "search.warnings.late_share=0"]
    phase = make_search(small_config(*limits))
    with torch.no_grad():
        phase.supernet.logits.copy_(torch.tensor([[0.0, 0, 4], [0, 0, 4], [0, 0.05, 0]]))
    phase.convergence.changed_at = [0, 100, 0]
    assert phase.convergence.warnings(100, 0, phase.supernet.pi()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.warmup_steps=24", "search.warmup_steps=24 leaves no step of 24 to train the logits"),
        ("search.warmup_steps=20", "search.warmup_steps=20 leaves no step of 24 to train the logits"),
        ("train.batch_size=3000", "too short for train.batch_size=3000"),
        ("search.arch_fraction=0.001", "held-out training .search.arch_fraction. stream has"),
        ("model.cutoffs=[5,4000]", "must stay below the vocabulary size"),
    ],
)
def test_options_that_do_not_fit_the_data_are_reported(small_config, override, message):
    with pytest.raises(InputError, match=message):
        make_search(small_config(override))


def test_an_empty_validation_split_is_reported(small_config, memory_corpus):
    with pytest.raises(InputError, match="the valid split has 1 tokens"):
        make_search(small_config(), memory_corpus(10, np.zeros(5000, dtype=int), np.array([1])))


def test_rows_of_both_streams_begin_with_an_image(small_config, memory_corpus):
    """101 images give four rows in each stream. The held-out text also begins with a whole image."""
    images, grid = np.arange(30 * 101) % 250, ["data.tokenizer=bytes", "model.grid=[2,5,3]"]
    phase = make_search(small_config(*grid, "search.arch_fraction=0.3"), memory_corpus(256, images, images[:60]))
    assert phase.stream.loader.rows.shape == (4, 17 * 30) and phase.heldout_stream.loader.rows.shape == (4, 7 * 30)
    assert (
        phase.stream.loader.rows[1, 0] == images[17 * 30] and phase.heldout_stream.loader.rows[0, 0] == images[70 * 30]
    )


def test_the_search_is_evaluated_on_valid(small_config):
    phase = make_search(small_config())
    figures = phase.evaluate(None, 0)
    expected, _ = total_nll(phase.supernet, phase.corpus.tokens("valid"), 5, 8, 8, 3)  # the warm-up covers all blocks
    assert figures["nll"] == pytest.approx(expected, rel=1e-6)


def test_logits_learn_on_heldout_text_with_its_own_memories_and_no_dropout(small_config):
    """Checks the stream, the mode and the memories of every batch that the SuperNet reads."""
    for more in ([], ["search.sampling=soft"], ["search.estimator=straight_through"]):
        phase = make_search(small_config("search.warmup_steps=0", "search.arch_fraction=0.5", "search.paths=2", *more))
        left = {"train": [], "heldout": []}  # memories of each stream after each of its steps
        for step in range(1, 9):
            kind = "heldout" if step % 2 == 0 else "train"
            stream = phase.heldout_stream if kind == "heldout" else phase.stream
            start = stream.loader.position * 8
            seen = []

            def note(model, inputs, seen=seen):
                seen.append((inputs, model.training))

            hook = phase.supernet.backbone.register_forward_pre_hook(note)
            phase.step(step)
            hook.remove()
            for (tokens, _, memories, length), training in seen:
                np.testing.assert_array_equal(tokens, stream.loader.rows[:, start : start + 8])
                assert training == (kind == "train") and length == 8
                assert memories is (left[kind][-1] if left[kind] else None)
            left[kind].append(stream.memories)
            assert stream.memories.blocks[0].shape == (4, 8, 16)


def test_weights_train_with_dropout_on_the_batch_that_evaluates_paths_without_it(small_config):
    phase = make_search(small_config("search.split=shared", "search.warmup_steps=0"))
    modes = []
    phase.supernet.backbone.register_forward_pre_hook(lambda model, inputs: modes.append(model.training))
    phase.step(1)
    assert modes[-1] and not any(modes[:-1])


def test_the_memories_of_the_first_path_are_kept(small_config):
    phase = make_search(small_config("search.warmup_steps=0", "search.paths=3"))
    phase.paths.sample = lambda *inputs: [(0, 1, 2), (2, 2, 1), (1, 1, 1)]
    ran = []
    hook = phase.supernet.register_forward_hook(lambda model, inputs, output: ran.append(output[1]))
    _, memories = phase.estimator.estimate(phase.heldout_stream.next())
    hook.remove()
    assert len(ran) == 3 and memories is ran[0]


def test_the_relaxed_samples_use_the_temperature(small_config):
    for more in (["search.sampling=soft"], ["search.estimator=straight_through"]):
        weights = []
        for temperature in (5.0, 0.05):
            phase = make_search(small_config(*more))
            phase.estimator.temperature = temperature
            sample, _ = phase.estimator.draw()
            value = phase.supernet.backbone.blocks[0].choice[1][0]
            (gradient,) = torch.autograd.grad(sample.flatten()[0], phase.supernet.logits)
            assert value == sample.flatten()[0] and value.requires_grad
            weights.append((value.item(), gradient.abs().max().item()))
        assert weights[0] != weights[1]


def test_the_state_of_a_search_is_complete(small_config):
    phase = make_search(small_config("search.warmup_steps=0"))
    for step in range(1, 8):
        phase.step(step)
    phase.convergence.path, phase.convergence.changed_at = [2, 1, 0], [5, 6, 7]
    phase.estimator.temperature, phase.heldout_nll = 0.25, 1.5
    phase.sampler.fair_queue = [[0, 1, 2]]
    other = make_search(small_config("search.warmup_steps=0", "seed=9"))
    other.load_state_dict(phase.state_dict())
    assert_same_state(other.state_dict(), phase.state_dict())
    assert (other.convergence.changed_at, other.heldout_nll, other.sampler.fair_queue) == ([5, 6, 7], 1.5, [[0, 1, 2]])


def test_the_heldout_nll_is_the_mean_over_the_sampled_paths(small_config, monkeypatch):
    phase = make_search(small_config("search.warmup_steps=0", "search.arch_fraction=0.5"))
    seen = []
    original = estimators.leave_one_out_weights
    monkeypatch.setattr(estimators, "leave_one_out_weights", lambda losses: seen.append(losses) or original(losses))
    phase.step(1)
    phase.step(2)
    assert phase.heldout_nll == pytest.approx(seen[0].mean().item()) and seen[0].std() > 0


@pytest.mark.parametrize("split", ["heldout", "shared"])
def test_a_sampled_path_with_a_loss_that_is_not_finite_changes_nothing(small_config, split):
    phase = make_search(small_config(f"search.split={split}", "search.warmup_steps=0", "search.arch_fraction=0.5"))
    phase.step(1)
    for block in phase.supernet.backbone.blocks:
        for parameter in block.candidates[0].parameters():
            parameter.data.fill_(float("nan"))
    phase.supernet.logits.data[:, 0] = 20.0
    embedding, logits = phase.supernet.backbone.embedding.weight.clone(), phase.supernet.logits.clone()
    with pytest.raises(FloatingPointError, match="sampled path"):
        phase.step(2)
    assert torch.equal(embedding, phase.supernet.backbone.embedding.weight)
    assert torch.equal(logits, phase.supernet.logits)


def test_a_gradient_of_the_logits_that_is_not_finite_is_refused(small_config):
    phase = make_search(small_config())
    logits = phase.supernet.logits
    logits.grad, before = torch.full_like(logits, float("nan")), logits.clone()
    with pytest.raises(FloatingPointError, match="gradient of the logits"):
        phase.update_logits(24)
    assert torch.equal(before, logits)
