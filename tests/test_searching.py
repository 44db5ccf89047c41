import numpy as np
import pytest
import torch

from nas.errors import InputError
from nas.evaluation import total_nll
from tests.making import assert_same_state, make_search
from tests.reference import expected_loss


@pytest.mark.parametrize("more", [[], ["search.sampling=soft"], ["search.estimator=straight_through"]])
def test_heldout_logits_steps_leave_the_weights_alone_and_the_other_way_round(small_config, more):
    no_identity = "search.operations=[attention,dense]"  # through which nothing is learned straight
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
    assert sum(phase.logits_learn(step) for step in range(1, 1001)) == pytest.approx(1000 * fraction, abs=1)


def test_the_training_curve_is_of_training_text_alone(small_config):
    phase = make_search(small_config("search.warmup_steps=0", "search.arch_fraction=0.5"))
    assert phase.step(1)[0] is not None and "heldout_nll" not in phase.scalars()
    assert phase.step(2) == (None, 32) and phase.scalars()["heldout_nll"] > 0


def test_heldout_text_is_contiguous_and_unseen_by_the_weights(small_config):
    phase = make_search(small_config("search.arch_fraction=0.2"))
    tokens = phase.corpus.tokens("train")
    border = round(0.8 * len(tokens))
    np.testing.assert_array_equal(phase.stream.rows.flatten(), tokens[: phase.stream.rows.size])
    assert phase.stream.rows.size <= border
    held = phase.arch_stream.rows.flatten()
    np.testing.assert_array_equal(held, tokens[border : border + held.size])


@pytest.mark.parametrize("more", [[], ["search.sampling=soft"], ["search.estimator=straight_through"]])
def test_shared_batches_teach_both_after_the_warm_up(small_config, more):
    phase = make_search(small_config("search.split=shared", "search.warmup_steps=2", *more))
    for step in range(1, 6):
        weights, logits = phase.supernet.backbone.embedding.weight.clone(), phase.supernet.logits.clone()
        phase.step(step)
        assert not torch.equal(weights, phase.supernet.backbone.embedding.weight)
        assert torch.equal(logits, phase.supernet.logits) == (step <= 2)


def test_the_paths_that_are_scored_see_no_dropout_and_the_same_batch(small_config):
    phase = make_search(small_config("model.dropout=0.5", "search.warmup_steps=0", "search.paths=2"))
    batch = phase.arch_stream.next()
    again = []
    for _ in range(2):
        phase.generator.manual_seed(3)
        phase.score_paths(batch, phase.arch_stream)
        again.append(phase.supernet.logits.grad.clone())
    assert torch.equal(*again)


def test_temperature_starts_after_the_warm_up_and_ends_exactly(small_config):
    phase = make_search(small_config("search.temperature.start=2.0", "search.temperature.end=0.3"))
    assert [phase.temperature_of(step) for step in (1, 6)] == [2.0, 2.0]
    assert 0.3 < phase.temperature_of(7) < 2.0
    assert phase.temperature_of(24) == 0.3


def test_evaluation_follows_the_likeliest_path_without_noise(small_config, tmp_path):
    phase = make_search(small_config())
    with torch.no_grad():
        phase.supernet.logits[:, 1] += 1
    first, second = phase.evaluate(None, 0), phase.evaluate(None, 0)
    assert first == second
    assert [block.choice for block in phase.supernet.backbone.blocks] == [([1], None)] * 3


def test_a_price_on_flops_is_the_exact_gradient_of_the_expected_cost(small_config):
    price = ["search.latency.source=flops", "search.latency.weight=2", "search.latency.mode=penalty"]
    phase = make_search(small_config(*price))
    logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    names = phase.supernet.operations
    by_paths = expected_loss(logits, lambda path: torch.tensor(phase.costs.ratio([names[i] for i in path])))
    by_sum = phase.costs.expected_ratio(logits, names)
    assert by_sum.item() == pytest.approx(by_paths.item())
    slow, fast = (torch.autograd.grad(value, logits)[0] for value in (by_paths, by_sum))
    torch.testing.assert_close(slow, fast)


def test_the_hinge_charges_only_above_the_target(small_config):
    for target, charged in ((0.01, True), (5.0, False)):
        price = ["search.latency.source=flops", f"search.latency.target={target}"]
        phase = make_search(small_config(*price))
        phase.supernet.logits.grad = torch.zeros_like(phase.supernet.logits)
        before = phase.supernet.logits.clone()
        phase.update_logits()
        assert torch.equal(before, phase.supernet.logits) != charged


def test_search_stops_early_once_the_pattern_is_stable(small_config):
    phase = make_search(small_config("search.stable_share=0.5", "search.stable_steps=5"))
    phase.path_since = [0, 3, 11]
    assert phase.finished(14) is None  # nothing before the first logits step, the tenth, counts
    assert "2 of 3 blocks kept their choice for 5 steps" in phase.finished(15)
    phase.path_since = [0, 11, 12]
    assert phase.finished(15) is None


