"""Counts: an n-gram model of the training text with interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998,
"An Empirical Study of Smoothing Techniques for Language Modeling", section 3), in sorted arrays.

    p(token | context) = share(context, token) + rest(context) * p(token | shorter context)

The share of an n-gram is its discounted count, relative to all of its context, and rest is what the shares leave. So
distributions sum to 1 whichever n-grams are left out, and however shares are rounded.

An n-gram of order n is a node of a trie. Its children are the n-grams of order n + 1 that begin with it, sorted by
their last token. The nodes of one order follow those of the order before, so a node is an index. V tokens, G nodes.
"""

import io
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit
from scipy.special import expit, logit

from nas.core.errors import InputError
from nas.data.corpus import Corpus

USUAL_DISCOUNTS = 0.5, 1.0, 1.5  # of n-grams that occur once, twice and more often, where the text is too short
CODES = 256  # of shares
SMALLEST = 1e-9  # share: that of a token that the text lacks is 0
LARGEST_SUM = 1 - 1e-6  # of the shares in a context
PACKINGS, FULL = 6, 0.99  # attempts to fill a size, and the share of it that they aim at


class Counts(NamedTuple):
    """The trie. last: the last token of each node [G]. share: float32 [G]; of a single token it is the probability.

    rest: float32, of the nodes below the highest order. starts: the first child of each of these nodes, and the end of
    the last children, uint32.
    """

    last: np.ndarray
    share: np.ndarray
    rest: np.ndarray
    starts: np.ndarray

    @classmethod
    def load(cls, file: Path, vocab_size: int) -> "Counts":
        """Read an .npz file of PackedCounts. Raises InputError if it is missing or damaged, or of other tokens."""
        try:
            with np.load(file) as content:
                return PackedCounts(**content).unpack(vocab_size)
        except Exception:  # those of damaged files have no base of their own
            raise InputError(f"{file} is missing or damaged: it must hold counts of {vocab_size} tokens") from None


class PackedCounts(NamedTuple):
    """The trie in a file. codes: the index of each node's share among `values`, uint8 [G]. values: float32 [CODES].

    last: as in Counts. children: their number, of each node below the highest order.
    """

    last: np.ndarray
    codes: np.ndarray
    values: np.ndarray
    children: np.ndarray

    def to_bytes(self) -> bytes:
        """The content of an .npz file."""
        np.savez_compressed(file := io.BytesIO(), **self._asdict())
        return file.getvalue()

    def unpack(self, vocab_size: int) -> Counts:
        """Raises ValueError if the arrays are not of one trie, because compiled loops use them as places unchecked."""
        starts = np.cumsum(np.append(vocab_size, self.children.astype(np.int64)))
        nodes, share = len(self.last), self.values.astype(np.float64)[self.codes]
        first = self.last[:vocab_size]
        valid = self.last.dtype.kind == "u" and starts[-1] == nodes == len(share) and len(first) == vocab_size
        if not valid or self.last.max() >= vocab_size:
            raise ValueError("arrays of different tries")
        rest = 1 - sum_of_children(share, vocab_size, self.children)
        if not (np.isfinite(rest).all() and min(rest.min(), share.min()) >= 0):
            raise ValueError("shares below 0, or with a sum above 1")
        share[:vocab_size] += rest[0] / vocab_size
        return Counts(self.last, share.astype(np.float32), rest[1:].astype(np.float32), starts.astype(np.uint32))


def sum_of_children(share: np.ndarray, vocab_size: int, children: np.ndarray) -> np.ndarray:
    """The summed shares [G] of the children of the empty context and of each node that has a number of them."""
    parents = np.repeat(np.arange(len(children) + 1), np.append(vocab_size, children))
    return np.bincount(parents, share, len(children) + 1)


class Order(NamedTuple):
    """The n-grams of one order. parents: the index of each one's context in the order before.

    lost: about the nats that the training text loses without it (relative entropy, Stolcke 1998, arXiv cs/0006025; its
    share goes to the shorter context, where tokens that do not follow the context gain). last, share: as in Counts.
    """

    last: np.ndarray
    parents: np.ndarray
    share: np.ndarray
    lost: np.ndarray


