"""Speed of text generation beside that of evaluation: `python experiments/bench/generation.py [--threads 1]`.

Regime: 6 blocks, d_model 128, 4 heads, d_ffn 512, a vocabulary of 8,000 tied to the embedding, a window of a quarter of
the context. The weights are random, because they do not change the speed. Segment and memory have --lengths positions
each; the context is both together, and it is full. The columns are tokens/s, medians over rounds in which all columns
take turns:

- evaluation: one row that reads a segment per step, as evaluation does with one row.
- 1 sample, 16 samples: generation. A step draws a token for each sample.
- recomputed: generation of one sample without kept keys, values and states. Each step reads the whole context.

The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, sized_blocks

PATTERNS, LENGTHS, VOCABULARY = ("adadad", "wdwdwd", "ldldld"), (64, 512), 8_000
SAMPLES = (1, 16)


def steps_of(short: str, length: int) -> dict[str, tuple]:
    """{column: (a function that does a step, the tokens of a step)} of a pattern."""
    import torch

    from models.decoding import Decoder
    from models.operations import BlockConfig
    from models.transformer_xl import build_pattern
    from nas.core.config import TrainOptions
    from nas.core.pattern import expand
    from nas.inference.generation import generate_tokens
    from nas.inference.sampling import Sampling
    from nas.training.device import device_context

    context = 2 * length
    blocks = sized_blocks(expand(short), 128, context)
    model = build_pattern(blocks, BlockConfig(128), VOCABULARY, tie_embeddings=True)
    model.eval()
    tokens = torch.randint(VOCABULARY, (1, context + 1))
    with torch.no_grad():
        _, memories = model(tokens[:, :length], tokens[:, 1 : length + 1], None, length)

    @torch.no_grad()
    def evaluate() -> None:
        model(tokens[:, length:context], tokens[:, length + 1 :], memories, length)

    def generation(samples: int):
        generator = torch.Generator().manual_seed(0)
        prompt, device = tokens[0].numpy(), device_context(TrainOptions(device="cpu", precision="fp32"))
        drawn = generate_tokens(model, device, (length, length), prompt, samples, Sampling(), generator)
        return lambda: next(drawn)

    steps = {"evaluation": (evaluate, length)}
    for samples in SAMPLES:
        steps[f"{samples} sample{'s' if samples > 1 else ''}"] = generation(samples), samples
    return steps | {"recomputed": (lambda: Decoder(model, context).read(tokens[:, :context]), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    arguments = parser.parse_args()

    import torch

    from nas.costs.latency import timed_rounds

    torch.set_num_threads(arguments.threads)
    report = {}
    for length in arguments.lengths:
        for short in PATTERNS:
            steps = steps_of(short, length)
            seconds = timed_rounds({name: step for name, (step, _) in steps.items()}, arguments.rounds)
            rates = {name: tokens / float(np.median(seconds[name])) for name, (_, tokens) in steps.items()}
            if not report:
                print_row("pattern", "segment = memory", *rates, header=True)
            print_row(f"`{short}`", length, *(f"{rate:,.0f}" for rate in rates.values()))
            report[f"{short}, {length}"] = {name: round(rate, 1) for name, rate in rates.items()}
    print(json.dumps({"tokens_per_s": report}))


if __name__ == "__main__":
    main()
