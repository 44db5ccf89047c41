"""Speed of search and training on a GPU: `python experiments/bench/gpu.py --source FOLDER` (WikiText-2).

Regime: five parts, each in a new process, through the classes and commands that users run. Options are the defaults
(train.precision=auto, train.compile=auto), or those at the end of the command, such as train.compile=never. The whole
program is meant to take under 8 minutes.

a  The whole training of the TensorFlow implementation: soft search of 6 blocks, d_model 128, 12,000 words with cutoffs,
   segment 32, memory 16, 56,500 steps of 1,024 tokens. The tokens are random (Zipf), as many as WikiText-2 has. The
   time includes compiling, but no evaluation. After --limit seconds the rest is estimated at the last rate;
   `steps_done` shows it. `nan_by_step`: the first multiple of 500 steps with a loss before it that was not finite. The
   TensorFlow implementation took 37 minutes on its GPU. Aim: 60 s.
b  Transformer-XL base, interleaved: 16 layers as 32 blocks, d_model 512, 8 heads, d_ffn 2048, segment and memory 192,
   267,735 words with cutoffs, tied. Tokens/s of training steps after a warm-up, and utilisation = 3 * forward FLOPs per
   token * tokens/s / rate of a bf16 product of 8,192 x 8,192 matrices, measured just before. Aim: 0.4.
c  The same model as a search, soft (weights and logits train on each batch) and hard (one
   sampled operation in each block), at uniform pi; and its step divided by that of b, measured in the same process. Aim
   for hard: 1.3.
d  experiments/paper through all four stages, one seed; seconds of each command.
e  A step of 12 blocks of width 64, interleaved, with 8,000 tokens: as a CUDA graph, and kernel by kernel.

peak_mb: the highest memory of tensors on the GPU; without a GPU, of the process. --small shrinks everything, so that
the program runs on a CPU. The last line is JSON.
"""

import argparse
import gc
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

WARM_UP = 20  # steps that compile operations and fill the memories
TENSORFLOW_STEPS = 56_500
BASE = {"d_model": 512, "heads": 8, "d_ffn": 2048, "blocks": 32, "cutoffs": [20_000, 40_000, 200_000]}
BASE_SHAPE, WORDS = {"batch_size": 64, "segment": 192, "memory": 192}, 267_735
SMALL = {"d_model": 32, "heads": 4, "d_ffn": 64, "blocks": 4, "cutoffs": [200, 1000]}
SMALL_SHAPE, SMALL_WORDS = {"batch_size": 4, "segment": 16, "memory": 16}, 3_000
AIMS = {"a": ("seconds", 60), "b": ("utilisation", 0.4), "c": ("hard_over_retrain_step", 1.3)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", metavar="section.key=value", help="for all parts")
    parser.add_argument("--parts", default="abcde", help="parts to run (default abcde)")
    parser.add_argument("--source", default="wikitext-2", help="data.source of part d (default: downloads wikitext-2)")
    parser.add_argument("--seconds", type=float, default=15, help="seconds of each measurement in parts b and c")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which part a stops")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the program")
    parser.add_argument("--part", choices=list("abcde"), help=argparse.SUPPRESS)  # the process of one part
    return parser.parse_intermixed_args()


def configure(options: list[str], **sections):
    """The defaults without n-grams and dropout, updated by these sections, then by the options."""
    import yaml

    from nas.core.config_loading import load_config

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.yaml"
        sections["model"] = {"ngram_rows": [], "dropout": 0} | sections.get("model", {})
        sections["train"] = {"weight_decay": 0.02} | sections.get("train", {})
        path.write_text(yaml.safe_dump(sections))
        return load_config(path, options)