def count_ngrams(tokens: np.ndarray, vocab_size: int, order: int) -> list[Order]:
    """The n-grams up to an order of a text [T]. The first token of the text counts as one with a token before it."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32  # small types, because texts may be large
    tokens = tokens.astype(np.uint32)
    ranks, own = tokens, np.bincount(tokens, minlength=vocab_size)  # the node of each place, within its order
    last, seen, first = [np.arange(vocab_size, dtype=dtype)], [own], [int(tokens[0])]
    parents, suffixes = [np.zeros(vocab_size, np.uint32)], [0]  # of each order, as last and seen
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
        seen.append(number)
        first.append(int(ranks[0]))
    orders, p, size = [], np.array([1 / vocab_size]), 1
    for n, number in enumerate(seen):
        own, occurrences = parents[n], np.bincount(parents[n], number, size)  # of each context
        if n + 1 < len(seen):  # below the highest order: the number of different tokens before
            number = np.bincount(suffixes[n + 1], minlength=len(last[n])).astype(np.uint32)
            number[first[n]] += 1
        total = np.maximum(np.bincount(own, number, size), 1)
        share = (number - discounts_of(number)[np.minimum(number, 3)]) / total[own]
        rest, shorter = (1 - np.bincount(own, share, size))[own], p[suffixes[n]]
        p, all_rest = share + rest * shorter, share + rest  # p: of each n-gram's last token
        others = rest * np.maximum(0, 1 - np.bincount(own, np.broadcast_to(shorter, own.shape), size))[own]
        lost = occurrences[own] * (p * np.log(p / (all_rest * shorter)) - others * np.log(all_rest / rest))
        orders.append(Order(last[n], own, share.astype(np.float32), lost.astype(np.float32)))
        p, size = p.astype(np.float32), len(number)
        seen[n] = suffixes[n] = None
    return orders


def discounts_of(number: np.ndarray) -> np.ndarray:
    """The discounts [4] of n-grams with a count of 0, 1, 2, and 3 or more. number: of each n-gram of an order."""
    one, two, three, four = np.bincount(np.minimum(number, 5), minlength=6)[1:5].astype(float)
    if min(one, two, three, four) == 0:
        return np.array([0, *USUAL_DISCOUNTS])
    y = one / (one + 2 * two)
    found = np.array([0, 1 - 2 * y * two / one, 2 - 3 * y * three / two, 3 - 4 * y * four / three])
    return found if (np.diff(found) >= 0).all() else np.array([0, *USUAL_DISCOUNTS])


def pack(orders: list[Order], most: int | None = None) -> PackedCounts:
    """Single tokens, and the n-grams without which the text loses most, at most `most` of them; None: all.

    Shares are rounded to the nearest of CODES values, which have the same distances in log odds.
    """
    lost = [order.lost for order in orders]
    for n in range(len(orders) - 1, 1, -1):  # an n-gram stays with its context
        lost[n - 1] = lost[n - 1].copy()
        np.maximum.at(lost[n - 1], orders[n].parents, lost[n])
    kept, found = [np.ones(len(own), bool) for own in lost], np.concatenate([np.zeros(0), *lost[1:]])
    if most is not None and most < len(found):
        limit = np.partition(found, -most - 1)[-most - 1]
        kept[1:] = [own > limit for own in lost[1:]]
    last, share = (
        np.concatenate([getattr(order, name)[own] for order, own in zip(orders, kept, strict=True)])
        for name in ("last", "share")
    )
    children = [np.zeros(0, np.int64)]
    for (before, own), (stays, own_stay) in zip(pairwise(orders), pairwise(kept), strict=True):
        children.append(np.bincount(own.parents[own_stay], minlength=len(before.last))[stays])
    children, odds = np.concatenate(children), logit(np.maximum(share, SMALLEST).astype(float))
    places = np.linspace(odds.min(), odds.max(), CODES)
    values, codes = expit(places).astype(np.float32), np.searchsorted((places[1:] + places[:-1]) / 2, odds)
    codes, vocab_size = codes.astype(np.uint8), len(orders[0].last)
    # Rounding may push a sum above 1.
    while (full := sum_of_children(values[codes], vocab_size, children) > LARGEST_SUM).any():
        lower = np.repeat(full, np.append(vocab_size, children)) & (codes > 0)
        if not lower.any():
            break
        codes[lower] -= 1
    return PackedCounts(last, codes, values, children.astype(np.uint16 if vocab_size < 1 << 16 else np.uint32))


def pack_within(orders: list[Order], size: int) -> bytes:
    """The file of about the most n-grams that fit into a size in bytes. Raises InputError if single tokens do not."""
    many = sum(len(order.last) for order in orders[1:])
    few, best, large = 0, pack(orders, 0).to_bytes(), pack(orders).to_bytes()
    if len(best) > size:
        raise InputError(
            f"the counts of single tokens take {len(best):,} bytes, and only {size:,} are left for counts; give a "
            "larger mixture.size or search.size.target, or a smaller vocabulary"
        )
    if len(large) <= size:
        return large
    for _ in range(PACKINGS):
        most = few + max(0, int((many - few) * (FULL * size - len(best)) / (len(large) - len(best))))  # almost linear
        content = pack(orders, most).to_bytes()
        if len(content) > size:
            many, large = most, content
            continue
        few, best = most, content
        if len(best) >= (2 * FULL - 1) * size:
            break
    return best


def corpus_counts(corpus: Corpus, order: int, size: int | None) -> Path:
    """The file of the counts of all of a corpus's training text, of at most `size` bytes. They are counted once, beside
    its tokens. Raises InputError if that is too small.
    """

    def write(file: Path) -> None:
        orders = count_ngrams(corpus.tokens("train"), corpus.vocab_size, order)
        file.write_bytes(pack(orders).to_bytes() if size is None else pack_within(orders, size))

    return corpus.keep(f"ngrams-{order}{'' if size is None else f'-{size}'}.npz", write)


@njit(cache=True)
def describe_counts(rest, starts, nodes, features, place):
    """Write what is known before the next token to features [place]: for each length of a context, whether it is the
    longest one, and if so the logarithm of its number of children and its rest; at last the logarithm of that.
    """
    features[place], length = 0, len(nodes) - 1
    while length > 0 and (nodes[length] < 0 or starts[nodes[length]] == starts[nodes[length] + 1]):
        length -= 1
    if length:
        node = nodes[length]
        features[place, 3 * length - 3] = 1
        features[place, 3 * length - 2] = np.log(np.float64(starts[node + 1] - starts[node]))
        features[place, 3 * length - 1] = rest[node]
        features[place, -1] = np.log(rest[node] + 1e-4)


@njit(cache=True)
def read_counts(tokens, last, share, rest, starts, nodes, found, features):
    """Predict each token and read it. nodes [order]: the node of the last n tokens, or -1, for n from 1; it is changed.

    Writes the probabilities to found [T], and what was known before each token to features [T, 3 * order - 2].
    """
    highest = len(nodes) - 1
    for place in range(len(tokens)):
        token, factor, total = tokens[place], 1.0, 0.0
        describe_counts(rest, starts, nodes, features, place)
        for length in range(highest, 0, -1):
            node, child = nodes[length], np.int64(-1)
            if node >= 0:
                begin, end = np.int64(starts[node]), np.int64(starts[node + 1])
                index = begin + np.searchsorted(last[begin:end], token)
                if index < end and last[index] == token:
                    child = index
                    total += factor * share[child]
                factor *= rest[node]
            if length < highest:
                nodes[length + 1] = child
        found[place] = total + factor * share[token]
        if highest:
            nodes[1] = token


@njit(cache=True)
def counts_distribution(last, share, rest, starts, nodes, weight, found):
    """Write the distribution of the next token times a weight to found [V]. nodes: as in read_counts()."""
    highest, factors = len(nodes) - 1, np.full(len(nodes), weight)
    for length in range(highest, 0, -1):
        factors[length - 1] = factors[length] * (rest[nodes[length]] if nodes[length] >= 0 else 1.0)
    for token in range(len(found)):
        found[token] = factors[0] * share[token]
    for length in range(1, highest + 1):
        if nodes[length] >= 0:
            for child in range(starts[nodes[length]], starts[nodes[length] + 1]):
                found[last[child]] += factors[length] * share[child]
