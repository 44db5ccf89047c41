"""How fast a GPU searches and trains: `python experiments/bench/gpu.py --source FOLDER` (WikiText-2).

Meant to take under 8 minutes. Four parts, each in a process of its own, through the classes and commands that users
use. Options as they are by default (train.precision=auto, train.compile=auto), or given at the end of the command, such
as train.compile=never.

a  The TensorFlow implementation's whole training: its soft search of 6 blocks, d_model 128, 12,000 words with cutoffs,
   segment 32, memory 16, 56,500 steps of 1,024 tokens, on as many tokens as WikiText-2 has, drawn by Zipf's law. Steps
   alone, compiling among them. Where it takes longer than --limit, what is left is reckoned at the last rate, and
   `steps_done` says so. Its own GPU took 37 minutes; aim: 60 s.
b  Transformer-XL base, interleaved: 16 layers as 32 blocks, d_model 512, 8 heads, d_ffn 2048, 192/192, 267,735 words
   with cutoffs, tied. Tokens/s of training steps after a warm-up, and the share that they are of the GPU's rate:
   `utilisation` = 3 * FLOPs per token (forward, matrix products alone) * tokens/s / the rate of a bf16 product of
   8,192 x 8,192 matrices, measured just before. Aim: 0.4.
c  The same as a search, soft (weights and logits on each batch) and hard (the defaults: every fifth step evaluates four
   paths), at uniform pi; and its step over that of b, which is measured in the same process. Aim for hard: 1.3.
d  experiments/wikitext2 through all four stages, one seed; seconds of each command.

peak_mb: the most memory that tensors had on the GPU at once; without a GPU, that the process had.
--small shrinks everything, so that a CPU can try the program. The last line is JSON.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

WARM_UP = 20  # steps: compiling, capturing, memories that fill
TENSORFLOW_STEPS = 56_500
BASE = {"d_model": 512, "heads": 8, "d_ffn": 2048, "blocks": 32, "cutoffs": [20_000, 40_000, 200_000]}
BASE_SHAPE, WORDS = {"batch_size": 64, "segment": 192, "memory": 192}, 267_735
SMALL = {"d_model": 32, "heads": 4, "d_ffn": 64, "blocks": 4, "cutoffs": [200, 1000]}
SMALL_SHAPE, SMALL_WORDS = {"batch_size": 4, "segment": 16, "memory": 16}, 3_000
AIMS = {"a": ("seconds", 60), "b": ("utilisation", 0.4), "c": ("hard_over_retrain_step", 1.3)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", metavar="section.key=value", help="of all parts")
    parser.add_argument("--parts", default="abcd", help="which (default abcd)")
    parser.add_argument(
        "--source", default="wikitext-2", help="data.source of part d (default: wikitext-2, downloaded)"
    )
    parser.add_argument("--seconds", type=float, default=15, help="that each rate of b and c is measured for")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which part a is cut short")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does the program run?")
    parser.add_argument("--part", choices=list("abcd"), help=argparse.SUPPRESS)  # the process of one part
    return parser.parse_intermixed_args()


# --- what is measured


def configure(options: list[str], **sections):
    """The defaults, with these sections' values, then the options."""
    import yaml

    from nas.core.config_loading import load_config

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.yaml"
        path.write_text(yaml.safe_dump(sections))
        return load_config(path, options)


def shared_soft(warmup_steps: int = 0) -> dict:
    return {"sampling": "soft", "split": "shared", "warmup_steps": warmup_steps, "optimizer": {"lr": 0.01}}


def ready(config, corpus, pattern: list[str] | None = None):
    """A phase on its device: of a pattern, or of a search."""
    from nas.retraining.phase import RetrainPhase
    from nas.search.phase import SearchPhase
    from nas.search.supernet import build_supernet
    from nas.training.build import build_fixed
    from nas.training.device import set_up_device

    set_up_device(config.seed, config.train)
    if pattern:
        return RetrainPhase(build_fixed(pattern, config, corpus), corpus, config)
    return SearchPhase(build_supernet(config, corpus), corpus, config)


def step_seconds(phase, seconds: float, together: int = 5) -> float:
    """Mean seconds of a step, of so many together (a hard search's fifth is another), after a warm-up."""
    steps = 0

    def go(count: int) -> None:
        nonlocal steps
        for _ in range(count):
            steps += 1
            phase.step(steps)
        phase.context.synchronize()

    go(WARM_UP)
    started, begun = time.perf_counter(), steps
    while time.perf_counter() - started < seconds:
        go(together)
    return (time.perf_counter() - started) / (steps - begun)


def product_rate(context, size: int) -> float:
    """FLOP/s of bf16 products of random square matrices; of float32 without a GPU."""
    import torch

    dtype = torch.bfloat16 if context.is_gpu else torch.float32
    a, b = (torch.randn(size, size, device=context.device, dtype=dtype) for _ in range(2))
    rates = []
    for _ in range(5):
        context.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        context.synchronize()
        rates.append(10 * 2 * size**3 / (time.perf_counter() - started))
    return sorted(rates)[2]


