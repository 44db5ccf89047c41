import itertools

import pytest
import torch

from models.stream import Decoder
from tests.making import BLOCKS, generator, streaming_model

VOCAB, STREAM = 7, 40
PIECES = {
    "one by one": [1] * STREAM,
    "a prompt, then one by one": [17, 9, *[1] * 14],
    "unequal": [3, 1, 12, 1, 1, 20, 2],
}


def model_of(pattern, **options):
    return streaming_model(pattern, VOCAB, **options).double()


def stream(rows=2):
    return torch.randint(VOCAB, (rows, STREAM), generator=generator(5))


def by_the_model(model, tokens, pieces, context):
    """Log-probabilities [V, P, B] after each of P pieces, from the model's nll of every possible next token."""
    ends = list(itertools.accumulate(pieces))
    results = []
    for candidate in range(VOCAB):
        memories, found = None, []
        for start, end, following in zip([0, *ends], ends, [*pieces[1:], 0]):
            targets = torch.full_like(tokens[:, start:end], candidate)
            nll, memories = model(tokens[:, start:end], targets, memories, context - following)
            found.append(-nll[:, -1])
        results.append(torch.stack(found))
    return torch.stack(results)


def by_the_decoder(model, tokens, pieces, context):
    decoder, ends = Decoder(model, context), list(itertools.accumulate(pieces))
    read = [decoder.read(tokens[:, start:end]) for start, end in zip([0, *ends], ends)]
    assert decoder.offset == sum(pieces)
    return torch.stack(read).movedim(-1, 0)  # [V, P, B]


MIXED = [*BLOCKS.values(), "attention key_heads=1"]
OPTIONS = {"norm": "post"}, {"grid": (2, 3, 1)}, {"cutoffs": (2, 5)}, {"ngram_rows": (13, 11)}
CASES = [
    ([block, "dense", block], {}, pieces, context)
    for block, pieces, context in itertools.product(BLOCKS.values(), PIECES, (STREAM, 24))
] + [(MIXED, options, "unequal", 24) for options in OPTIONS]


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize(("pattern", "options", "pieces", "context"), CASES, ids=str)
@torch.no_grad()
def test_the_decoder_equals_the_model_for_the_same_pieces(pattern, options, pieces, context):
    model, tokens, pieces = model_of(pattern, **options), stream(), PIECES[pieces]
    expected = by_the_model(model, tokens, pieces, context)
    torch.testing.assert_close(by_the_decoder(model, tokens, pieces, context), expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_one_row_becomes_several_that_go_on_differently():
    model, tokens = model_of(["attention", "linear", "conv", "dense", "window 6"]), stream(3)
    tokens[:, :20] = tokens[:1, :20]
    one = Decoder(model, 22)
    one.read(tokens[:1, :20])
    one.repeat(3)
    several = Decoder(model, 22)
    several.read(tokens[:, :20])
    for place in range(20, 30):
        log_p = one.read(tokens[:, place : place + 1])
        torch.testing.assert_close(log_p, several.read(tokens[:, place : place + 1]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [0, 6])
def test_a_piece_of_another_length_is_refused(length):
    decoder = Decoder(model_of(["attention"]), 5)
    with pytest.raises(ValueError, match=f"a piece of {length} tokens must have 1 to 5"):
        decoder.read(torch.zeros(1, length, dtype=torch.int64))
