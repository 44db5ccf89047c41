"""PPMd: `python experiments/outside/ppmd.py --out runs/frontier`
(pip install -r experiments/outside/requirements.txt).

The size of a split is what it adds to train in one archive (variant H, pyppmd). Valid decides the order. Words of the
text, as everywhere, give the word perplexity.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.frontier.problem import SPLITS, options_of_text, read_arguments, results_of
from experiments.helpers import FRONTIER
from nas.core.config_loading import load_config
from nas.core.errors import run_command
from nas.core.files import user_path

ORDERS = 4, 6, 8, 12, 16, 24, 32
MEMORY = 1 << 30  # bytes; smaller ones forget


def compressed_bits(data: bytes, order: int) -> int:
    import pyppmd

    encoder = pyppmd.Ppmd7Encoder(order, MEMORY)
    return 8 * (len(encoder.encode(data)) + len(encoder.flush()))


def measure(overrides: list[str]) -> dict:
    """The figures of the best order on valid."""
    from nas.data.corpus import Corpus, prepare
    from nas.data.sources import find_text

    data = load_config(FRONTIER, overrides).data
    meta = Corpus(prepare(data)).meta["splits"]
    files = find_text(data.source, user_path(data.cache))
    train, *others = (files[split].read_bytes() for split in ("train", *SPLITS))
    found = []
    for order in ORDERS:
        before, result = compressed_bits(train, order), {"order": order}
        for split, text in zip(SPLITS, others, strict=True):
            bits = compressed_bits(train + text, order) - before
            words = math.exp(bits * math.log(2) / meta[split]["words"])
            result[split] = {"bits_per_byte": bits / len(text), "word_perplexity": words}
        found.append(result)
        print(f"order {order}: {result['valid']['bits_per_byte']:.4f} bits per byte on valid", flush=True)
    return min(found, key=lambda one: one["valid"]["bits_per_byte"])


def main() -> None:
    arguments = read_arguments(__doc__)
    jobs = results_of(arguments)
    for text in arguments.texts:
        jobs.do(f"{text},,ppmd,1", lambda: measure(options_of_text(text, arguments.overrides)))  # noqa: B023


if __name__ == "__main__":
    run_command(main)