def peak_mb(context) -> float:
    import torch

    if context.is_gpu:
        return torch.cuda.max_memory_allocated(context.device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def tensorflow_training(arguments) -> dict:
    from throughput import ZipfCorpus

    steps = 60 if arguments.small else TENSORFLOW_STEPS
    model = {"d_model": 128, "heads": 4, "d_ffn": 512, "blocks": 6, "cutoffs": [250, 2500]}
    train = {"batch_size": 32, "segment": 32, "memory": 16, "steps": steps}
    config = configure(arguments.options, model=model, train=train, search=shared_soft(steps // 4))
    corpus = ZipfCorpus(200_000 if arguments.small else 2_000_000)
    begun = time.perf_counter()
    phase = ready(config, corpus)
    marks = [(0, time.perf_counter())]  # (steps, when)
    for step in range(1, steps + 1):
        nll, _ = phase.step(step)
        if step % 500 == 0 or step == steps:
            phase.context.synchronize()
            marks.append((step, time.perf_counter()))
            if marks[-1][1] - begun > arguments.limit:
                break
    (before, earlier), (done, now) = marks[-2:]
    step_ms = 1e3 * (now - earlier) / (done - before)
    return {
        "seconds": now - begun + (steps - done) * step_ms / 1e3,
        "steps_done": done,
        "of_steps": steps,
        "last_step_ms": step_ms,
        "tokens_per_s": 1024e3 / step_ms,
        "nll": float(nll),
        "peak_mb": peak_mb(phase.context),
    }


def base(arguments, search: dict):
    """(configuration, corpus) of Transformer-XL base."""
    from throughput import ZipfCorpus

    model, shape, words = (SMALL, SMALL_SHAPE, SMALL_WORDS) if arguments.small else (BASE, BASE_SHAPE, WORDS)
    search = {"warmup_steps": 0, **search}
    config = configure(arguments.options, model=model, train={**shape, "steps": 10**6}, search=search)
    return config, ZipfCorpus(20_000 if arguments.small else 3_000_000, words)


def retrain_base(arguments) -> dict:
    from nas.core.pattern import interleaved
    from nas.costs.flops import count_flops

    config, corpus = base(arguments, {})
    pattern = interleaved(config.model.blocks)
    phase = ready(config, corpus, pattern)
    rate = product_rate(phase.context, 512 if arguments.small else 8192)
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
        "peak_mb": peak_mb(phase.context),
    }


def search_base(arguments) -> dict:
    import torch

    from nas.core.pattern import interleaved

    found, kinds = (
        {},
        {"retrain": None, "hard": {"optimizer": {"lr": 1e-12}}, "soft": shared_soft()},
    )  # pi stays uniform
    for name, search in kinds.items():
        config, corpus = base(arguments, search or {})
        phase = ready(config, corpus, None if search else interleaved(config.model.blocks))
        if phase.context.is_gpu:
            torch.cuda.reset_peak_memory_stats()
        found[f"{name}_step_ms"] = 1e3 * step_seconds(phase, arguments.seconds)
        found[f"{name}_peak_mb"] = peak_mb(phase.context)
        del phase
        torch._dynamo.reset()  # and with it the graphs of what is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for name in ("hard", "soft"):
        found[f"{name}_over_retrain_step"] = found[f"{name}_step_ms"] / found["retrain_step_ms"]
    return found


def four_stages(arguments) -> dict:
    folder = ROOT / "experiments" / ("demo" if arguments.small else "wikitext2")
    options = [f"data.source={arguments.source}", *arguments.options]
    if arguments.small:
        small = "train.steps=20 train.evaluate_every=0 search.warmup_steps=10 search.latency.source=none"
        options += [*small.split(), "data.vocab_size=300", "data.tokenizer=bytes"]
    with tempfile.TemporaryDirectory() as runs:
        search, retrain = Path(runs) / "search", Path(runs) / "retrain"
        commands = {
            "search": [folder / "search.yaml", "--run", search, *options],
            "derive": [search],
            "retrain": [search / "pattern.yaml", folder / "retrain.yaml", "--run", retrain, *options],
            "animate": [search],
        }
        seconds = {}
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, ROOT / f"{name}.py", *command], check=True, stdout=sys.stderr)
            seconds[f"{name}_s"] = time.perf_counter() - started
        import yaml

        results = yaml.safe_load((retrain / "results.yaml").read_text())
    about = {"pattern": results["pattern"], "valid_perplexity": results["valid"]["perplexity"]}
    return {"seconds": sum(seconds.values()), **seconds, **about}


# --- the command


def rounded(about: dict) -> dict:
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in about.items()}


def run_part(part: str) -> dict:
    """In a process of its own: memory, compiled code and failures are its own too."""
    print(f"part {part}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", part], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": done.returncode}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    arguments = parse_arguments()
    if arguments.part:
        parts = {"a": tensorflow_training, "b": retrain_base, "c": search_base, "d": four_stages}
        print(json.dumps(rounded(parts[arguments.part](arguments))))
        return
    import torch

    from nas.core.provenance import git_commit, processor
    from nas.training.device import device_context

    context = device_context(configure(arguments.options).train)
    about = {"device": context.name, "precision": context.precision, "compile": context.compile}
    about |= {"processor": processor(), "torch": str(torch.__version__), "commit": git_commit()}
    found = {}
    for part in arguments.parts:
        started = time.perf_counter()
        found[part] = run_part(part) | {"wall_s": round(time.perf_counter() - started, 1)}
        print(part, json.dumps(found[part]), flush=True)
    for part, (key, aim) in AIMS.items() if context.is_gpu and not arguments.small else ():
        if key in found.get(part, {}):
            value = found[part][key]
            met = value >= aim if key == "utilisation" else value <= aim
            print(f"{part}: {key} {value}, aim {aim}: {'met' if met else 'MISSED'}")
    print(json.dumps({**about, "options": arguments.options, "small": arguments.small, **found}))


if __name__ == "__main__":
    from nas.core.errors import run_command

    run_command(main)
