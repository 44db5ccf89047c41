"""The evaluation protocol: read a split in order with an empty memory, and predict every token but the first once.

Several rows are read at once, and the results must not depend on their number. Three rules ensure that:

- Before its own segments, each row reads the segments that its memories reach, without counting them. One block reaches
  ceil(memory / segment) segments back, so N blocks reach N times as many. Before them are the tokens of n-grams.
- If a block carries a state, which depends on the whole stream, one row reads the split.
- If blocks depend on the place in the stream (fixed sparse attention, images), each row begins at a multiple of their
  period. If the period and the segment have a large least common multiple, the rows are few.
"""

import math
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.config import MOST_NGRAMS, Config
from nas.data.corpus import Corpus
from nas.training import distributed
from nas.training.build import image_size
from nas.training.device import Runtime

NO_WORDS = "no comparable word perplexity: the tokens lose words, or the text is not made of words, or it is above 10^9"
NO_TEXT = "not comparable: the tokens do not keep the text"
MOST_NATS = math.log(1e9)  # of a word; larger word perplexities tell nothing


def total_nll(model: nn.Module, tokens: np.ndarray, *lengths, **more) -> tuple[float, int]:
    """The summed nll of tokens[1:] in nats, and their number, on all ranks. Arguments as those of read_stream()."""
    total, counted = 0.0, 0
    for nll, _, _ in read_stream(model, tokens, *lengths, **more):
        total += nll.double().sum().item()
        counted += len(nll)
    total, counted = distributed.all_reduce_sum(torch.tensor([total, counted], dtype=torch.float64)).tolist()
    return total, int(counted)


def token_nll(model: nn.Module, tokens: np.ndarray, *lengths, **more) -> tuple[np.ndarray, np.ndarray]:
    """The nll [N - 1] of each of tokens[1:] in nats, and the inputs of the output layer before it [N - 1, D], on all
    ranks. The arguments are those of read_stream().
    """
    found = torch.zeros(len(tokens), dtype=torch.float64)
    states = torch.zeros(len(tokens), model.d_model)
    for nll, hidden, places in read_stream(model, tokens, *lengths, **more):
        places = places.cpu()
        found[places], states[places] = nll.double().cpu(), hidden.float().cpu()
    return tuple(distributed.all_reduce_sum(values)[1:].numpy() for values in (found, states))


