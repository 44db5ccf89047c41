"""What cache and counts alone predict of a text, where networks learn what they fail at, and judgements of trials."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from nas.core.config import Config, MixtureOptions
from nas.data.corpus import Corpus
from nas.mixture.counts import count_ngrams, pack
from nas.mixture.mixture import Stream, open_mixture

JUDGED_TOKENS = 20_000  # of each half of valid, that the gate of a trial is fitted to
FOLDS = 2  # of the training text, see train_nll(); 8 take longer, and networks are not better
TIMED_ROUNDS, TIMED_TOKENS, TIMED_DRAWS = 3, 20_000, 200


def train_nll(corpus: Corpus, options: MixtureOptions) -> np.ndarray | None:
    """The nll [N] of all tokens of train by cache and counts alone, in nats; None without counts, or for short texts.

    It is of all counts, whatever their size. The text has FOLDS parts. Each is a stream, and has counts of the other,
    so that it is as new as a test text.
    """
    tokens, options = corpus.tokens("train"), replace(options, size=None)
    bounds = np.linspace(0, len(tokens), FOLDS + 1).astype(int)
    if not options.counts or len(tokens) < FOLDS * options.counts:
        return None

    def compute() -> np.ndarray:
        mixture, found = open_mixture(options, corpus, 0), []
        for start, end in pairwise(bounds):
            others = np.append(tokens[:start], tokens[end:])
            mixture.table = pack(count_ngrams(others, corpus.vocab_size, options.counts)).unpack(corpus.vocab_size)
            seen = Stream(mixture).read(tokens[start:end])
            mixture.fit_to(seen)
            found.append(mixture.mix(seen)[0].astype(np.float32))
        return np.concatenate(found)

    return kept(corpus, options, f"train-nll-{FOLDS}", compute)


def judge(corpus: Corpus, options: MixtureOptions, width: int = 0, nll=None, hidden=None) -> np.ndarray | None:
    """The nll [N] of valid as trials are judged: by a mixture whose gate is fitted to few tokens; None without parts.

    width, nll, hidden: of a network, as Mixture.look() takes them; by default it is of cache and counts alone, once.
    """
    mixture = open_mixture(options, corpus, width)
    if not mixture:
        return None

    def compute() -> np.ndarray:
        return mixture.fit(mixture.look(corpus.tokens("valid"), nll, hidden), JUDGED_TOKENS)

    return compute() if width else kept(corpus, options, "valid-nll", compute)


def kept(corpus: Corpus, options: MixtureOptions, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """What compute() returns. It is computed once, and kept beside the tokens."""
    about = name, options.counts, options.size or "all", *options.cache
    file = corpus.folder / f"{'-'.join(map(str, about))}.npy"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=corpus.folder, ignore_cleanup_errors=True) as temporary:
            np.save(whole := Path(temporary) / file.name, compute())
            whole.replace(file)  # trials may do the same at once
    return np.load(file, mmap_mode="r")


def measured_ms(config: Config, corpus: Corpus, width: int) -> float:
    """Milliseconds that a mixture adds to a token of a network of a width; 0 in training, or for gumbel."""
    timing = config.search.latency.timing
    if (
        timing == "training"
        or config.search.method == "gumbel"
        or not (mixture := open_mixture(config.beside, corpus, width))
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
