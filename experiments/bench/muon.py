"""Time of a step of Muon: the project's own in fp32 and in bf16, and PyTorch's. `python experiments/bench/muon.py`.

The matrices are those of three attention and three dense blocks. All three take turns. The last line is JSON: the least
milliseconds of each at each width.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import sized_blocks
from nas.core.errors import run_command
from nas.core.pattern import interleaved

ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 192, 256], help="widths of the model")
    arguments = parser.parse_args()
    import torch

    from nas.training.optimizer import Muon

    torch.set_num_threads(1)
    torch.manual_seed(0)
    scale, finite = torch.tensor(1.0), torch.tensor(True)
    milliseconds = {}
    for width in arguments.widths:
        own, low = (Muon(matrices(width), 0.01, 0.9, 0.02, in_bf16) for in_bf16 in (False, True))
        other = torch.optim.Muon(matrices(width), lr=0.01, momentum=0.9, weight_decay=0.02)
        steps = {
            "fp32": lambda own=own: own.step(scale, finite),
            "bf16": lambda low=low: low.step(scale, finite),
            "torch.optim.Muon": other.step,
        }
        least = dict.fromkeys(steps, float("inf"))
        for _ in range(ROUNDS):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                least[name] = min(least[name], 1e3 * (time.perf_counter() - began))
        milliseconds[width] = {name: round(value, 1) for name, value in least.items()}
        print(width, milliseconds[width], flush=True)
    print(json.dumps({"milliseconds": milliseconds}))


def matrices(width: int) -> list:
    """The weight matrices of the blocks, with gradients."""
    import torch

    from models.operations.operation import BlockConfig
    from models.transformer_xl import build_pattern

    model = build_pattern(sized_blocks(interleaved(6), width), BlockConfig(width), vocab_size=2)
    result = [layer.weight for layer in model.blocks.modules() if isinstance(layer, torch.nn.Linear)]
    for matrix in result:
        matrix.grad = torch.randn_like(matrix)
    return result


if __name__ == "__main__":
    run_command(main)