@torch.no_grad()
def read_stream(
    model: nn.Module,
    tokens: np.ndarray,
    batch_size: int,
    segment: int,
    memory: int,
    memory_blocks: int | None,
    period: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each step of the evaluation: the nll of the counted tokens [n] in nats, the inputs of the output layer before
    them [n, D], and their places in `tokens` [n].

    model: has read() and head as TransformerXL. memory_blocks, period: of count_memory_blocks() and period_of(). The
    ranks of a run divide the rows. The model keeps its mode. Raises ValueError if there are fewer than two tokens.
    """
    predictions = len(tokens) - 1
    if predictions < 1:
        raise ValueError(f"a stream of {len(tokens)} tokens is too short: evaluation needs at least two")
    segments, before = -(-predictions // segment), -(-MOST_NGRAMS // segment) if memory else 0
    if memory and memory_blocks is None:
        warmup = segments - 1  # a state depends on all segments before, so one row reads the whole stream
    else:
        warmup = min(segments - 1, (memory_blocks or 0) * -(-memory // segment) + before)
    unit = math.lcm(segment, period) // segment  # a row begins at a multiple of this number of segments
    per_row = -(-(segments - warmup) // (batch_size * unit)) * unit
    per_row = min(per_row, segments - warmup)  # with fewer segments there is one row, which may end anywhere
    rows = -(-(segments - warmup) // per_row)
    # Row r reads the segments r * per_row, ..., r * per_row + warmup + per_row - 1. All rows but row 0 count only the
    # last per_row of them. The end is padded; the model is causal, so the padding does not matter.
    padded = torch.zeros((rows * per_row + warmup) * segment + 1, dtype=torch.int64)
    padded[: len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
    own = torch.arange(rows).tensor_split(distributed.world_size())[distributed.rank()]
    padded, own, offsets = padded.to(device), own.to(device), torch.arange(segment + 1, device=device)[None, :]

    was_training, memories = model.training, None
    model.eval()
    for step in range(warmup + per_row if len(own) else 0):
        places = (own[:, None] * per_row + step) * segment + offsets  # [rows, segment + 1]
        window = padded[places]
        hidden, memories = model.read(window[:, :-1], memories, memory)
        hidden, targets = hidden.flatten(0, 1), window[:, 1:].flatten()
        nll = model.head(hidden, targets)
        counts = places[:, 1:] <= predictions
        if step < warmup:
            counts &= own[:, None] == 0
        yield nll[counts.flatten()], hidden[counts.flatten()], places[:, 1:][counts]
    model.train(was_training)


def count_memory_blocks(blocks) -> int | None:
    """The number of blocks, or of their operations, that read the memory. None if one carries a state."""
    if any(block.carries_state for block in blocks):
        return None
    return sum(block.reach != 0 for block in blocks)


def period_of(blocks, image_size: int = 1) -> int:
    """The smallest shift of the stream, in tokens, that changes neither the blocks' results nor places in images."""
    return math.lcm(image_size, *(block.period for block in blocks))


def evaluation_lengths(config: Config) -> tuple[int, int]:
    """(segment, memory) of evaluation; options that are null take the lengths of training."""
    options, train = config.evaluate, config.train
    segment = train.segment if options.segment is None else options.segment
    return segment, train.memory if options.memory is None else options.memory


def evaluate_split(config: Config, model: nn.Module, blocks, corpus: Corpus, split: str, runtime: Runtime) -> dict:
    """The metrics of a split at the configured lengths. blocks: the operations that the model runs."""
    with runtime.autocast(), runtime.disable_compile():
        lengths = reading_lengths(config, blocks)
        total, counted = total_nll(model, corpus.tokens(split), *lengths, device=runtime.device)
    return text_metrics(total, counted, corpus.meta["splits"][split])


def read_text(config: Config, model: nn.Module, tokens: np.ndarray, runtime: Runtime) -> tuple[np.ndarray, np.ndarray]:
    """What token_nll() returns for a text, at the configured lengths."""
    with runtime.autocast(), runtime.disable_compile():
        return token_nll(model, tokens, *reading_lengths(config, model.blocks), device=runtime.device)


def reading_lengths(config: Config, blocks) -> tuple[int, int, int, int | None, int]:
    """The arguments of read_stream() from batch_size to period, for a model of these blocks."""
    lengths = config.evaluate.batch_size, *evaluation_lengths(config)
    return *lengths, count_memory_blocks(blocks), period_of(blocks, image_size(config))


def text_metrics(total: float, counted: int, original: dict) -> dict:
    """The metrics of a text with a summed nll in nats. original: the numbers of its `words` and `bytes`, and whether
    it is made of words that the tokens keep (`words_kept`), and the tokens keep all of it (`lossless`).
    """
    mean = total / max(original["words"], 1)
    return {
        "nll": total,
        "tokens": counted,
        "nll_per_token": total / counted,
        "perplexity": perplexity(total / counted),
        "words": original["words"],
        "word_perplexity": perplexity(mean),
        "word_perplexity_comparable": original["words_kept"] and mean <= MOST_NATS,
        "bytes": original["bytes"],
        "bits_per_byte": total / math.log(2) / original["bytes"],
        "bits_per_byte_comparable": original["lossless"],
    }


def perplexity(nll: float) -> float:
    """exp(nll), where nll is in nats per token or per word; infinity on overflow."""
    return math.inf if nll > math.log(sys.float_info.max) else math.exp(nll)
