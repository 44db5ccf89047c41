"""Continue a text token by token, by draws from the predicted distribution."""

from collections.abc import Iterator, Sequence
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

    top_p: nucleus sampling (arXiv 1904.09751, section 3.1). top_k of None or 0, and top_p of None or 1: all tokens.
    """

    temperature: float = 1.0  # divides the log-probabilities; 0: always the most probable token
    top_k: int | None = None  # draw from the k most probable tokens only
    top_p: float | None = None  # draw from the fewest most probable tokens whose probabilities sum to at least p

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature {self.temperature} must be 0 or more")
        if self.top_k is not None and self.top_k < 0:
            raise InputError(f"top-k {self.top_k} must be at least 1, or 0 for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p} must be above 0 and at most 1")

    def probabilities(self, log_p: Tensor) -> Tensor:
        """The distribution [B, V] from which a token is drawn, in float64 unless it is the model's own, exp(log_p)."""
        if self.temperature == 1 and self.keeps_all:
            return log_p.exp()
        log_p = log_p.double()
        if self.temperature == 0:
            return torch.zeros_like(log_p).scatter_(1, log_p.argmax(dim=1, keepdim=True), 1.0)
        scaled = (log_p - log_p.amax(dim=1, keepdim=True)) / self.temperature  # at most 0: no temperature is too low
        p = scaled.softmax(dim=1)
        return p if self.keeps_all else torch.stack([self.truncate(row) for row in p])

    @property
    def keeps_all(self) -> bool:
        return not self.top_k and self.top_p in (None, 1)

    def truncate(self, p: Tensor) -> Tensor:
        """A distribution [V] without the tokens that top_k and top_p leave out."""
        # Tokens below (1 - top_p) / V have less than 1 - top_p together, so the others need not be sorted with them.
        least = 0.0 if self.top_k else (1 - self.top_p) / len(p)
        places = (p >= least).nonzero()[:, 0]
        kept, order = p[places].sort(descending=True, stable=True)
        if self.top_k:
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
        least = min(len(prompt), self.segment)
        for piece in pieces:
            hidden = self.read_network(piece[None].astype(np.int64), least) if model else [None]
            for stream in self.streams:
                stream.read(piece, hidden[0])
        if model:
            self.decoder.repeat(samples)
            self.log_p = self.log_p.expand(samples, -1)

    def read_network(self, tokens: np.ndarray | Tensor, least: int = 0) -> np.ndarray:
        """The states [rows, L, D] after tokens [rows, L]. least: as in StreamModel.segment()."""
        if not self.memory and self.decoder.offset % self.segment == 0:
            self.decoder.restart(len(tokens))
        with self.runtime.autocast(), self.runtime.disable_compile():
            tokens = torch.as_tensor(tokens, dtype=torch.int64, device=self.runtime.device)
            self.log_p = self.decoder.read(tokens, least)
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


def generate_tokens(
    predictor: Predictor,
    sampling: Sampling,
    generator: torch.Generator,
    pieces: list[bytes],
    begun: bytes,
    samples: int,
) -> Iterator[list[int]]:
    """Yield the next token of each sample without end. pieces [V]: their texts. begun: its first characters."""
    left = [begun] * samples
    while True:
        log_p = predictor.predict()
        if any(left):
            fits = torch.tensor([which_fit(pieces, own) for own in left], device=log_p.device)
            log_p = log_p.where(fits, -torch.inf)
        tokens = sampling.draw(log_p, generator)  # [samples]
        yield tokens.tolist()
        left = [own[len(pieces[token]) :] for own, token in zip(left, tokens.tolist(), strict=True)]
        predictor.read(tokens)


def which_fit(pieces: list[bytes], begun: bytes) -> list[bool]:
    """Which pieces [V] a text may begin with that begins with `begun`."""
    return [piece.startswith(begun) or (piece != b"" and begun.startswith(piece)) for piece in pieces]


class TextWriter:
    """Turns the tokens of a sample into text one by one, until it is_done.

    prompt: the tokens before the first one. begun: the spaces with which the new text begins, which are not written.
    stops: the text ends before the first of them. lines: it ends after so many lines; 0: no limit.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt: np.ndarray, stops: Sequence[str] = (), lines: int = 0, begun: bytes = b""
    ):
        self.pieces, self.line_end, self.lines = vocabulary.pieces(), vocabulary.line_end, lines
        self.stops = [stop.encode("utf-8", "surrogateescape") for stop in stops]
        self.begins_with_space, self.is_done, self.begun = vocabulary.tokenizer.begins_with_space, False, begun
        self.at_start = not len(prompt) or prompt[-1] == self.line_end
        self.text, self.sent = bytearray(), 0  # sent: bytes that write() has returned

    def write(self, token: int) -> bytes:
        """The text that a token adds. What may be the beginning of a stop waits for the next tokens."""
        if self.is_done:
            return b""
        piece = self.pieces[token]
        self.text += piece.removeprefix(b" ") if self.at_start and self.begins_with_space else piece[len(self.begun) :]
        self.begun, self.at_start = self.begun[len(piece) :], token == self.line_end
        ends = [self.text.find(stop, self.sent) for stop in self.stops]
        if 0 < self.lines <= self.text.count(b"\n"):
            ends.append(len(b"\n".join(self.text.split(b"\n")[: self.lines])))
        if found := [end for end in ends if end >= 0]:
            self.is_done, self.text = True, self.text[: min(found)]
            return self.rest()
        waiting = (size for stop in self.stops for size in range(1, len(stop)) if self.text.endswith(stop[:size]))
        return self.rest(max(waiting, default=0))

    def rest(self, waiting: int = 0) -> bytes:
        """The text that has not been returned, without the last bytes that wait."""
        new = bytes(self.text[self.sent : len(self.text) - waiting])
        self.sent += len(new)
        return new
