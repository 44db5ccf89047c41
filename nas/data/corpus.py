"""A prepared folder of tokens, read as memory maps."""

from functools import cached_property
from pathlib import Path

import numpy as np

from nas.core.files import read_yaml
from nas.data.vocabulary import VOCABULARY, Vocabulary


class Corpus:
    """A folder that nas.data.preprocess wrote. Ids are ranks: 0 is the most frequent token of the train split."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.meta = read_yaml(folder / "meta.yaml")
        self.vocab_size = self.meta["vocab_size"]

    def tokens(self, split: str) -> np.ndarray:
        """Ids [tokens] of a split, as a memory map."""
        if self.meta["splits"][split]["tokens"] == 0:
            return np.empty(0, dtype=self.meta["dtype"])
        return np.memmap(self.folder / f"{split}.bin", dtype=self.meta["dtype"], mode="r")

    def counts(self) -> np.ndarray:
        """Frequency of each id in the train split [vocab_size], descending."""
        return np.load(self.folder / "counts.npy")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.load(self.folder / VOCABULARY)


def bytes_per_token(corpus: Corpus) -> float:
    """Bytes of the original training text that a token stands for, on average."""
    text = corpus.meta["splits"]["train"]
    return text["bytes"] / text["tokens"]