def test_doubtful_outcomes_are_warned_of(small_config):
    phase = make_search(small_config())
    with torch.no_grad():
        phase.supernet.logits.copy_(torch.tensor([[0.0, 0, 4], [0, 0, 4], [0, 0.05, 0]]))
    phase.path_since = [0, 100, 0]
    text = " ".join(phase.warnings(100))
    assert "identity has taken over 2 of 3 blocks" in text
    assert "near uniform in block 3" in text
    assert "not settled: block 2 changed" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.warmup_steps=24", "search.warmup_steps=24 leaves the logits none of the 24 training steps"),
        ("search.warmup_steps=20", "search.warmup_steps=20 leaves the logits none of the 24 training steps"),
        ("train.batch_size=3000", "too short for train.batch_size=3000"),
        ("search.arch_fraction=0.001", "held-out .search.arch_fraction. stream has"),
        ("model.cutoffs=[5,4000]", "must stay below the vocabulary size"),
    ],
)
def test_what_does_not_fit_the_data_is_named(small_config, override, message):
    with pytest.raises(InputError, match=message):
        make_search(small_config(override))


def test_an_empty_validation_split_is_named(small_config, memory_corpus):
    with pytest.raises(InputError, match="the valid split has 1 tokens"):
        make_search(small_config(), memory_corpus(10, np.zeros(5000, dtype=int), np.array([1])))


def test_the_search_is_judged_on_valid_and_never_on_test(small_config):
    phase = make_search(small_config())
    figures = phase.evaluate(None, 0)
    expected, _ = total_nll(phase.supernet, phase.corpus.tokens("valid"), 5, 8, 8, 3)
    assert figures["nll"] == pytest.approx(expected, rel=1e-6)


def test_logits_learn_on_heldout_text_with_its_own_memories_and_no_dropout(small_config):
    """Every batch that the SuperNet sees, in order: from which stream, in which mode, with whose memories."""
    for more in ([], ["search.sampling=soft"], ["search.estimator=straight_through"]):
        phase = make_search(small_config("search.warmup_steps=0", "search.arch_fraction=0.5", "search.paths=2", *more))
        left = {"train": [], "heldout": []}  # memories that each stream was left with
        for step in range(1, 9):
            kind = "heldout" if step % 2 == 0 else "train"
            stream = phase.arch_stream if kind == "heldout" else phase.stream
            start = stream.position * 8
            seen = []

            def note(model, inputs, seen=seen):
                seen.append((inputs, model.training))

            hook = phase.supernet.register_forward_pre_hook(note)
            phase.step(step)
            hook.remove()
            for (tokens, _, memories, length), training in seen:
                np.testing.assert_array_equal(tokens, stream.rows[:, start : start + 8])
                assert training == (kind == "train") and length == 8
                assert memories is (left[kind][-1] if left[kind] else None)
            left[kind].append(stream.memories)
            assert stream.memories[0].shape == (4, 8, 16)


def test_weights_train_with_dropout_where_paths_are_scored_on_the_same_batch(small_config):
    phase = make_search(small_config("search.split=shared", "search.warmup_steps=0"))
    modes = []
    phase.supernet.register_forward_pre_hook(lambda model, inputs: modes.append(model.training))
    phase.step(1)
    assert modes[-1] and not any(modes[:-1])


def test_the_memories_kept_are_those_of_the_first_path(small_config):
    phase = make_search(small_config("search.warmup_steps=0", "search.paths=8"))
    ran = []
    hook = phase.supernet.register_forward_hook(lambda model, inputs, output: ran.append(output[1]))
    phase.score_paths(phase.arch_stream.next(), phase.arch_stream)
    hook.remove()
    assert len(ran) > 1 and phase.arch_stream.memories is ran[0]


def test_the_relaxed_samples_use_the_temperature(small_config):
    for more in (["search.sampling=soft"], ["search.estimator=straight_through"]):
        weights = []
        for temperature in (5.0, 0.05):
            phase = make_search(small_config(*more))
            phase.temperature = temperature
            phase.draw(phase.supernet.logits)
            weight = phase.supernet.backbone.blocks[0].choice[1][0]
            (gradient,) = torch.autograd.grad(weight, phase.supernet.logits)
            weights.append((weight.item(), gradient.abs().max().item()))
        assert weights[0] != weights[1]


def test_the_weight_of_the_price_scales_its_gradient(small_config):
    gradients = []
    for weight in (1.0, 3.0):
        price = ["search.latency.source=flops", "search.latency.mode=penalty", f"search.latency.weight={weight}"]
        phase = make_search(small_config(*price))
        phase.supernet.logits.grad = torch.zeros_like(phase.supernet.logits)
        seen = []
        phase.logits_optimizer.step = lambda seen=seen, phase=phase: seen.append(phase.supernet.logits.grad.clone())
        phase.update_logits()
        gradients += seen
    torch.testing.assert_close(gradients[1], 3 * gradients[0])
    assert gradients[0].abs().max() > 0


def test_the_state_of_a_search_is_whole(small_config):
    phase = make_search(small_config("search.warmup_steps=0"))
    for step in range(1, 8):
        phase.step(step)
    phase.path, phase.path_since, phase.temperature, phase.heldout_nll = [2, 1, 0], [5, 6, 7], 0.25, 1.5
    other = make_search(small_config("search.warmup_steps=0", "seed=9"))
    other.load_state_dict(phase.state_dict())
    assert_same_state(other.state_dict(), phase.state_dict())
    assert (other.path_since, other.heldout_nll) == ([5, 6, 7], 1.5)
