"""nas.data.corpus."""

from pathlib import Path

import numpy as np
import yaml

from nas.data.tokenizers import load_tokenizer


class Corpus:
    """A folder that nas.prepare made: the splits as memory maps of ranked ids, and how to read them as text."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.meta = yaml.safe_load((folder / "meta.yaml").read_text())
        self.vocab_size = self.meta["vocab_size"]

    def tokens(self, split: str) -> np.ndarray:
        """Ranked ids [tokens] of a split, as a memory map."""
        if self.meta["splits"][split]["tokens"] == 0:
            return np.empty(0, dtype=self.meta["dtype"])
        return np.memmap(self.folder / f"{split}.bin", dtype=self.meta["dtype"], mode="r")

    def counts(self) -> np.ndarray:
        """Frequency of each rank in the train split [V], descending."""
        return np.load(self.folder / "counts.npy")

    def decode(self, ranks: np.ndarray) -> bytes:
        """Ranked ids -> the text they stand for."""
        tokenizer = load_tokenizer(self.folder, self.meta["tokenizer"], self.meta["newline"] == "keep")
        return tokenizer.decode(np.load(self.folder / "ids.npy")[ranks])
