"""A planted truth: corpora made so that one knows whether attention is needed, and whether the search finds out."""

import numpy as np
import pytest
import torch

from nas.assembly import build_supernet
from nas.config import load_config
from nas.searching import Search

SYMBOLS, LOOK_BACK = 24, 5
ESTIMATORS = {
    "leave_one_out": ["search.sampling=hard", "search.estimator=leave_one_out"],
    "soft": ["search.sampling=soft"],
}


def look_back_stream(length: int, seed: int) -> np.ndarray:
    """Each token repeats the one LOOK_BACK before it, or (one in ten) is drawn anew: only the past helps."""
    source = np.random.default_rng(seed)
    stream = source.integers(SYMBOLS, size=length)
    copies = source.random(length) < 0.9
    for i in range(LOOK_BACK, length):
        if copies[i]:
            stream[i] = stream[i - LOOK_BACK]
    return stream


def successor_stream(length: int, seed: int) -> np.ndarray:
    """Each token is decided by the one before it, or (one in ten) drawn anew: the past does not help."""
    successor = np.random.default_rng(99).permutation(SYMBOLS)
    source = np.random.default_rng(seed)
    stream = source.integers(SYMBOLS, size=length)
    follows = source.random(length) < 0.9
    for i in range(1, length):
        if follows[i]:
            stream[i] = successor[stream[i - 1]]
    return stream


def found_pattern(stream, memory_corpus, tmp_path, overrides) -> tuple[list[str], torch.Tensor]:
    """The likeliest operations and pi at the end of a search."""
    path = tmp_path / "planted.yaml"
    path.write_text(
        """
        model: {d_model: 32, heads: 2, d_ffn: 32, blocks: 3, dropout: 0}
        train: {steps: 900, batch_size: 16, segment: 16, memory: 16, lr: 0.005, warmup_steps: 20}
        search: {warmup_steps: 400, split: heldout, optimizer: {lr: 0.05}}
        """
    )
    config = load_config(path, overrides)
    corpus = memory_corpus(SYMBOLS, stream(60_000, 1), stream(2_000, 2))
    torch.manual_seed(config.seed)
    phase = Search(build_supernet(config, corpus), corpus, config)
    for step in range(1, phase.total_steps + 1):
        phase.step(step)
    return phase.supernet.names(phase.supernet.argmax_path()), phase.supernet.pi()


ORDER = "search.operations=[dense,identity,attention]"  # attention stands last, where no tie can favour it
PRICE = ["search.latency.source=flops", "search.latency.mode=penalty", "search.latency.weight=1"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_attention_is_kept_where_only_the_past_tells_the_next_token(estimator, memory_corpus, tmp_path):
    """Every block has a price, so a search that learns nothing ends on identity, and one attention is the optimum."""
    pattern, pi = found_pattern(look_back_stream, memory_corpus, tmp_path, [*ESTIMATORS[estimator], ORDER, *PRICE])
    assert pattern.count("attention") == 1
    assert pi[pattern.index("attention"), 2] > 0.5


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_attention_is_dropped_where_the_current_token_decides(estimator, memory_corpus, tmp_path):
    pattern, pi = found_pattern(successor_stream, memory_corpus, tmp_path, [*ESTIMATORS[estimator], ORDER, *PRICE])
    assert "attention" not in pattern
    assert (pi[:, 2] < 0.3).all()
