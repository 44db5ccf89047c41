"""Speed of text generation, beside an earlier commit and a lower bound: `python experiments/bench/generation.py`.

Regime: 6 blocks, d_model 128, 4 heads, d_ffn 512, a vocabulary of 8,000 tied to the embedding, a window of a quarter of
the context. The weights are random, because they do not change the speed. Segment and memory have --lengths positions
each; the context is both together, and it is full. A step draws a token for each sample. Medians over rounds, in which
both commits take turns:

- now, before: tokens/s of this checkout, and of the commit BEFORE, in a process each.
- bound: the time to read the weights and caches that a step needs once, at the rate of a matrix-vector product of this
  size, and to launch its operations without views, at the rate of an addition of two numbers.

The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, sized_blocks

ROOT, BEFORE = Path(__file__).parents[2], "9f84d9f"
PATTERNS, LENGTHS, VOCABULARY, SAMPLES = ("adadad", "wdwdwd", "ldldld"), (64, 512), 8_000, (1, 16)
STEPS = 50  # at once
# It runs in the folder of a commit. Each line of its input asks for the seconds of a step.
STEPPER = f"""
import sys, time, torch
from experiments.bench.generation import steps_of
torch.set_num_threads(int(sys.argv[1]))
step, _ = steps_of(sys.argv[2], int(sys.argv[3]))[sys.argv[4]]
for _ in sys.stdin:
    began = time.perf_counter()
    for _ in range({STEPS}):
        step()
    print((time.perf_counter() - began) / {STEPS}, flush=True)
"""


def new_decoder(short: str, length: int):
    """A decoder of the regime's model whose context is full."""
    import torch

    from models.operations.operation import BlockConfig
    from models.stream import Decoder
    from models.transformer_xl import build_pattern
    from nas.core.pattern import expand

    context = 2 * length
    blocks = sized_blocks(expand(short), 128, context)
    decoder = Decoder(build_pattern(blocks, BlockConfig(128), VOCABULARY, tie_embeddings=True), context)
    decoder.read(torch.randint(VOCABULARY, (1, context)))
    return decoder


def steps_of(short: str, length: int) -> dict[str, tuple]:
    """{column: (a function that does a step, the tokens of a step)} of a pattern."""
    import torch

    from nas.core.config import TrainOptions
    from nas.inference.generation import Predictor, Sampling, generate_tokens
    from nas.training.device import choose_runtime

    def step(samples: int):
        generator = torch.Generator().manual_seed(0)
        prompt = np.random.default_rng(0).integers(VOCABULARY, size=2 * length + 1)
        model, device = new_decoder(short, length).model, choose_runtime(TrainOptions(device="cpu", precision="fp32"))
        predictor = Predictor(model, None, device, (length, length), prompt, samples)
        try:
            drawn = generate_tokens(predictor, Sampling(), generator, [b"x"] * VOCABULARY, b"", samples)
        except TypeError:  # of a commit before 309cdb9
            drawn = generate_tokens(predictor, Sampling(), generator, torch.ones(VOCABULARY, dtype=torch.bool))
        return lambda: next(drawn)

    return {column(samples): (step(samples), samples) for samples in SAMPLES}


def column(samples: int) -> str:
    return f"{samples} sample{'s' if samples > 1 else ''}"


def bound(short: str, length: int, samples: int, rounds: int) -> float:
    """Seconds of a step, at least."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from nas.costs.measurement import timed_rounds
    from nas.inference.generation import Sampling

    decoder, counted = new_decoder(short, length), []
    decoder.repeat(samples)
    token = torch.zeros(samples, 1, dtype=torch.int64)
    decoder.read(token)

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if not any(result.alias_info and not result.alias_info.is_write for result in function._schema.returns):
                counted.append(function)
            return function(*args, **(kwargs or {}))

    with Counter(), torch.no_grad():
        Sampling().draw(decoder.read(token), torch.Generator())
    weights = {id(p): p for name, p in decoder.model.named_parameters() if not name.endswith("position.weight")}
    read = sum(parameter.numel() for parameter in weights.values())
    read += sum(part.numel() for reader in decoder.readers for part in reader.state.values())
    for reader in decoder.readers:
        if (position := getattr(reader, "position", None)) is not None:
            read += position[:, 0].numel() * reader.state["keys"].shape[2]
    matrix, vector, one = torch.randn(read // 1024, 1024), torch.randn(1024), torch.ones(1)
    works = {"reading": lambda: torch.mv(matrix, vector), "launch": lambda: [torch.add(one, one) for _ in counted]}
    with torch.no_grad():
        return float(sum(np.median(taken) for taken in timed_rounds(works, rounds).values()))


def measure(before: Path, threads: int, short: str, length: int, samples: int, rounds: int) -> dict[str, float]:
    """{name: tokens/s}"""
    command = [sys.executable, "-c", STEPPER, str(threads), short, str(length), column(samples)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    steppers = {
        name: subprocess.Popen(command, cwd=root, **pipes) for name, root in {"now": ROOT, "before": before}.items()
    }
    taken = {name: [] for name in steppers}
    for _ in range(rounds + 1):  # the first one warms up
        for name, stepper in steppers.items():
            print(file=stepper.stdin, flush=True)
            taken[name].append(float(stepper.stdout.readline()))
    for stepper in steppers.values():
        stepper.communicate()
    seconds = {name: float(np.median(values[1:])) for name, values in taken.items()}
    seconds["bound"] = bound(short, length, samples, rounds)
    return {name: samples / value for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--before", default=BEFORE, help="commit (default: %(default)s)")
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    report = {}
    print_row("pattern", "segment = memory", "", "tokens/s", "before", "times", "bound", "times the bound", header=True)
    with TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", arguments.before], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for length in arguments.lengths:
            for short in PATTERNS:
                for samples in SAMPLES:
                    rates = measure(Path(folder), arguments.threads, short, length, samples, arguments.rounds)
                    now, before, best = rates.values()
                    times = f"{now / before:.2f}", f"{best:,.0f}", f"{best / now:.2f}"
                    print_row(f"`{short}`", length, column(samples), f"{now:,.0f}", f"{before:,.0f}", *times)
                    report[f"{short}, {length}, {samples}"] = {name: round(rate, 1) for name, rate in rates.items()}
    print(json.dumps({"tokens_per_s": report}))


if __name__ == "__main__":
    main()
