"""The cache: for each order n, decayed counts of what followed the last n - 1 tokens in the stream so far (Kuhn and De
Mori 1990, "A Cache-Based Natural Language Model for Speech Recognition"; Grave et al. 2017, arXiv 1612.04426).

docs/mixture.md defines it. Records of contexts and of their followers lie in one array, found by a hash table with open
addressing. Counts are kept in units of the present weight, which grows by 1 / decay with each token, so that old ones
need no work.
"""

import numpy as np
from numba import njit

DECAYS = {1: 0.998, 2: 0.9995, 3: 0.9998}  # by order
LONG_DECAY = 0.9999  # of higher orders
LARGEST = 1e200  # unit of counts
FEATURES = 4  # of each order
RECORD = np.dtype([("key", "u8"), ("count", "f8"), ("top", "f8"), ("link", "i4"), ("number", "i4")])
ORDERS = 16  # the lowest bits of a key hold the index of its order


def decays_of(orders: list[int]) -> list[float]:
    return [DECAYS.get(order, LONG_DECAY) for order in orders]


class Cache:
    """The decayed counts of one stream. orders: different numbers from 1.

    The record of a context has the sum of its counts, the highest one (`top`), the index of its last new follower, and
    their number. The record of a follower has its count, the index of the one before it, and its token.
    """

    def __init__(self, orders: list[int]):
        self.orders = np.array(orders, dtype=np.int64)
        self.decays = np.array(decays_of(orders))
        self.records, self.slots = np.zeros(1 << 10, RECORD), np.full(1 << 11, -1, np.int32)
        self.units = np.ones(len(orders))
        self.recent = np.zeros(max(orders, default=1), np.int64)  # the last tokens, the last one first
        self.sizes = np.zeros(2, np.int64)  # records, and tokens that were read

    def reserve(self, tokens: int) -> None:
        """Make room for the records of this number of tokens."""
        needed, size = int(self.sizes[0]) + 2 * len(self.orders) * tokens, len(self.records)
        if needed > size:
            while size < needed:
                size *= 2
            self.records = np.append(self.records, np.zeros(size - len(self.records), RECORD))
            self.slots = np.full(2 * size, -1, np.int32)
            place_records(self.slots, self.records, self.sizes[0])

    def read(self, tokens: np.ndarray, found: np.ndarray, features: np.ndarray) -> None:
        """Predict each token [T] and read it. Writes the probabilities to found [T, orders], 0 without a vote, and what
        was known before to features [T, orders * FEATURES].
        """
        self.reserve(len(tokens))
        read_tokens(tokens, *self.arrays(), found, features)

    def describe(self, features: np.ndarray) -> None:
        """Write what is known of the next token to features [1, orders * FEATURES]."""
        describe_next(*self.arrays(), features)

    def add(self, weights: np.ndarray, out: np.ndarray) -> None:
        """Add the distributions of the next token, times the weights [orders], to out [V]."""
        add_followers(*self.arrays(), weights, out)

    def arrays(self) -> tuple:
        return self.orders, self.decays, self.records, self.slots, self.units, self.recent, self.sizes


@njit(cache=True)
def extend(bits, token):
    """The hash of some tokens, and another one: the bits of their sum are scattered."""
    bits = bits * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token + 1)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@njit(cache=True)
def hash_recent(recent, hashes):
    """Write a hash of the last n tokens to hashes [n], for all n."""
    hashes[0] = np.uint64(0)
    for length in range(len(recent)):
        hashes[length + 1] = extend(hashes[length], recent[length])


@njit(cache=True)
def keyed(bits, index):
    """The key of a hash in an order."""
    return (bits & ~np.uint64(ORDERS - 1)) | np.uint64(index)


@njit(cache=True)
def find(slots, records, key):
    """The place of a key among the slots. It holds the index of the key's record; -1: there is none yet."""
    mask = np.uint64(len(slots) - 1)
    place = (key >> np.uint64(4)) & mask
    while slots[place] >= 0 and records[slots[place]].key != key:
        place = (place + np.uint64(1)) & mask
    return place


@njit(cache=True)
def place_records(slots, records, count):
    for index in range(count):
        slots[find(slots, records, records[index].key)] = index


