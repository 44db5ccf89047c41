"""Memory and time of deep models with and without recomputation: `python experiments/bench/deep.py [--blocks 128]`.

Regime: a training step (forward, backward, update) on one row of --length bytes. The pattern alternates strided sparse
attention and dense blocks, with model.init=depth_scaled, pre-norm and GELU as in arXiv 1904.10509. It is measured
twice, each time in a new process. In the first, all blocks keep their inner values; in the second, the backward pass
recomputes them.

For each: seconds of the fastest step, the highest memory of the process, and whether the gradients of all steps are
finite. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def measure(options) -> dict:
    import torch

    from experiments.helpers import peak_memory_mb, sized_blocks
    from models.operations.operation import BlockConfig
    from models.transformer_xl import build_pattern
    from nas.core.config import TrainOptions
    from nas.training.device import set_up_device
    from nas.training.optimizer import WeightsOptimizer

    set_up_device(1, TrainOptions(threads=options.threads, device="cpu"))
    config, recompute = BlockConfig(options.d_model, activation="gelu"), options.recompute == "on"
    names = [("sparse_strided", "dense")[index % 2] for index in range(options.blocks)]
    pattern = sized_blocks(names, options.d_model, options.length)
    seconds, finite = [], []

    def train() -> None:
        model = build_pattern(pattern, config, 256, recompute=recompute, depth_scaled=True)
        optimizer = WeightsOptimizer(
            model, TrainOptions(optimizer="adamw", lr=0.006, weight_decay=0.1), options.steps + 1
        )
        for step in range(1, options.steps + 1):
            tokens = torch.randint(256, (1, options.length + 1))
            started = time.perf_counter()
            nll, _ = model(tokens[:, :-1], tokens[:, 1:], None, 0)
            optimizer.zero_grad()
            nll.mean().backward()
            finite.append(all(torch.isfinite(p.grad).all().item() for p in model.parameters()))
            optimizer.set_lr(step)
            optimizer.step()
            seconds.append(time.perf_counter() - started)

    peak_mb = peak_memory_mb(train)
    return {"recompute": recompute, "seconds": min(seconds), "peak_mb": peak_mb, "finite": all(finite)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", choices=("on", "off"), help="measure only this case, in this process")
    options = parser.parse_args()
    if options.recompute:
        print(json.dumps(measure(options)))
        return
    results = {}
    for case in ("off", "on"):
        command = [sys.executable, __file__, *sys.argv[1:], "--recompute", case]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        results[case] = result
        finite = "finite" if result["finite"] else "NOT FINITE"
        figures = f"{result['seconds']:.2f} s a step, peak {result['peak_mb']:,.0f} MB"
        print(f"recompute {case:>3}: {figures}, gradients {finite}")
    ratios = {key: round(results["on"][key] / results["off"][key], 3) for key in ("seconds", "peak_mb")}
    print(json.dumps({"recomputed": results["on"], "kept": results["off"], "ratio": ratios}))


if __name__ == "__main__":
    main()
