"""What recomputation saves, and how deep a model can be: `python experiments/bench/deep.py [--blocks 128]`.

A training step (forward, backward, update) on one row of --length bytes, of a pattern of strided sparse attention and
dense blocks in turn, with model.init deep, pre-norm and GELU as in arXiv 1904.10509, once with the inner values of all
blocks kept, once recomputed in the backward pass: seconds of the fastest step, the most memory that the process had,
and whether the gradients of the first step are all finite. Each in a process of its own. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def measure(blocks: int, length: int, d_model: int, recompute: bool, threads: int, steps: int) -> dict:
    import torch

    from models.operations import BlockConfig
    from models.transformer_xl import build_pattern
    from nas.core.config import TrainOptions
    from nas.core.config_checks import default_stride
    from nas.costs.benchmark import peak_memory_mb
    from nas.training.device import set_up_device
    from nas.training.optimizer import WeightsOptimizer

    set_up_device(1, TrainOptions(threads=threads, device="cpu"))
    sizes = BlockConfig(d_model, 4, 4 * d_model, activation="gelu", stride=default_stride(length))
    pattern = [("sparse_strided", "dense")[index % 2] for index in range(blocks)]
    seconds, finite = [], []

    def train() -> None:
        model = build_pattern(pattern, sizes, 256, recompute=recompute, depth_scaled=True)
        optimizer = WeightsOptimizer(model, TrainOptions(), total_steps=steps + 1)
        for step in range(1, steps + 1):
            tokens = torch.randint(256, (1, length + 1))
            started = time.perf_counter()
            nll, _ = model(tokens[:, :-1], tokens[:, 1:], None, 0)
            optimizer.clear()
            nll.mean().backward()
            finite.append(all(torch.isfinite(p.grad).all().item() for p in model.parameters()))
            optimizer.set_lr(step)
            optimizer.apply()
            seconds.append(time.perf_counter() - started)

    peak = peak_memory_mb(train)
    return {"recompute": recompute, "seconds": min(seconds), "peak_mb": peak, "finite": all(finite)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", choices=("on", "off"), help="measure this one alone, in this process")
    arguments = parser.parse_args()
    if arguments.recompute:
        sizes = arguments.blocks, arguments.length, arguments.d_model
        print(json.dumps(measure(*sizes, arguments.recompute == "on", arguments.threads, arguments.steps)))
        return
    found = {}
    for way in ("off", "on"):
        command = [sys.executable, __file__, *sys.argv[1:], "--recompute", way]
        found[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        about = found[way]
        print(
            f"recompute {way:>3}: {about['seconds']:.2f} s a step, peak {about['peak_mb']:,.0f} MB, gradients "
            + ("finite" if about["finite"] else "NOT FINITE")
        )
    ratios = {key: round(found["on"][key] / found["off"][key], 3) for key in ("seconds", "peak_mb")}
    print(json.dumps({"recomputed": found["on"], "kept": found["off"], "ratio": ratios}))


if __name__ == "__main__":
    main()
