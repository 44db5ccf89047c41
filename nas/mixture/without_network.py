"""What cache and counts alone predict of a text. Networks learn where it fails."""

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from nas.core.config import Config, MixtureOptions
from nas.data.corpus import Corpus
from nas.mixture.counts import count_ngrams, pack
from nas.mixture.mixture import Mixture, Stream, open_mixture

FOLDS = 2  # of the training text, see train_nll(); 8 take longer, and networks are not better
TIMED_ROUNDS, TIMED_TOKENS, TIMED_DRAWS = 3, 20_000, 200


def train_nll(corpus: Corpus, options: MixtureOptions) -> np.ndarray | None:
    """The nll [N] of all tokens of train by cache and counts alone, in nats; None without counts, or for short texts.

    It is computed once, beside the tokens, of all counts, whatever their size. The text has FOLDS parts. Each is a
    stream, and has counts of the other, so that it is as new as a test text.
    """
    tokens = corpus.tokens("train")
    bounds = np.linspace(0, len(tokens), FOLDS + 1).astype(int)
    if not options.counts or len(tokens) < FOLDS * options.counts:
        return None

    def write(file: Path) -> None:
        mixture, found = Mixture(0, options.cache, options.counts, 0, corpus.vocab_size, "", None), []
        for start, end in pairwise(bounds):
            others = np.append(tokens[:start], tokens[end:])
            mixture.table = pack(count_ngrams(others, corpus.vocab_size, options.counts)).unpack(corpus.vocab_size)
            seen = Stream(mixture).read(tokens[start:end])
            mixture.fit_to(seen)
            found.append(mixture.mix(seen)[0].astype(np.float32))
        np.save(file, np.concatenate(found))

    name = f"train-nll-{FOLDS}-{options.counts}-{'-'.join(map(str, options.cache))}.npy"
    return np.load(corpus.keep(name, write), mmap_mode="r")


def measured_ms(config: Config, corpus: Corpus, width: int) -> float:
    """Milliseconds that a mixture adds to a token of a network of a width; 0 in training, or for gumbel."""
    timing = config.search.latency.timing
    if (
        timing == "training"
        or config.search.method == "gumbel"
        or not (mixture := open_mixture(replace(config.beside, size=None), corpus, width))
    ):
        return 0.0
    generated = timing == "generation"
    tokens, times = corpus.tokens("valid")[: TIMED_DRAWS if generated else TIMED_TOKENS].astype(np.int64), []
    nll, hidden = np.zeros(len(tokens) - 1), np.zeros((len(tokens) - 1, width), np.float32)
    mixture.fit_to(mixture.look(tokens, nll, hidden))
    for _ in range(TIMED_ROUNDS):
        stream, began = Stream(mixture), time.perf_counter()
        if not generated:
            mixture.mix(mixture.look(tokens, nll, hidden))
        for token in tokens if generated else ():
            stream.read(token[None], hidden[:1])
            stream.predict(np.zeros(mixture.vocab_size, np.float32))
        times.append(time.perf_counter() - began)
    return 1000 * min(times) / len(tokens)
