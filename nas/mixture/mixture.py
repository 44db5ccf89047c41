"""A predictor as a mixture of a network, a cache of the stream, and counts of the training text.

    p(token) = sum over parts of w_part * p_part(token)

docs/mixture.md defines the parts and the gate, which gives the weights w. N tokens, P parts, V vocabulary, D width of
the network, E dimensions of its projected states.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass, field
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
from nas.mixture.counts import Counts, corpus_counts, counts_distribution, describe_counts, read_counts
from nas.mixture.gate import MOST_TOKENS, fit_gate, mix_parts
from nas.mixture.states import DIMENSIONS, StateCache, principal_directions
from nas.mixture.states import FEATURES as STATE_FEATURES

FORMAT = "par-mixture/4"
SETTINGS, COUNTS = "mixture.json", "counts.npz"
STARTS, EVERY = (64, 1024), 8  # lengths of the short streams that a gate is fitted to, and the part of the text in each
DEVIATIONS = 4  # standard deviations from the mean, beyond which features are cut off: the gate is not fitted there
SAVED = "states", "cache", "counts", "width", "vocab_size", "vocabulary_sha256"  # fields of a mixture in its file
FITTED = "gate", "bounds", "projection"


class Seen(NamedTuple):
    """What parts predict of some tokens. p [N, P]: the probability of each token, 0 without a vote.
    features [N, F], hidden [N, E]: the inputs of the gate.
    """

    p: np.ndarray
    features: np.ndarray
    hidden: np.ndarray


def joined(*parts: Seen) -> Seen:
    return Seen(*map(np.concatenate, zip(*parts, strict=True)))


@dataclass
class Mixture:
    """The parts and the gate."""

    states: int  # of the network, that the cache of states holds; 0: none
    cache: list[int]  # its orders
    counts: int  # their order; 0: none
    width: int  # D; 0: no network
    vocab_size: int
    vocabulary_sha256: str  # of the files of the ids
    file: Path | None  # of the counts
    gate: np.ndarray | None = None  # its weights [F + E + 1, P]; None: not fitted yet
    bounds: np.ndarray | None = None  # of its features [2, F]
    projection: np.ndarray = field(default_factory=lambda: np.zeros(0))  # of states, see principal_directions()

    def __post_init__(self):
        self.table = Counts.load(self.file, self.vocab_size) if self.file else None
        first, own = ["network"] * bool(self.width) + ["states"] * bool(self.states), len(self.cache)
        self.parts = first + [f"cache {order}" for order in self.cache] + ["counts"] * bool(self.counts)
        self.cached = slice(len(first), len(first) + own)  # the parts of the cache
        self.known = FEATURES * own  # the number of its features; those of the counts and of the states follow
        self.counted = slice(self.known, self.known + max(0, 3 * self.counts - 2))
        self.features = self.counted.stop + STATE_FEATURES * bool(self.states)
        self.dimensions = min(DIMENSIONS, self.width)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of what is fitted."""
        shapes = {"gate": (self.features + self.dimensions + 1, len(self.parts)), "bounds": (2, self.features)}
        return shapes | ({"projection": (self.width + 1, self.dimensions)} if self.width else {})

    def look(self, tokens: np.ndarray, nll: np.ndarray | None, hidden: np.ndarray | None) -> Seen:
        """What the parts predict of tokens[1:], of a stream that begins with tokens [N + 1].

        nll [N], hidden [N, D]: of the network, for each of these tokens; None without one.
        """
        if self.width and not self.projection.size:
            self.projection = principal_directions(hidden)
        stream, (first, others) = Stream(self), (None, None) if hidden is None else (hidden[:1], hidden[1:])
        stream.read(tokens[:1], first)
        seen = stream.read(tokens[1:], others)
        if self.width:
            seen.p[:, 0] = np.exp(-nll)
        return seen

    def votes(self, features: np.ndarray) -> np.ndarray:
        """Whether each part has a vote [N, P]."""
        votes = np.ones((len(features), len(self.parts)), bool)
        votes[:, self.cached] = features[:, : self.known : FEATURES] > 0
        if self.states:
            votes[:, 1] = features[:, -1] > 0
        return votes

    def fit(
        self, tokens: np.ndarray, nll: np.ndarray | None, hidden: np.ndarray | None, most: int = MOST_TOKENS
    ) -> np.ndarray:
        """Fit the gate to at most `most` tokens of a stream and of short ones. Returns the nll [N] of the stream; each
        half has the weights fitted to the other half. The arguments are those of look().
        """
        seen = self.look(tokens, nll, hidden)
        middle, found = len(seen.p) // 2, []
        halves = slice(0, middle), slice(middle, None)
        whole = [Seen(*(array[half] for array in seen)) for half in halves]
        short = [self.look_at_starts(tokens, nll, hidden, half) for half in halves]
        for own, other in (0, 1), (1, 0):
            self.fit_to(joined(whole[other], *short[other]), most)
            found.append(self.mix(whole[own])[0])
        self.fit_to(joined(seen, *short[0], *short[1]), most)
        return np.concatenate(found)

    def look_at_starts(self, tokens: np.ndarray, nll, hidden, half: slice) -> list[Seen]:
        """As look(), for short streams in a half. Their caches hold little, as in texts of users; the network still
        knows what precedes them.
        """
        first, end, _ = half.indices(len(tokens) - 1)
        streams = [slice(start, start + n) for n in STARTS for start in range(first, end - n + 1, EVERY * n)]
        of_network = (lambda own: (None, None)) if nll is None else (lambda own: (nll[own], hidden[own]))
        return [self.look(tokens[own.start : own.stop + 1], *of_network(own)) for own in streams]

    def fit_to(self, seen: Seen, most: int = MOST_TOKENS) -> None:
        places = np.linspace(0, len(seen.p) - 1, min(len(seen.p), most)).astype(int)
        p, features, hidden = (array[places] for array in seen)
        if not len(p):  # equal weights
            inputs = features.shape[1] + hidden.shape[1] + 1
            self.bounds, self.gate = np.zeros((2, features.shape[1])), np.zeros((inputs, p.shape[1]))
            return
        mean, reach = features.mean(axis=0), DEVIATIONS * features.std(axis=0)
        self.bounds = np.array([mean - reach, mean + reach])
        inputs = np.append(np.clip(features, *self.bounds), hidden, axis=1)
        self.gate = fit_gate(inputs, p, self.votes(features))

    def mix(self, seen: Seen, without: tuple[str, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """The nll [N], and how much each part gives of the probability [N, P]. without: parts that get no vote."""
        votes = self.votes(seen.features) & [part not in without for part in self.parts]
        nll, shares = np.empty(len(seen.p)), np.empty(seen.p.shape)
        gate = np.ascontiguousarray(self.gate.T, np.float32), self.bounds.astype(np.float32)
        mix_parts(seen.p, votes, seen.features, seen.hidden, *gate, nll, shares)
        return nll, shares

    def save(self, folder: Path) -> None:
        """Write mixture.json and the counts."""
        folder.mkdir(exist_ok=True)
        if self.counts:
            shutil.copy(self.file, folder / COUNTS)
        content = {
            "format": FORMAT,
            "parts": self.parts,
            "decays": decays_of(self.cache),
            **{name: getattr(self, name) for name in SAVED},
            "counts_sha256": sha256_of(folder / COUNTS) if self.counts else None,
            **{name: getattr(self, name).tolist() for name in FITTED},
        }
        write_text(folder / SETTINGS, json.dumps(content) + "\n")


def open_mixture(options: MixtureOptions, corpus: Corpus, width: int) -> Mixture | None:
    """The mixture of a configuration beside a network of a width, 0: without one; None if there is nothing beside it.

    Raises InputError if the training text is too short to count, or mixture.size is too small.
    """
    if not options.cache and not options.counts and not (width and options.states):
        return None
    if (count := len(corpus.tokens("train"))) < options.counts:
        raise InputError(f"the train split has {count} tokens: mixture.counts={options.counts} needs as many")
    counts = corpus_counts(corpus, options.counts, options.size) if options.counts else None
    digest = vocabulary_digest(corpus.folder / VOCABULARY)
    states = options.states if width else 0
    return Mixture(states, options.cache, options.counts, width, corpus.vocab_size, digest, counts)


def load_mixture(folder: Path) -> Mixture | None:
    """The mixture of a run folder or an export; None if it has none. Raises InputError if it is damaged."""
    file, counts = folder / MIXTURE / SETTINGS, folder / MIXTURE / COUNTS
    if not file.exists():
        if (folder / RESULTS).exists() and read_yaml(folder / RESULTS).get("mixture"):
            raise InputError(f"{file} is missing; remove {folder / RESULTS} and continue the training with --resume")
        return None
    try:
        content = json.loads(file.read_text())
        about, digest = {name: content[name] for name in SAVED}, content["counts_sha256"]
        fitted = {name: np.array(content[name], float) for name in FITTED}
        valid = content["format"] == FORMAT and content["decays"] == decays_of(content["cache"])
        other = content["vocabulary_sha256"] != vocabulary_digest(folder / VOCABULARY)
    except (ValueError, TypeError, KeyError, AttributeError):
        valid = False
    if not valid:
        raise InputError(f"{file} is damaged, or of another version; this one reads {FORMAT!r} with its own decays")
    if other:
        raise InputError(f"{file} belongs to another vocabulary than that in {folder / VOCABULARY}; copy both together")
    if about["counts"] and (not counts.exists() or sha256_of(counts) != digest):
        raise InputError(f"{counts} is missing or damaged: it is not the file of {SETTINGS}")
    mixture = Mixture(**about, file=counts if about["counts"] else None, **fitted)
    fits = all(
        fitted[name].shape == shape and np.isfinite(fitted[name]).all() for name, shape in mixture.shapes.items()
    )
    if not fits or mixture.parts != content["parts"]:
        raise InputError(f"{file} is damaged: its weights do not belong to its parts")
    return mixture


def vocabulary_digest(folder: Path) -> str:
    """A digest of the files of a vocabulary."""
    files = read_yaml(folder / VOCABULARY_FILE)["sha256"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class Stream:
    """Reads one stream with the parts beside the network, and predicts its next token."""

    def __init__(self, mixture: Mixture):
        self.mixture, self.cache = mixture, Cache(mixture.cache)
        self.nodes = np.full(max(1, mixture.counts), -1, np.int64)  # of the counts
        self.states = StateCache(mixture.dimensions, mixture.states) if mixture.states else None
        self.projection = mixture.projection.astype(np.float32)
        self.hidden = np.zeros((0, mixture.dimensions), np.float32)  # the state after the last token [0 or 1, E]

    def room(self, count: int) -> Seen:
        """Empty arrays for what is known of tokens."""
        mixture = self.mixture
        p, features = np.zeros((count, len(mixture.parts))), np.zeros((count, mixture.features), np.float32)
        return Seen(p, features, np.zeros((count, mixture.dimensions), np.float32))

    def read(self, tokens: np.ndarray, hidden: np.ndarray | None = None) -> Seen:
        """Predict each of the next tokens, and read it. The column of the network stays empty.

        hidden: the states of the network after these tokens [N, D], or after all but the last one; None: no network.
        """
        mixture, seen, tokens = self.mixture, self.room(len(tokens)), np.ascontiguousarray(tokens, np.int64)
        self.cache.read(tokens, seen.p[:, mixture.cached], seen.features[:, : mixture.known])
        if mixture.counts:
            read_counts(tokens, *mixture.table, self.nodes, seen.p[:, -1], seen.features[:, mixture.counted])
        if mixture.width:
            hidden = hidden @ self.projection[:-1] + self.projection[-1]
            before, unknown = np.append(self.hidden, hidden, axis=0), 1 - len(self.hidden)  # nothing precedes a first
            seen.hidden[unknown:] = before[: len(tokens) - unknown]
            if self.states and len(tokens) > unknown:
                own, features = seen.p[unknown:, 1], seen.features[unknown:, -STATE_FEATURES:]
                self.states.read(seen.hidden[unknown:], tokens[unknown:], own, features)
            self.hidden = before[-1:]
        return seen

    def predict(self, log_p: np.ndarray | None) -> np.ndarray:
        """The distribution of the next token [V]. log_p [V]: that of the network."""
        mixture, table, seen = self.mixture, self.mixture.table, self.room(1)
        self.cache.describe(seen.features[:, : mixture.known])
        if mixture.counts:
            describe_counts(table.rest, table.starts, self.nodes, seen.features[:, mixture.counted], 0)
        terms = self.states.terms(self.hidden, seen.features[0, -STATE_FEATURES:]) if self.states else []
        seen.p[:] = 1  # so that the shares are the weights
        weights, found = mixture.mix(seen._replace(hidden=self.hidden))[1][0], np.zeros(mixture.vocab_size)
        if mixture.counts:
            counts_distribution(*table, self.nodes, weights[-1], found)
        if mixture.width:
            found += float(weights[0]) * np.exp(log_p)
        if len(terms):
            np.add.at(found, self.states.followers, weights[1] / terms.sum() * terms.astype(float))
        self.cache.add(weights[mixture.cached], found)
        return found
