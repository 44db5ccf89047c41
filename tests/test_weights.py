"""The training of a SuperNet's weights along uniform paths, and how its steps are described."""

import numpy as np
import pytest
import torch

from nas.core.errors import InputError
from nas.search.maturity import describe_steps, maturity_warning
from nas.training.evaluation import total_nll
from tests.making import assert_same_state, make_search


def test_a_step_trains_one_operation_of_each_block_equally_often(small_config):
    phase = make_search(small_config("train.steps=21"))
    counts = np.zeros((3, 3), dtype=int)
    for step in range(1, 22):
        before = {name: p.clone() for name, p in phase.supernet.backbone.named_parameters()}
        nll, tokens = phase.step(step)
        path = [block.choice[0][0] for block in phase.supernet.backbone.blocks]
        counts[range(3), path] += 1
        for name, parameter in phase.supernet.backbone.named_parameters():
            if name.startswith("blocks."):
                _, block, _, operation, *_ = name.split(".")
                assert torch.equal(before[name], parameter) or path[int(block)] == int(operation)
        assert nll > 0 and tokens == 32
        assert step % 3 or (counts == step // 3).all()


def test_the_weights_never_see_the_heldout_text(small_config):
    phase = make_search(small_config("search.arch_fraction=0.2"))
    tokens, rows = phase.corpus.tokens("train"), phase.stream.loader.rows
    np.testing.assert_array_equal(rows.flatten(), tokens[: rows.size])
    assert rows.size <= round(0.8 * len(tokens))


def test_the_weights_train_on_short_segments_first_as_in_a_training(small_config):
    phase = make_search(small_config("train.steps=12", "train.short_share=0.5"))
    seen = []
    for step in range(1, 13):
        phase.step(step)
        seen.append(phase.stream.memories is None)
    assert seen == [step <= 6 for step in range(1, 13)]


def test_the_search_is_evaluated_on_valid_along_one_path_of_the_averaged_weights(small_config):
    phase = make_search(small_config("train.steps=6", "train.average_share=0.5"))
    for step in range(1, 7):
        phase.step(step)
    figures = phase.evaluate(None, 6)
    assert figures == phase.evaluate(None, 6)
    phase.end()
    expected, _ = total_nll(phase.supernet, phase.corpus.tokens("valid"), 5, 8, 8, 3)  # the warm-up covers all blocks
    assert figures["nll"] == pytest.approx(expected, rel=1e-6)


def test_the_state_of_the_phase_is_complete(small_config):
    config = small_config("model.dropout=0")
    whole, first, resumed = (
        make_search(config),
        make_search(config),
        make_search(small_config("seed=9", "model.dropout=0")),
    )
    for step in range(1, 11):
        whole.step(step)
    for step in range(1, 6):  # two paths of the second fair round are left
        first.step(step)
    resumed.load_state_dict(first.state_dict())
    for step in range(6, 11):
        resumed.step(step)
    assert_same_state(resumed.state_dict(), whole.state_dict())


def test_rows_of_the_stream_begin_with_an_image(small_config, memory_corpus):
    images, grid = np.arange(30 * 101) % 250, ["data.tokenizer=bytes", "model.grid=[2,5,3]"]
    phase = make_search(small_config(*grid, "search.arch_fraction=0.3"), memory_corpus(256, images, images[:60]))
    assert phase.stream.loader.rows.shape == (4, 17 * 30) and phase.stream.loader.rows[1, 0] == images[17 * 30]


@pytest.mark.parametrize(
    ("override", "message"),
    [
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


def test_the_steps_of_the_weights_are_described_beside_those_of_patterns(small_config):
    def lines(*more):
        return describe_steps(small_config("train.steps=90", "train.warmup_steps=1", *more), 6000)

    (text,) = lines()
    assert "train each operation of a block 30 times: search.retrain_steps is not set" in text
    (text,) = lines("search.retrain_steps=33")
    assert "30 times, 0.91 of the 33 steps" in text
    _, warning = lines("search.retrain_steps=34")
    assert "give the search train.steps=92 or more" in warning
    assert "may overfit after 14" in lines("search.retrain_steps=5000")[-1] and lines("search.method=gumbel") == []
    assert maturity_warning(small_config(), 90, None) is None