def zipf_corpus(tokens: int, words: int = 12_000):
    """A corpus of independent random tokens; rank r has a probability proportional to 1 / (r + 1)^1.07."""
    import numpy as np

    from experiments.helpers import ArrayCorpus

    probability = np.arange(1.0, words + 1) ** -1.07
    stream = np.random.default_rng(0).choice(words, tokens, p=probability / probability.sum())
    return ArrayCorpus(words, train=stream, valid=stream[: tokens // 10])


def shared_soft(warmup_steps: int = 0) -> dict:
    return {"method": "gumbel", "split": "shared", "optimizer": {"lr": 0.01}, "warmup_steps": warmup_steps}


def make_phase(config, corpus, pattern: list[str] | None = None):
    """A retraining of a pattern, or a search, on its device."""
    from nas.costs.flops import count_flops
    from nas.gumbel.gumbel_phase import GumbelPhase
    from nas.retraining.phase import RetrainPhase
    from nas.training.build import build_fixed
    from nas.training.device import set_up_device

    runtime = set_up_device(config.seed, config.train)
    if pattern:
        config = replace(config, train=replace(config.train, residual=False))  # these corpora have no folder
        return RetrainPhase(build_fixed(pattern, config, corpus.vocab_size), corpus, config, runtime)
    costs = count_flops(config, corpus.counts())
    return GumbelPhase(corpus, config, runtime, costs)


def step_seconds(phase, seconds: float, group: int = 5) -> float:
    """Mean seconds of a step after a warm-up, from groups of steps."""
    steps = 0

    def run_steps(count: int) -> None:
        nonlocal steps
        for _ in range(count):
            steps += 1
            phase.step(steps)
        phase.runtime.synchronize()

    run_steps(WARM_UP)
    started, first = time.perf_counter(), steps
    while time.perf_counter() - started < seconds:
        run_steps(group)
    return (time.perf_counter() - started) / (steps - first)


def product_rate(runtime, size: int) -> float:
    """FLOP/s of products of random square matrices: median of five; bf16 on a GPU, float32 without one."""
    import torch

    dtype = torch.bfloat16 if runtime.is_gpu else torch.float32
    a, b = (torch.randn(size, size, device=runtime.device, dtype=dtype) for _ in range(2))
    rates = []
    for _ in range(5):
        runtime.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        runtime.synchronize()
        rates.append(10 * 2 * size**3 / (time.perf_counter() - started))
    return sorted(rates)[2]


def peak_mb(runtime) -> float:
    import torch

    if runtime.is_gpu:
        return torch.cuda.max_memory_allocated(runtime.device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def tensorflow_training(arguments) -> dict:
    steps = 60 if arguments.small else TENSORFLOW_STEPS
    model = {"d_model": 128, "heads": 4, "d_ffn": 512, "blocks": 6, "cutoffs": [250, 2500]}
    train = {"batch_size": 32, "segment": 32, "memory": 16, "steps": steps}
    config = configure(arguments.options, model=model, train=train, search=shared_soft(steps // 4))
    corpus = zipf_corpus(200_000 if arguments.small else 2_000_000)
    started = time.perf_counter()
    phase = make_phase(config, corpus)
    marks = [(0, time.perf_counter())]  # (steps, time)
    total, nan_by_step = 0.0, None
    for step in range(1, steps + 1):
        nll, _ = phase.step(step)
        total = total + nll
        if step % 500 == 0 or step == steps:
            if nan_by_step is None and not math.isfinite(total):
                nan_by_step = step
            phase.runtime.synchronize()
            marks.append((step, time.perf_counter()))
            if marks[-1][1] - started > arguments.limit:
                break
    (previous, previous_time), (done, now) = marks[-2:]
    step_ms = 1e3 * (now - previous_time) / (done - previous)
    return {
        "seconds": now - started + (steps - done) * step_ms / 1e3,
        "steps_done": done,
        "of_steps": steps,
        "last_step_ms": step_ms,
        "tokens_per_s": 1024e3 / step_ms,
        "nll": float(nll),
        "nan_by_step": nan_by_step,
        "peak_mb": peak_mb(phase.runtime),
    }


def base_model(arguments, search: dict):
    """(configuration, corpus) of Transformer-XL base, or of a tiny model with --small."""
    model, shape, words = (SMALL, SMALL_SHAPE, SMALL_WORDS) if arguments.small else (BASE, BASE_SHAPE, WORDS)
    config = configure(arguments.options, model=model, train={**shape, "steps": 10**6}, search=search)
    return config, zipf_corpus(20_000 if arguments.small else 3_000_000, words)


def retrain_base(arguments) -> dict:
    from nas.core.pattern import interleaved
    from nas.costs.flops import count_flops

    config, corpus = base_model(arguments, {})
    pattern = interleaved(config.model.blocks)
    phase = make_phase(config, corpus, pattern)
    rate = product_rate(phase.runtime, 512 if arguments.small else 8192)
    seconds = step_seconds(phase, arguments.seconds)
    tokens_per_s = config.train.batch_size * config.train.segment / seconds
    flops = 3 * count_flops(config, corpus.counts()).cost(pattern)
    return {
        "parameters": sum(parameter.numel() for parameter in phase.model.parameters()),
        "step_ms": 1e3 * seconds,
        "tokens_per_s": tokens_per_s,
        "flops_per_token": flops,
        "product_tflops": rate / 1e12,
        "utilisation": flops * tokens_per_s / rate,
        "peak_mb": peak_mb(phase.runtime),
    }


def search_base(arguments) -> dict:
    import torch

    from nas.core.pattern import interleaved

    kinds = {"retrain": None, "hard": shared_soft() | {"sampling": "hard"}, "soft": shared_soft()}
    figures = {}
    for name, search in kinds.items():
        config, corpus = base_model(arguments, search or {})
        phase = make_phase(config, corpus, None if search else interleaved(config.model.blocks))
        if phase.runtime.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        figures[f"{name}_step_ms"] = 1e3 * step_seconds(phase, arguments.seconds)
        figures[f"{name}_peak_mb"] = peak_mb(phase.runtime)
        del phase
        gc.collect()
        torch._dynamo.reset()  # drops compiled code of the deleted phase
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for name in ("hard", "soft"):
        figures[f"{name}_over_retrain_step"] = figures[f"{name}_step_ms"] / figures["retrain_step_ms"]
    return figures


def four_stages(arguments) -> dict:
    import yaml

    folder = ROOT / "experiments/paper"
    options = [f"data.source={arguments.source}", *arguments.options]
    warmup = []
    if arguments.small:
        warmup = ["search.warmup_steps=5"]
        small = "train.steps=20 train.evaluate_every=0 search.latency.source=none"
        options += [*small.split(), "data.vocab_size=300", "data.tokenizer=bytes"]
    with tempfile.TemporaryDirectory() as runs:
        search, retrain = Path(runs) / "search", Path(runs) / "retrain"
        commands = {
            "search": [folder / "search.yaml", "--run", search, *options, *warmup],
            "derive": [search],
            "retrain": [search / "pattern.yaml", folder / "retrain.yaml", "--run", retrain, *options],
            "animate": [search],
        }
        seconds = {}
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, ROOT / f"{name}.py", *command], check=True, stdout=sys.stderr)
            seconds[f"{name}_s"] = time.perf_counter() - started
        results = yaml.safe_load((retrain / "results.yaml").read_text())
    quality = {"pattern": results["pattern"], "valid_perplexity": results["valid"]["perplexity"]}
    return {"seconds": sum(seconds.values()), **seconds, **quality}


def small_step(arguments) -> dict:
    from nas.core.pattern import interleaved
    from nas.training.train_step import ReplayedStep

    model, tokens, words = {"d_model": 64, "heads": 4, "d_ffn": 256, "blocks": 12}, 400_000, 8_000
    if arguments.small:
        model, tokens, words = SMALL, 20_000, SMALL_WORDS
    config, figures = configure(arguments.options, model=model, train={"steps": 10**6}), {}
    corpus, usual = zipf_corpus(tokens, words), ReplayedStep.REPEATS
    for name, repeats in {"graph": usual, "kernels": math.inf}.items():
        ReplayedStep.REPEATS = repeats
        phase = make_phase(config, corpus, interleaved(config.model.blocks))
        figures[f"{name}_step_ms"] = 1e3 * step_seconds(phase, arguments.seconds)
    ReplayedStep.REPEATS = usual
    return figures | {"speed_up": figures["kernels_step_ms"] / figures["graph_step_ms"]}


def rounded(figures: dict) -> dict:
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in figures.items()}


def run_part(part: str) -> dict:
    """Run a part in a new process, so that its memory, compiled code and failures do not affect other parts."""
    print(f"part {part}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", part], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    arguments = parse_arguments()
    if arguments.part:
        parts = {"a": tensorflow_training, "b": retrain_base, "c": search_base, "d": four_stages, "e": small_step}
        print(json.dumps(rounded(parts[arguments.part](arguments))))
        return
    import torch

    from nas.core.run_folder import git_commit, processor
    from nas.training.device import choose_runtime

    runtime = choose_runtime(configure(arguments.options).train)
    environment = {"device": runtime.name, "precision": runtime.precision, "compile": runtime.compile}
    environment |= {"processor": processor(), "torch": str(torch.__version__), "commit": git_commit()}
    results = {}
    for part in arguments.parts:
        started = time.perf_counter()
        results[part] = run_part(part) | {"wall_s": round(time.perf_counter() - started, 1)}
        print(part, json.dumps(results[part]), flush=True)
    for part, (key, aim) in AIMS.items() if runtime.is_gpu and not arguments.small else ():
        if key in results.get(part, {}):
            value = results[part][key]
            met = value >= aim if key == "utilisation" else value <= aim
            print(f"{part}: {key} {value}, aim {aim}: {'met' if met else 'MISSED'}")
    print(json.dumps({**environment, "options": arguments.options, "small": arguments.small, **results}))


if __name__ == "__main__":
    from nas.core.errors import run_command

    run_command(main)
