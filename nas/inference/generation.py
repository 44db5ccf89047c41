"""Continue a text token by token."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from models.stream import Decoder
from models.transformer_xl import TransformerXL
from nas.data.vocabulary import Vocabulary
from nas.inference.sampling import Sampling
from nas.training.device import DeviceContext

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes the first bytes of a character


def generate_tokens(
    model: TransformerXL,
    context: DeviceContext,
    lengths: tuple[int, int],
    prompt: np.ndarray,
    samples: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> Iterator[list[int]]:
    """Read a prompt [tokens] once, and yield the next token of each sample without end.

    lengths: segment and memory. The prompt is read in segments, as in an evaluation. Then attention sees the last
    segment + memory positions, the current one included. Without memory, the states of linear attention and
    convolutions, and n-grams, begin anew with each segment.
    """
    segment, memory = lengths
    decoder = Decoder(model, segment + memory)

    def read(tokens: np.ndarray | Tensor) -> Tensor:
        if not memory and decoder.offset % segment == 0:
            decoder.restart(len(tokens))
        with context.autocast(), context.disable_compile():
            return decoder.read(torch.as_tensor(tokens, dtype=torch.int64, device=context.device))

    for start in range(0, len(prompt), segment):
        log_p = read(prompt[None, start : start + segment].astype(np.int64))  # [1, V]
    decoder.repeat(samples)
    log_p = log_p.expand(samples, -1)
    while True:
        tokens = sampling.draw(log_p, generator)  # [samples]
        yield tokens.tolist()
        log_p = read(tokens[:, None])


class TextWriter:
    """Turns tokens into text one by one.

    A tokenizer may join the tokens of a line, with spaces between words for example. So the writer decodes the present
    line anew for each token, and returns what has been added to it. prompt: the tokens before the first one.
    """

    def __init__(self, vocabulary: Vocabulary, prompt: np.ndarray):
        ends = np.flatnonzero(prompt == vocabulary.line_end)
        self.vocabulary, self.line = vocabulary, prompt[ends[-1] + 1 if len(ends) else 0 :].tolist()
        self.written = self.decode()  # of the line

    def decode(self) -> bytes:
        return self.vocabulary.decode(np.array(self.line, dtype=np.int64))

    def write(self, token: int) -> bytes:
        """The text that a token adds. Bytes of an incomplete character may wait for the next tokens."""
        if token == self.vocabulary.line_end:
            rest = self.rest()
            self.line, self.written = [], b""
            return rest + b"\n"
        self.line.append(token)
        complete = self.decode()
        if self.vocabulary.kind == "sentencepiece":  # a token may be a single byte of a character
            complete = complete.decode().rstrip(INCOMPLETE).encode()
        return self.advance(complete)

    def rest(self) -> bytes:
        """The text that still waits."""
        return self.advance(self.decode())

    def advance(self, text: bytes) -> bytes:
        """What a longer text of the line adds to the written text. A shorter one adds nothing."""
        new, self.written = text[len(self.written) :], max(self.written, text, key=len)
        return new
