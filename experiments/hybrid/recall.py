"""Write texts that need recall over long distances: `python experiments/hybrid/recall.py FOLDER`.

Multi-query associative recall (MQAR, Arora et al. 2023, arXiv 2312.04927, section 3). A document is a line: pairs of a
key and its value, and then the same keys in another order, each with its value. Keys and values are drawn anew for each
document. A model that recalls them all predicts every value in the second half; one that does not has log(VALUES) nats
there. A quarter of the words are such values.

The number of pairs is a power of two from 4 to --pairs. Each of these numbers takes about the same part of the text,
because models learn recall from short documents first.

FOLDER gets train.txt, valid.txt and test.txt.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from nas.core.errors import InputError, run_command

KEYS, VALUES = 64, 16
PAIRS = [4, 8, 16, 32, 64]
OTHER_SPLITS = 0.05  # their size, as a share of train


def document(generator: np.random.Generator, pairs: int) -> str:
    keys, values = generator.choice(KEYS, pairs, replace=False), generator.integers(VALUES, size=pairs)
    order = generator.permutation(pairs)
    words = (f"k{keys[index]} v{values[index]}" for index in [*range(pairs), *order])
    return " ".join(words) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, choices=PAIRS, default=32, help="of the longest documents (default: 32)")
    parser.add_argument("--words", type=int, default=2_000_000, help="in train (default: 2 million); 5%% in the others")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sizes = PAIRS[: PAIRS.index(arguments.pairs) + 1]
    least = round(4 * len(sizes) * arguments.pairs / OTHER_SPLITS)  # the other splits hold each size at least once
    if arguments.words < least:
        raise InputError(f"--words {arguments.words} must be at least {least} with --pairs {arguments.pairs}")
    generator = np.random.default_rng(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, share in (("train", 1.0), ("valid", OTHER_SPLITS), ("test", OTHER_SPLITS)):
        each = share * arguments.words / len(sizes) / 4  # the pairs of all documents of a size; each takes four words
        pairs = generator.permutation(np.repeat(sizes, [round(each / size) for size in sizes]))
        (arguments.folder / f"{split}.txt").write_text("".join(document(generator, size) for size in pairs), "utf-8")


if __name__ == "__main__":
    run_command(main)
