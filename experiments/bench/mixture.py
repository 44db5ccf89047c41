"""What a mixture adds to the time of its network: `python experiments/bench/mixture.py RUN_DIR [--count FILE]`.

RUN_DIR is a training with a mixture. Scoring and generation are timed with it, without its cache of states, and
with the network alone, in turn, in one process and on one thread. --count: also count the n-grams of a text file in the
vocabulary of the run, in a process.
The last line is JSON: seconds, ratios and bytes, and the time of a first import and a first call.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from nas.data.corpus import Corpus, prepare
from nas.inference.generation import Predictor, Sampling
from nas.inference.language_model import load_model
from nas.mixture.counts import count_ngrams, pack
from nas.mixture.mixture import Stream
from nas.training.evaluation import evaluation_lengths

ROUNDS, SCORED, DRAWN, ORDER = 7, 60_000, 100, 5


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--count", type=Path, metavar="FILE")
    parser.add_argument("--peak", type=Path, help="internal: print seconds and peak memory of counting these tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        tokens, began = np.load(arguments.peak), time.perf_counter()
        nodes = len(pack(count_ngrams(tokens, int(tokens.max()) + 1, ORDER)).last)
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"count_s": time.perf_counter() - began, "n_grams": nodes, "peak_bytes": peak}))
        return
    cold = "import time; began = time.perf_counter(); import nas.mixture.mixture; print(time.perf_counter() - began)"
    found = {"import_s": float(subprocess.run([sys.executable, "-c", cold], capture_output=True, check=True).stdout)}
    model = load_model(arguments.run, "cpu")
    began = time.perf_counter()
    Stream(model.mixture).read(np.zeros(2, np.int64), np.zeros((2, model.mixture.width), np.float32))
    found["first_call_s"] = time.perf_counter() - began
    tokens = np.array(Corpus(prepare(model.config.data)).tokens("test")[:SCORED])
    times, network = defaultdict(list), model.read_network(tokens)
    mixtures = {"mixture": model.mixture, "without_states": replace(model.mixture, states=0)}
    mixtures["without_states"].fit_to(mixtures["without_states"].look(tokens, *network))
    for _ in range(ROUNDS):
        began = time.perf_counter()
        model.read_network(tokens)
        times["network"].append(time.perf_counter() - began)
        for name, mixture in mixtures.items():
            began = time.perf_counter()
            mixture.mix(mixture.look(tokens, *network))
            times[name].append(time.perf_counter() - began)
    sampling, generator, predictors = Sampling(top_p=0.9), torch.Generator().manual_seed(1), {}
    for name, mixture in (("token", None), *((f"token_{name}", mixture) for name, mixture in mixtures.items())):
        lengths = evaluation_lengths(model.config)
        predictors[name] = Predictor(model.module, mixture, model.runtime, lengths, tokens[:1000], 1)
    for _ in range(3 * ROUNDS):
        for name, predictor in predictors.items():  # many tokens each, because each one has its own data in the caches
            began = time.perf_counter()
            for _ in range(DRAWN):
                predictor.read(sampling.draw(predictor.predict(), generator))
            times[name].append((time.perf_counter() - began) / DRAWN)
    found |= {f"{name}_s": float(np.median(values)) for name, values in times.items()}
    for name in mixtures:
        found[f"scoring_ratio_{name}"] = 1 + float(np.median(np.divide(times[name], times["network"])))
        found[f"generation_ratio_{name}"] = float(np.median(np.divide(times[f"token_{name}"], times["token"])))
    if model.mixture.file:
        found["bytes_per_n_gram"] = model.mixture.file.stat().st_size / len(model.mixture.table.last)
    if arguments.count:
        found["text_bytes"] = arguments.count.stat().st_size
        with tempfile.TemporaryDirectory() as folder:
            lines, file = arguments.count.read_bytes().splitlines(keepends=True), Path(folder) / "tokens.npy"
            parts = [model.tokenizer.encode(b"".join(lines[i : i + 20_000])) for i in range(0, len(lines), 20_000)]
            np.save(file, np.concatenate(parts))
            command = [sys.executable, __file__, str(arguments.run), "--peak", str(file)]
            own = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found |= json.loads(own.stdout)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
