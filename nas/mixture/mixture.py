"""A predictor as a mixture of a network, a cache of the stream, and counts of the training text.

    p(token) = sum over parts of w_part * p_part(token)

The weights w come from a gate, which sees only what is known before the token: which orders know the context, how often
and how surely, and the last hidden state of the network. N tokens, P parts, V vocabulary, D width of the network.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nas.core.config import MixtureOptions
from nas.core.errors import InputError
from nas.core.files import read_yaml, write_text
from nas.core.run_folder import MIXTURE, RESULTS
from nas.data.corpus import Corpus
from nas.data.sources import sha256_of
from nas.data.vocabulary import VOCABULARY, VOCABULARY_FILE
from nas.mixture.cache import FEATURES, Cache, decays_of
from nas.mixture.counts import Counts, corpus_counts, counts_distribution, describe_counts, link_counts, read_counts
from nas.mixture.gate import MOST_TOKENS, SMALLEST, fit_gate, masked_softmax, usual_range

FORMAT = "par-mixture/1"
SETTINGS, COUNTS = "mixture.json", "counts"
NETWORK = "network"


class Seen(NamedTuple):
    """What parts predict of some tokens. p [N, P]: the probability of each token, 0 without a vote. votes [N, P].
    features [N, F], hidden [N, D]: the inputs of the gate.
    """

    p: np.ndarray
    votes: np.ndarray
    features: np.ndarray
    hidden: np.ndarray


class Mixture:
    """The parts and the gate. cache: its orders. counts: their folder, None: no counts. order: of the counts.

    width: D, 0: no network. gate: its weights [F + D + 1, P], None: not fitted yet. bounds: of its features [2, F].
    vocabulary: the digest of the ids.
    """

    def __init__(
        self,
        cache: list[int],
        counts: Path | None,
        order: int,
        width: int,
        vocab_size: int,
        vocabulary: str,
        gate: np.ndarray | None = None,
        bounds: np.ndarray | None = None,
    ):
        self.cache, self.order, self.width = cache, order if counts else 0, width
        self.gate, self.bounds = gate, bounds
        self.vocab_size, self.vocabulary, self.folder = vocab_size, vocabulary, counts
        self.counts = Counts.load(counts) if counts else None
        self.parts = [NETWORK] * bool(width) + [f"cache {order}" for order in cache] + ["counts"] * bool(counts)

    def start(self) -> "Stream":
        """A stream that begins."""
        return Stream(self)

    def look(self, tokens: np.ndarray, nll: np.ndarray | None, hidden: np.ndarray | None) -> Seen:
        """What the parts predict of tokens[1:], of a stream that begins with tokens [N + 1].

        nll [N], hidden [N, D]: of the network, for each of these tokens; None without one.
        """
        stream = self.start()
        stream.read(tokens[:1])
        seen = stream.read(tokens[1:])
        if self.width:
            seen.p[:, 0] = np.exp(-nll)
            seen = seen._replace(hidden=hidden)
        return seen

    def fit(self, seen: Seen) -> np.ndarray:
        """Fit the gate. Returns the nll [N] of the same tokens; each half has the weights fitted to the other half."""
        middle, found = len(seen.p) // 2, []
        halves = slice(0, middle), slice(middle, None)
        for other, own in zip(halves[::-1], halves, strict=True):
            part = Seen(*(array[own] for array in seen))
            self.fit_to(Seen(*(array[other] for array in seen)))
            found.append(self.mix(part)[0])
        self.fit_to(seen)
        return np.concatenate(found)

    def fit_to(self, seen: Seen) -> None:
        step = -(-len(seen.p) // MOST_TOKENS) or 1
        features = seen.features[::step]
        self.bounds = usual_range(features) if len(features) else np.zeros((2, features.shape[1]))
        inputs = np.append(np.clip(features, *self.bounds), seen.hidden[::step], axis=1)
        self.gate = fit_gate(inputs, seen.p[::step], seen.votes[::step])

    def mix(self, seen: Seen, without: tuple[str, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """The nll [N], and how much each part gives of the probability [N, P]. without: parts that get no vote."""
        votes = seen.votes & ~np.isin(self.parts, without)
        joint = masked_softmax(self.logits(seen), votes) * seen.p
        total = joint.sum(axis=1, keepdims=True)
        return -np.log(np.maximum(total[:, 0], SMALLEST)), joint / np.maximum(total, SMALLEST)

    def logits(self, seen: Seen) -> np.ndarray:
        """Of the gate [N, P]."""
        known, hidden = np.split(self.gate[:-1].astype(np.float32), [seen.features.shape[1]])
        features = np.clip(seen.features, *self.bounds.astype(np.float32))
        return features @ known + seen.hidden @ hidden + self.gate[-1]

    def save(self, folder: Path) -> None:
        """Write mixture.json and the folder of the counts."""
        if self.folder:
            link_counts(self.folder, folder / COUNTS)
        folder.mkdir(exist_ok=True)
        files = sorted(self.folder.iterdir()) if self.folder else []
        content = {
            "format": FORMAT,
            "parts": self.parts,
            "cache": self.cache,
            "decays": decays_of(self.cache),
            "counts": self.order,
            "width": self.width,
            "vocab_size": self.vocab_size,
            "vocabulary_sha256": self.vocabulary,
            "counts_sha256": {file.name: sha256_of(file) for file in files},
            "gate": self.gate.tolist(),
            "bounds": self.bounds.tolist(),
        }
        write_text(folder / SETTINGS, json.dumps(content) + "\n")


def open_mixture(options: MixtureOptions, corpus: Corpus, width: int) -> Mixture | None:
    """The mixture of a configuration beside a network of a width, 0: without one; None if there is nothing beside it.

    Raises InputError if the training text is too short to count.
    """
    if not options.cache and not options.counts:
        return None
    if (count := len(corpus.tokens("train"))) < options.counts:
        raise InputError(f"the train split has {count} tokens: mixture.counts={options.counts} needs as many")
    counts = corpus_counts(corpus, options.counts) if options.counts else None
    digest = vocabulary_digest(corpus.folder / VOCABULARY)
    return Mixture(options.cache, counts, options.counts, width, corpus.vocab_size, digest)


def load_mixture(folder: Path) -> Mixture | None:
    """The mixture of a run folder or an export; None if it has none. Raises InputError if it is damaged."""
    file, counts = folder / MIXTURE / SETTINGS, folder / MIXTURE / COUNTS
    if not file.exists():
        if (folder / RESULTS).exists() and read_yaml(folder / RESULTS).get("mixture"):
            raise InputError(f"{file} is missing; remove {folder / RESULTS} and continue the training with --resume")
        return None
    try:
        content = json.loads(file.read_text())
        valid = content["format"] == FORMAT and content["decays"] == decays_of(content["cache"])
    except (ValueError, TypeError, KeyError):
        valid = False
    if not valid:
        raise InputError(f"{file} is damaged, or of another version; this one reads {FORMAT!r} with its own decays")
    if content["vocabulary_sha256"] != vocabulary_digest(folder / VOCABULARY):
        raise InputError(f"{file} belongs to another vocabulary than that in {folder / VOCABULARY}; copy both together")
    for name, digest in content["counts_sha256"].items():
        if not (counts / name).exists() or sha256_of(counts / name) != digest:
            raise InputError(f"{counts / name} is missing or damaged: it is not the file of {SETTINGS}")
    about = content["width"], content["vocab_size"], content["vocabulary_sha256"]
    about = *about, np.array(content["gate"]), np.array(content["bounds"])
    return Mixture(content["cache"], counts if content["counts"] else None, content["counts"], *about)


def vocabulary_digest(folder: Path) -> str:
    """A digest of the files of a vocabulary."""
    files = read_yaml(folder / VOCABULARY_FILE)["sha256"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class Stream:
    """Reads one stream with the parts beside the network, and predicts its next token."""

    def __init__(self, mixture: Mixture):
        self.mixture, self.cache = mixture, Cache(mixture.cache)
        self.nodes = np.full(max(1, mixture.order), -1, np.int64)  # of the counts

    def empty(self, count: int) -> tuple[Seen, slice, slice, slice]:
        """Room for what is known of tokens, and the columns of the cache, and of both features."""
        mixture, first = self.mixture, bool(self.mixture.width)
        orders, sizes = len(mixture.cache), FEATURES * len(mixture.cache)
        more = max(0, 3 * mixture.order - 2)
        p = np.zeros((count, len(mixture.parts)))
        features, hidden = (np.zeros((count, size), np.float32) for size in (sizes + more, 0))
        seen = Seen(p, np.ones(p.shape, bool), features, hidden)
        return seen, slice(first, first + orders), slice(sizes), slice(sizes, sizes + more)

    def read(self, tokens: np.ndarray) -> Seen:
        """Predict each of the next tokens, and read it. The columns of the network stay empty."""
        seen, cache, cached, counted = self.empty(len(tokens))
        tokens, counts = np.ascontiguousarray(tokens, np.int64), self.mixture.counts
        if cached.stop:
            self.cache.read(tokens, seen.p[:, cache], seen.features[:, cached])
            seen.votes[:, cache] = seen.features[:, cached][:, ::FEATURES] > 0
        if counts:
            read_counts(tokens, *counts, self.nodes, seen.p[:, -1], seen.features[:, counted])
        return seen

    def predict(self, log_p: np.ndarray | None, hidden: np.ndarray | None) -> np.ndarray:
        """The distribution of the next token [V]. log_p [V], hidden [D]: of the network."""
        seen, cache, cached, counted = self.empty(1)
        mixture, counts = self.mixture, self.mixture.counts
        self.cache.describe(seen.features[0, cached])
        seen.votes[:, cache] = seen.features[:, cached][:, ::FEATURES] > 0
        if counts:
            describe_counts(counts.backoff, counts.starts, self.nodes, seen.features[0, counted])
        if mixture.width:
            seen = seen._replace(hidden=hidden[None])
        weights = masked_softmax(mixture.logits(seen), seen.votes)[0]
        found = np.zeros(mixture.vocab_size)
        if counts:
            counts_distribution(*counts, self.nodes, found)
            found *= weights[-1]
        if mixture.width:
            found += weights[0] * np.exp(log_p)
        self.cache.add(np.ascontiguousarray(weights[cache]), found)
        return found
