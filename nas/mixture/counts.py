"""Counts: an n-gram model of the training text with interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998,
"An Empirical Study of Smoothing Techniques for Language Modeling", section 3), in sorted arrays.

An n-gram of order n is a node of a trie. Its children are the n-grams of order n + 1 that begin with it, sorted by
their last token. The nodes of one order follow those of the order before, so a node is an index. V tokens, G nodes.
"""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from nas.core.errors import InputError
from nas.data.corpus import Corpus

USUAL_DISCOUNTS = 0.5, 1.0, 1.5  # of n-grams that occur once, twice and more often, where the text is too short


class Counts(NamedTuple):
    """The trie. last: the last token of each node [G]. p: its probability after the tokens before it, float32 [G].

    backoff: the factor of shorter contexts for tokens that are no child, float32, of the nodes below the highest order.
    starts: the first child of each of these nodes, and the end of the last children, uint32.
    """

    last: np.ndarray
    p: np.ndarray
    backoff: np.ndarray
    starts: np.ndarray

    def save(self, folder: Path) -> None:
        """Write an .npy file for each array."""
        folder.mkdir(exist_ok=True)
        for name, array in self._asdict().items():
            np.save(folder / f"{name}.npy", array)

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> "Counts":
        """Map the files into memory. Raises InputError if one is missing or damaged, or for another vocabulary."""
        try:
            counts = cls(*(np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in cls._fields))
        except (OSError, ValueError, EOFError):
            raise InputError(f"{folder} is damaged: it must hold last, p, backoff and starts.npy") from None
        nodes = len(counts.last)
        same = len(counts.p) == nodes and len(counts.starts) == len(counts.backoff) + 1 and counts.starts[-1] == nodes
        # Compiled loops use both as places without a check.
        if not same or not (np.diff(counts.starts.astype(np.int64)) >= 0).all() or counts.last.max() >= vocab_size:
            raise InputError(f"{folder} is damaged: its arrays are not of one table of {vocab_size} tokens")
        return counts


def count_ngrams(tokens: np.ndarray, vocab_size: int, order: int) -> Counts:
    """The n-grams up to an order of a text [T]. The first token of the text counts as one with a token before it."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32  # small types, because texts may be large
    tokens = tokens.astype(np.uint32)
    ranks, own = tokens, np.bincount(tokens, minlength=vocab_size)  # the node of each place, within its order
    last, counts, first = [np.arange(vocab_size, dtype=dtype)], [own], [int(tokens[0])]
    parents, suffixes = [None], [None]  # of each order, as last and counts
    for n in range(2, min(order, len(tokens)) + 1):
        keys = ranks[: len(tokens) - n + 1] * np.int64(vocab_size) + tokens[n - 1 :]
        places = np.argsort(keys)
        keys = keys[places]
        begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        number = np.diff(np.append(begins, len(keys))).astype(np.uint32)
        suffixes.append(ranks[places[begins] + 1])
        ranks = np.empty(len(keys), np.uint32)
        ranks[places] = np.repeat(np.arange(len(begins), dtype=np.uint32), number)
        parents.append((keys[begins] // vocab_size).astype(np.uint32))
        last.append((keys[begins] % vocab_size).astype(dtype))
        counts.append(number)
        first.append(int(ranks[0]))
    for n in range(len(counts) - 1):  # below the highest order: the number of different tokens before
        counts[n] = np.bincount(suffixes[n + 1], minlength=len(last[n])).astype(np.uint32)
        counts[n][first[n]] += 1
    p, backoff, starts, nodes = [1 / vocab_size], [], [], np.cumsum([0, *map(len, last)])
    for n, number in enumerate(counts):
        lost = discounts_of(number)[np.minimum(number, 3)]
        if n == 0:
            p.append((number - lost) / number.sum() + lost.sum() / number.sum() / vocab_size)
            continue
        size, parent = len(last[n - 1]), parents[n]
        total = np.bincount(parent, number, size)
        backoff.append(np.where(total, np.bincount(parent, lost, size) / np.maximum(total, 1), 1).astype(np.float32))
        own = backoff[-1][parent]
        own *= p[-1][suffixes[n]]
        own += (number - lost) / total[parent]
        p.append(own.astype(np.float32))
        counts[n] = parents[n] = suffixes[n] = None
        starts.append(nodes[n] + np.cumsum(np.append(0, np.bincount(parent, minlength=size)[:-1])))
    return Counts(
        np.concatenate(last),
        np.concatenate(p[1:]).astype(np.float32),
        np.concatenate([*backoff, []]).astype(np.float32),
        np.concatenate([*starts, nodes[-1:]]).astype(np.uint32),
    )


def discounts_of(number: np.ndarray) -> np.ndarray:
    """The discounts [4] of n-grams with a count of 0, 1, 2, and 3 or more. number: of each n-gram of an order."""
    one, two, three, four = np.bincount(np.minimum(number, 5), minlength=6)[1:5].astype(float)
    if min(one, two, three, four) == 0:
        return np.array([0, *USUAL_DISCOUNTS])
    y = one / (one + 2 * two)
    found = np.array([0, 1 - 2 * y * two / one, 2 - 3 * y * three / two, 3 - 4 * y * four / three])
    return found if (np.diff(found) >= 0).all() else np.array([0, *USUAL_DISCOUNTS])


def corpus_counts(corpus: Corpus, order: int) -> Path:
    """The folder with the counts of all of a corpus's training text. They are counted once, beside its tokens."""
    folder = corpus.folder / f"counts-{order}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=corpus.folder, ignore_cleanup_errors=True) as temporary:
            count_ngrams(corpus.tokens("train"), corpus.vocab_size, order).save(whole := Path(temporary) / "counts")
            with suppress(OSError):  # another process was faster
                whole.rename(folder)
    return folder


