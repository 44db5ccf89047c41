"""Embeddings of n-grams."""

import numpy as np
import pytest
import torch

from experiments.helpers import ArrayCorpus
from models.operations.operation import BlockConfig
from models.stream import Decoder
from models.transformer_xl import HASH_FACTOR, HASH_PRIME, NGramEmbedding, build_pattern
from nas.training.evaluation import total_nll
from nas.training.passes import resolve_auto
from tests.making import generator, sized

ROWS = [7, 5, 11]


def plain_row(ngram: list[int], rows: int) -> int:
    """The row of an n-gram, its last token first."""
    key = ngram[0]
    for token in ngram[1:]:
        key = (key * HASH_FACTOR + token) % HASH_PRIME
    return key % rows


def test_embeddings_are_sums_over_the_rows_of_the_last_tokens_in_any_segments():
    embedding = NGramEmbedding(ROWS, 4).double()
    for table in embedding.tables:
        torch.nn.init.normal_(table, generator=generator(1))
    stream = torch.randint(50, (2, 30), generator=generator(2))
    expected = torch.zeros(2, 30, 4, dtype=torch.float64)
    for row in range(2):
        for place in range(30):
            ngram = [int(stream[row, place])]
            for distance, table in enumerate(embedding.tables, start=1):
                ngram.append(int(stream[row, place - distance]) if place >= distance else -1)
                expected[row, place] += table[plain_row(ngram, len(table))]
    found, last = [], None
    for part in stream.split([1, 9, 2, 18], dim=1):
        embedded, last = embedding(part, last)
        found.append(embedded)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-14)
    assert torch.equal(last, stream[:, -3:])


@pytest.mark.parametrize(("tokens", "reach"), [(70, 1), (17, 2)])
@pytest.mark.parametrize("rows", [10_000, 16_384, 20_000])
def test_ngrams_meet_in_a_row_as_seldom_as_by_chance(tokens, reach, rows):
    ngrams = torch.cartesian_prod(*[torch.arange(tokens)] * (reach + 1))  # each n-gram as a row of the batch
    embedding = NGramEmbedding([1] * (reach - 1) + [rows], 1).double()
    with torch.no_grad():
        embedding.tables[-1].copy_(torch.arange(rows)[:, None])
        used = len(embedding(ngrams[:, -1:], ngrams[:, :-1])[0].unique())
    assert used > 0.97 * rows * (1 - np.exp(-len(ngrams) / rows))


@pytest.mark.parametrize("pattern", [["dense"], ["attention", "conv", "dense"]], ids=["dense", "mixed"])
@pytest.mark.parametrize(("segment", "memory"), [(8, 5), (1, 3), (8, 0)])
def test_models_with_ngrams_do_not_depend_on_rows_and_decode_the_same(pattern, segment, memory):
    model = build_pattern(sized(pattern), BlockConfig(16), 30, ngram_rows=[40, 60]).double().eval()
    for table in model.ngrams.tables:
        assert not table.any()
        torch.nn.init.normal_(table, generator=generator(3))
    tokens = torch.randint(30, (1, 70), generator=generator(4))
    blocks = sum(block.reach != 0 for block in model.blocks)
    totals = [total_nll(model, tokens[0].numpy(), rows, segment, memory, blocks) for rows in (1, 4)]
    assert totals[0][1] == totals[1][1] == 69 and totals[0][0] == pytest.approx(totals[1][0], rel=1e-12)
    decoder, found = Decoder(model, 70), 0.0
    with torch.no_grad():
        whole, _ = model(tokens[:, :-1], tokens[:, 1:], None, 100)
    for place in range(69):
        found -= decoder.read(tokens[:, place : place + 1])[0, tokens[0, place + 1]]
    torch.testing.assert_close(found, whole.sum())
    decoder.restart(1)
    if pattern == ["dense"]:  # attention has its own memory
        torch.testing.assert_close(decoder.read(tokens[:, :1]), Decoder(model, 70).read(tokens[:, :1]))


def test_auto_gives_rows_by_the_number_of_tokens_and_none_to_small_texts(small_config):
    for tokens, rows in ((499_999, []), (600_000, [4687, 4687]), (4_000_000, [16_384, 16_384])):
        corpus = ArrayCorpus(50, train=np.zeros(tokens, dtype=np.int64), valid=np.zeros(9, dtype=np.int64))
        assert resolve_auto(small_config("model.ngram_rows=auto"), corpus).model.ngram_rows == rows
    assert resolve_auto(small_config("model.ngram_rows=[5]"), corpus).model.ngram_rows == [5]
