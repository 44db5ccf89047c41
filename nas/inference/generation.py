"""Continue a text token by token, by draws from the predicted distribution."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.stream import Decoder
from models.transformer_xl import TransformerXL
from nas.core.errors import InputError
from nas.data.vocabulary import Vocabulary
from nas.mixture.mixture import Mixture, Stream
from nas.training.device import Runtime


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. They apply in the order of the arguments. Raises InputError if one is out of range.

    top_p: nucleus sampling (arXiv 1904.09751, section 3.1). None: from all tokens.
    """

    temperature: float = 1.0  # divides the log-probabilities; 0: always the most probable token
    top_k: int | None = None  # draw from the k most probable tokens only
    top_p: float | None = None  # draw from the fewest most probable tokens whose probabilities sum to at least p

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature {self.temperature} must be 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top-k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p} must be above 0 and at most 1")

    def probabilities(self, log_p: Tensor) -> Tensor:
        """The distribution [B, V] from which a token is drawn, in float64 unless it is the model's own, exp(log_p)."""
        if self == Sampling():
            return log_p.exp()
        log_p = log_p.double()
        if self.temperature == 0:
            return torch.zeros_like(log_p).scatter_(1, log_p.argmax(dim=1, keepdim=True), 1.0)
        scaled = (log_p - log_p.amax(dim=1, keepdim=True)) / self.temperature  # at most 0: no temperature is too low
        p = scaled.softmax(dim=1)
        return p if self.top_k is None and self.top_p is None else torch.stack([self.truncate(row) for row in p])

    def truncate(self, p: Tensor) -> Tensor:
        """A distribution [V] without the tokens that top_k and top_p leave out."""
        # Tokens below (1 - top_p) / V have less than 1 - top_p together, so the others need not be sorted with them.
        least = 0.0 if self.top_k is not None else (1 - self.top_p) / len(p)
        places = (p >= least).nonzero()[:, 0]
        kept, order = p[places].sort(descending=True, stable=True)
        if self.top_k is not None:
            kept = kept[: self.top_k] / kept[: self.top_k].sum()
        if self.top_p is not None:
            kept = kept[kept.cumsum(dim=0) - kept < self.top_p]  # by the mass of the more probable tokens
        return torch.zeros_like(p).index_copy_(0, places[order[: len(kept)]], kept / kept.sum())

    @torch.inference_mode()
    def draw(self, log_p: Tensor, generator: torch.Generator) -> Tensor:
        """One token [B] for each row of log_p [B, V], by inverse transform sampling. Raises InputError on a NaN."""
        log_p = log_p.cpu()
        if log_p.isnan().any():
            raise InputError("the model predicts NaN instead of probabilities; its weights are damaged")
        sums = self.probabilities(log_p).cumsum(dim=1, dtype=torch.float64)  # [B, V]
        total = sums[:, -1:].contiguous()
        wanted = total * torch.rand(total.shape, dtype=torch.float64, generator=generator)
        # The second one is the last possible token, which a rounded product could pass.
        drawn = [torch.searchsorted(sums, wanted, right=True), torch.searchsorted(sums, total)]
        return torch.minimum(*drawn)[:, 0]


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes the first bytes of a character


class Predictor:
    """Predicts the next token of several samples, which continue one prompt [tokens], by network, mixture or both.

    lengths: segment and memory. The prompt is read in segments, as in an evaluation. Then attention sees the last
    segment + memory positions, the current one included. Without memory, the states of linear attention and
    convolutions, and n-grams, begin anew with each segment.
    """

    def __init__(
        self,
        model: TransformerXL | None,
        mixture: Mixture | None,
        runtime: Runtime,
        lengths: tuple[int, int],
        prompt: np.ndarray,
        samples: int,
    ):
        self.runtime, self.log_p, (self.segment, self.memory) = runtime, None, lengths
        self.decoder = Decoder(model, sum(lengths)) if model else None
        self.streams = [Stream(mixture) for _ in range(samples)] if mixture else []
        pieces = [prompt[start : start + self.segment] for start in range(0, len(prompt), self.segment)]
        for piece in pieces:
            hidden = self.read_network(piece[None].astype(np.int64)) if model else [None]
            for stream in self.streams:
                stream.read(piece, hidden[0])
        if model:
            self.decoder.repeat(samples)
            self.log_p = self.log_p.expand(samples, -1)

    def read_network(self, tokens: np.ndarray | Tensor) -> np.ndarray:
        """The states [rows, L, D] after tokens [rows, L]."""
        if not self.memory and self.decoder.offset % self.segment == 0:
            self.decoder.restart(len(tokens))
        with self.runtime.autocast(), self.runtime.disable_compile():
            self.log_p = self.decoder.read(torch.as_tensor(tokens, dtype=torch.int64, device=self.runtime.device))
        return self.decoder.hidden.float().cpu().numpy()

    def predict(self) -> Tensor:
        """The log-probabilities of the next token of each sample [samples, V]."""
        if not self.streams:
            return self.log_p
        network = self.log_p.float().cpu().numpy() if self.decoder else [None] * len(self.streams)
        found = [stream.predict(log_p) for stream, log_p in zip(self.streams, network, strict=True)]
        return torch.from_numpy(np.stack(found)).float().log()

    def read(self, tokens: Tensor) -> None:
        """Read the next token of each sample [samples]."""
        hidden = self.read_network(tokens[:, None]) if self.decoder else [None] * len(tokens)
        for stream, token, state in zip(self.streams, tokens.numpy(), hidden, strict=False):
            stream.read(token[None], state)


def generate_tokens(predictor: Predictor, sampling: Sampling, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield the next token of each sample without end."""
    while True:
        tokens = sampling.draw(predictor.predict(), generator)  # [samples]
        yield tokens.tolist()
        predictor.read(tokens)


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
