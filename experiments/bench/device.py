"""Time of a token by each way to run a found network on a CPU: `python experiments/bench/device.py`.

The networks are those that searches found on WikiText-2, with random weights, a memory and a segment of 128 positions,
which are full. One thread, one row; medians over rounds in which all ways take turns:

- nas.generate: the network and the drawing of a token, without a mixture. The other ways do not draw. Ratios are to it.
- onnx, onnx-int8: the graph of `nas.export --format onnx-int8`, before and after its weights are rounded.
- aoti: AOTInductor's package of the same function, for full memories.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.helpers import print_row, sized_blocks
from nas.core.errors import run_command
from nas.core.pattern import expand

NETWORKS = {"wac": (32_000, 128), "wcwd": (16_000, 64), "wdcdc": (32_000, 64)}  # pieces and width
LENGTH, CUTOFFS, NGRAMS = 128, (2_000, 8_000), (16_384, 16_384)


def ways_of(short: str, folder: Path) -> dict[str, tuple]:
    """{way: (a function that reads a token, bytes of its file)}."""
    import torch

    from models.graph import export_graph, open_graph, quiet
    from models.operations.operation import BlockConfig
    from models.stream import StreamModel
    from models.transformer_xl import build_pattern
    from nas.core.config import TrainOptions
    from nas.inference.generation import Predictor, Sampling, generate_tokens
    from nas.inference.onnx_graph import quantize_graph
    from nas.retraining.weights import GRAPH
    from nas.training.device import choose_runtime

    (size, width), context = NETWORKS[short], 2 * LENGTH
    options = {"cutoffs": CUTOFFS, "ngram_rows": NGRAMS}
    model = build_pattern(sized_blocks(expand(short), width, context), BlockConfig(width), size, **options).eval()
    prompt, runtime = np.random.default_rng(0).integers(size, size=context), choose_runtime(TrainOptions(device="cpu"))
    predictor = Predictor(model, None, runtime, (LENGTH, LENGTH), prompt, 1)
    drawn = generate_tokens(predictor, Sampling(), torch.Generator().manual_seed(0), [b"x"] * size, b"", 1)
    ways = {"nas.generate": (lambda: next(drawn), 4 * sum(one.numel() for one in model.parameters()))}
    token, network = torch.from_numpy(prompt[None, :1]), StreamModel(model, context, fixed=True)
    with torch.no_grad(), quiet():
        state = network.start(1)
        for start in range(context):
            state = network(torch.from_numpy(prompt[None, start : start + 1]), state)[2]
        state = {name: own.contiguous() for name, own in network(token, state)[2].items()}
        export_graph(network, graph := folder / GRAPH, segment=LENGTH)
        inputs = {"tokens": token.numpy(), **{name: own.numpy() for name, own in state.items()}}
        for way in ("onnx", "onnx-int8"):
            session = open_graph(graph, 1)
            ways[way] = (lambda session=session: session.run(None, inputs)), graph.stat().st_size
            quantize_graph(folder)
        program = torch.export.export(network, (token,), kwargs={"state": state})
        package = Path(torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2")))
        loaded = torch._inductor.aoti_load_package(str(package))
        ways["aoti"] = (lambda: loaded(token, state=state)), package.stat().st_size
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    import torch

    from nas.costs.measurement import timed_rounds

    torch.set_num_threads(1)
    torch.manual_seed(0)
    print_row("network", "way", "ms for a token", "ratio", "MB", header=True)
    found = {}
    for short in NETWORKS:
        with TemporaryDirectory() as folder, torch.inference_mode(False):
            ways = ways_of(short, Path(folder))
            times = timed_rounds({way: own for way, (own, _) in ways.items()}, arguments.rounds)
        ms = {way: 1e3 * float(np.median(taken)) for way, taken in times.items()}
        for way, (_, size) in ways.items():
            print_row(f"`{short}`", way, f"{ms[way]:.3f}", f"{ms[way] / ms['nas.generate']:.2f}", f"{size / 1e6:.1f}")
        found[short] = ms
    print(json.dumps({"at": time.strftime("%F"), **found}))


if __name__ == "__main__":
    run_command(main)
