"""The next token's distribution by a mixture, with NumPy alone: the code that exported folders hold.

docs/mixture.md defines the mixture. V vocabulary, P parts, D width of the network, E dimensions of its projected
states.
"""

from collections.abc import Callable

import numpy as np

LARGEST = 1e200  # unit of counts: new ones weigh more, so that old ones decay; beyond it all are divided
SHARPNESS = 10.0  # of the cache of states


class Distribution:
    """The parts beside a network, and the gate.

    settings: the content of mixture.json, with gate [F + E + 1, P], bounds [2, F], projection [D + 1, E]. Parts
    are network, states, cache, counts; features those of cache (4 each), counts (3 * order - 2), states (2). counts:
    the arrays of counts.npz; {} if the mixture has none.
    """

    def __init__(self, settings: dict, counts: dict):
        self.orders, self.decays, self.vocab_size = settings["cache"], settings["decays"], settings["vocab_size"]
        self.states, self.order = settings["states"], settings["counts"]
        fitted = "gate", "bounds", "projection"
        self.gate, self.bounds, self.projection = (np.array(settings[name], np.float64) for name in fitted)
        if self.order:
            self.last, children = counts["last"], counts["children"].astype(np.int64)
            self.share = counts["values"].astype(np.float64)[counts["codes"]]
            self.starts = self.vocab_size + np.cumsum(np.append(0, children))
            parents = np.repeat(np.arange(len(children)), children)
            self.rest = 1 - np.bincount(parents, self.share[self.vocab_size :], len(children))
            self.share[: self.vocab_size] += (1 - self.share[: self.vocab_size].sum()) / self.vocab_size

    def count(self, context: Callable) -> tuple[np.ndarray, np.ndarray]:
        """The distribution of the counts [V], and its features. context: as Stream.context()."""
        part, features = self.share[: self.vocab_size].copy(), np.zeros(3 * self.order - 2)
        for length in range(1, self.order):  # from short contexts to longer ones
            if (node := self.node(context(length))) is None:
                continue
            found = slice(self.starts[node], self.starts[node + 1])
            part *= self.rest[node]
            part[self.last[found]] += self.share[found]
            if number := found.stop - found.start:
                features[:] = 0  # those of the longest context are known
                features[3 * length - 3 : 3 * length] = 1, np.log(number), self.rest[node]
                features[-1] = np.log(self.rest[node] + 1e-4)
        return part, features

    def node(self, context: tuple[int, ...] | None) -> int | None:
        """The node of a context among the n-grams; None if there is none."""
        node, *others = context or (None,)
        for token in others:
            children = self.last[self.starts[node] : self.starts[node + 1]]
            place = int(np.searchsorted(children, token))
            if place == len(children) or children[place] != token:
                return None
            node = int(self.starts[node]) + place
        return node


class Stream:
    """Reads one stream, and predicts its next token. Its first token comes before the first prediction."""

    def __init__(self, beside: Distribution):
        self.beside, self.read, self.hidden = beside, [], None
        self.keys = np.zeros((0, beside.projection.shape[-1]))  # of the last states
        self.seen, self.units = [{} for _ in beside.orders], [1.0 for _ in beside.orders]

    def copy(self) -> "Stream":
        """A stream that goes on differently."""
        other = Stream(self.beside)
        other.read, other.keys, other.hidden = [*self.read], self.keys, self.hidden
        other.seen, other.units = [{**own} for own in self.seen], [*self.units]  # counts of a context never change
        return other

    def context(self, length: int) -> tuple[int, ...] | None:
        """The last tokens; None if there are fewer."""
        return tuple(self.read[len(self.read) - length :]) if length <= len(self.read) else None

    def add(self, token: int, hidden: np.ndarray) -> None:
        """Read a token. hidden [D]: the network's state after it."""
        beside = self.beside
        for index, (order, decay, seen) in enumerate(zip(beside.orders, beside.decays, self.seen, strict=True)):
            if (context := self.context(order - 1)) is not None:
                counts = seen.get(context, {})
                seen[context] = {**counts, token: counts.get(token, 0.0) + self.units[index]}
            self.units[index] /= decay
            if self.units[index] > LARGEST:
                for key, counts in seen.items():
                    seen[key] = {other: value / self.units[index] for other, value in counts.items()}
                self.units[index] = 1.0
        self.read.append(token)
        self.hidden = hidden @ beside.projection[:-1] + beside.projection[-1]
        if beside.states:
            key = self.hidden[None] / max(np.linalg.norm(self.hidden), 1e-9)
            self.keys = np.append(self.keys[-beside.states :], key, axis=0)

    def mix(self, log_p: np.ndarray) -> np.ndarray:
        """The distribution of the next token [V]. log_p [V]: that of the network."""
        beside, parts, similar = self.beside, [np.exp(log_p.astype(np.float64))], []
        if beside.states:  # the last key has no follower yet
            part, similar = None, [0.0, 0.0]
            if len(self.keys) > 1:
                terms = np.exp(SHARPNESS * self.keys[:-1] @ self.keys[-1])
                part = np.bincount(self.read[1 - len(self.keys) :], terms, beside.vocab_size) / terms.sum()
                similar = [np.log(terms.sum()), terms.max() / terms.sum()]
            parts.append(part)
        features = []
        for order, unit, seen in zip(beside.orders, self.units, self.seen, strict=True):
            counts, part, known = seen.get(self.context(order - 1)), None, [0.0] * 4
            if counts:
                values, part = np.array([*counts.values()]), np.zeros(beside.vocab_size)
                total = values.sum()
                part[[*counts]] = values / total
                known = [1.0, np.log(total / unit + 1e-6), np.log(len(counts)), values.max() / total]
            parts.append(part)
            features += known
        if beside.order:
            part, known = beside.count(self.context)
            parts, features = [*parts, part], [*features, *known]
        features = np.clip([*features, *similar], *beside.bounds)
        logits = np.concatenate([features, self.hidden]) @ beside.gate[:-1] + beside.gate[-1]
        votes = [index for index, part in enumerate(parts) if part is not None]
        weights = np.exp(logits[votes] - logits[votes].max())
        return sum(weight * parts[index] for weight, index in zip(weights / weights.sum(), votes, strict=True))