@njit(cache=True)
def describe_counts(backoff, starts, nodes, features, place):
    """Write what is known before the next token to features [place]: for each length of a context, whether it is the
    longest one, and if so the logarithm of its number of children and its backoff; at last the logarithm of that.
    """
    features[place], length = 0, len(nodes) - 1
    while length > 0 and (nodes[length] < 0 or starts[nodes[length]] == starts[nodes[length] + 1]):
        length -= 1
    if length:
        node = nodes[length]
        features[place, 3 * length - 3] = 1
        features[place, 3 * length - 2] = np.log(np.float64(starts[node + 1] - starts[node]))
        features[place, 3 * length - 1] = backoff[node]
        features[place, -1] = np.log(backoff[node] + 1e-4)


@njit(cache=True)
def read_counts(tokens, last, p, backoff, starts, nodes, found, features):
    """Predict each token and read it. nodes [order]: the node of the last n tokens, or -1, for n from 1; it is changed.

    Writes the probabilities to found [T], and what was known before each token to features [T, 3 * order - 2].
    """
    highest = len(nodes) - 1
    for place in range(len(tokens)):
        token, factor, known = tokens[place], 1.0, False
        describe_counts(backoff, starts, nodes, features, place)
        for length in range(highest, 0, -1):
            node, child = nodes[length], np.int64(-1)
            if node >= 0:
                begin, end = np.int64(starts[node]), np.int64(starts[node + 1])
                index = begin + np.searchsorted(last[begin:end], token)
                if index < end and last[index] == token:
                    child = index
                if not known and child >= 0:
                    found[place], known = factor * p[child], True
                elif not known:
                    factor *= backoff[node]
            if length < highest:
                nodes[length + 1] = child
        if not known:
            found[place] = factor * p[token]
        if highest:
            nodes[1] = token


@njit(cache=True)
def counts_distribution(last, p, backoff, starts, nodes, weight, found):
    """Write the distribution of the next token times a weight to found [V]. nodes: as in read_counts()."""
    highest, factors = len(nodes) - 1, np.full(len(nodes), weight)
    for length in range(highest, 0, -1):
        factors[length - 1] = factors[length] * (backoff[nodes[length]] if nodes[length] >= 0 else 1.0)
    for token in range(len(found)):
        found[token] = factors[0] * p[token]
    for length in range(1, highest + 1):  # longer contexts replace what shorter ones gave
        if nodes[length] >= 0:
            for child in range(starts[nodes[length]], starts[nodes[length] + 1]):
                found[last[child]] = factors[length] * p[child]