@njit(cache=True)
def describe_context(records, record, unit, features, place, first):
    """Write whether an order has a vote, and if so the logarithms of the sum of its counts and of the number of
    followers, and the share of the most frequent one, to features [place, first:]. record: of its context, -1: none.
    unit: of counts.
    """
    features[place, first : first + FEATURES] = 0
    if record >= 0 and records[record].count > 0:
        own = records[record]
        features[place, first], features[place, first + 1] = 1, np.log(own.count / unit + 1e-6)
        features[place, first + 2], features[place, first + 3] = np.log(float(own.number)), own.top / own.count


@njit(cache=True)
def find_contexts(orders, records, slots, recent, sizes):
    """The record of the present context of each order [orders], -1: none."""
    hashes, contexts = np.zeros(len(recent) + 1, np.uint64), np.full(len(orders), -1, np.int32)
    hash_recent(recent, hashes)
    for index in range(len(orders)):
        if sizes[1] >= orders[index] - 1:
            contexts[index] = slots[find(slots, records, keyed(hashes[orders[index] - 1], index))]
    return contexts


@njit(cache=True)
def describe_next(orders, decays, records, slots, units, recent, sizes, features):
    contexts = find_contexts(orders, records, slots, recent, sizes)
    for index in range(len(orders)):
        describe_context(records, contexts[index], units[index], features, 0, index * FEATURES)


@njit(cache=True)
def new_record(slots, records, sizes, key):
    index = sizes[0]
    records[index].key, records[index].link = key, -1  # the rest of an unused record is 0
    slots[find(slots, records, key)] = index
    sizes[0] += 1
    return np.int32(index)


@njit(cache=True)
def read_tokens(tokens, orders, decays, records, slots, units, recent, sizes, found, features):
    keys, contexts = np.zeros((len(orders), 2), np.uint64), np.zeros((len(orders), 2), np.int32)
    hashes, growth = np.zeros(len(recent) + 1, np.uint64), 1 / decays
    for place in range(len(tokens)):
        token = tokens[place]
        hash_recent(recent, hashes)
        for index in range(len(orders)):  # apart from the next loop, so that the memory is read for all orders at once
            bits, known = hashes[orders[index] - 1], sizes[1] >= orders[index] - 1
            keys[index, 0], keys[index, 1] = keyed(bits, index), keyed(extend(bits, token), index)
            for level in range(2):
                contexts[index, level] = slots[find(slots, records, keys[index, level])] if known else -1
        for index in range(len(orders)):
            context, follower, unit = contexts[index, 0], contexts[index, 1], units[index]
            describe_context(records, context, unit, features, place, index * FEATURES)
            found[place, index] = 0.0
            if features[place, index * FEATURES] and follower >= 0:
                found[place, index] = records[follower].count / records[context].count
            if sizes[1] >= orders[index] - 1:
                if context < 0:
                    context = new_record(slots, records, sizes, keys[index, 0])
                if follower < 0:
                    follower = new_record(slots, records, sizes, keys[index, 1])
                    records[follower].link, records[follower].number = records[context].link, token
                    records[context].link = follower
                    records[context].number += 1
                records[follower].count += unit
                records[context].count += unit
                records[context].top = max(records[context].top, records[follower].count)
            units[index] = unit * growth[index]
            if units[index] > LARGEST:
                for record in range(sizes[0]):
                    if records[record].key & np.uint64(ORDERS - 1) == np.uint64(index):
                        records[record].count /= units[index]
                        records[record].top /= units[index]
                units[index] = 1.0
        for position in range(len(recent) - 1, 0, -1):
            recent[position] = recent[position - 1]
        recent[0] = token
        sizes[1] += 1


@njit(cache=True)
def add_followers(orders, decays, records, slots, units, recent, sizes, weights, out):
    contexts = find_contexts(orders, records, slots, recent, sizes)
    for index in range(len(orders)):
        context = contexts[index]
        if context >= 0 and records[context].count > 0:
            factor, follower = weights[index] / records[context].count, records[context].link
            while follower >= 0:
                out[records[follower].number] += factor * records[follower].count
                follower = records[follower].link
