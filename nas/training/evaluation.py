"""The evaluation protocol: the stream in order, from an empty memory, every token but the first predicted once.

Several rows are read at once for speed. So that the figures do not depend on how many, each row first reads the
segments that its memories reach back to, without counting them: a block sees at most ceil(memory / segment) segments
back, so all N of them together N times as many. And where blocks depend on the place in the stream (rows of fixed
sparse attention, images), each row begins at a place that is like the first: a multiple of their period. Where that
and the segment have a large common multiple, rows are few and evaluation is slower.
"""

import math

import numpy as np
import torch
from torch import nn

from nas.core.metrics import perplexity
from nas.data.corpus import Corpus
from nas.training import distributed as ranks


@torch.no_grad()
def total_nll(
    model: nn.Module,
    tokens: np.ndarray,
    batch_size: int,
    segment: int,
    memory: int,
    looking_back: int,
    period: int = 1,
    device: torch.device | str = "cpu",
) -> tuple[float, int]:
    """Sum of the nll of tokens[1:] in nats, and how many they are.

    model(tokens [B, L], targets [B, L], memories, memory_length) -> (nll [B, L], memories); looking_back: how many of
    its blocks have a memory; period: after how many tokens a place in the stream is like the first to the model;
    device: the network's. The model's mode (train or eval) is restored. The ranks of a run share the rows, and all get
    the sums. Raises ValueError below two tokens.
    """
    predictions = len(tokens) - 1
    if predictions < 1:
        raise ValueError(f"a stream of {len(tokens)} tokens has nothing to predict")
    segments = -(-predictions // segment)
    warm = min(segments, looking_back * -(-memory // segment))
    whole = math.lcm(segment, period) // segment  # so many segments that each row can begin like the stream
    per_row = max(1, -(-(segments - warm) // (batch_size * whole))) * whole
    per_row = min(per_row, max(1, segments - warm))  # where that is less, there is one row, which may end anywhere
    rows = max(1, -(-(segments - warm) // per_row))
    # Row r reads the segments r * per_row, ..., r * per_row + warm + per_row - 1; all but row 0 count only the last
    # per_row of them. The end is padded; causality keeps the padding from mattering.
    padded = torch.zeros((rows * per_row + warm) * segment + 1, dtype=torch.int64)
    padded[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
    own = torch.arange(rows).tensor_split(ranks.world_size())[ranks.rank()]
    offsets = torch.arange(segment + 1)[None, :]
    padded, own, offsets = padded.to(device), own.to(device), offsets.to(device)

    was_training, total, counted, memories = model.training, 0.0, 0, None
    model.eval()
    for step in range(warm + per_row if len(own) else 0):
        places = (own[:, None] * per_row + step) * segment + offsets  # [rows, segment + 1]
        window = padded[places]
        nll, memories = model(window[:, :-1], window[:, 1:], memories, memory)
        counts = places[:, 1:] <= predictions
        if step < warm:
            counts &= own[:, None] == 0
        total += nll.double()[counts].sum().item()
        counted += int(counts.sum())
    model.train(was_training)
    total, counted = ranks.all_reduce_sum([total, counted])
    return total, int(counted)


def count_looking_back(blocks) -> int:
    return sum(block.needs_memory for block in blocks)


def period_of(blocks, image_size: int = 1) -> int:
    """Tokens after which a place in the stream is like the first to these blocks, and to images of that size."""
    return math.lcm(image_size, *(block.period for block in blocks))


def evaluate_split(model: nn.Module, corpus: Corpus, split: str, *reading) -> dict:
    """The figures of one split, read as total_nll is told from batch_size on; word perplexity and bits per byte refer
    to the original text."""
    total, counted = total_nll(model, corpus.tokens(split), *reading)
    about = corpus.meta["splits"][split]
    return {
        "nll": total,
        "tokens": counted,
        "nll_per_token": total / counted,
        "perplexity": perplexity(total / counted),
        "words": about["words"],
        "word_perplexity": perplexity(total / about["words"]),
        "word_perplexity_comparable": about["words_kept"],
        "bytes": about["bytes"],
        "bits_per_byte": total / math.log(2) / about["bytes"],
        "bits_per_byte_comparable": about["lossless"],
    }
