"""Speed of training and evaluation on this CPU: `python experiments/bench/throughput.py [--threads 1]`.

Regime: d_model 128, 4 heads, d_ffn 512, 6 blocks, no dropout; vocabulary 12,000 with cutoffs 250 and 2,500, tied to the
embedding. Tokens are drawn by a Zipf law whose clusters have about the same shares as WikiText-2's. --div-value 4 gives
tails of width 32 and 8 without tying; then the FLOPs of a soft step match the known rate of the TensorFlow
implementation. Everything runs in one process, through the classes that the commands use. The configurations take
turns. Each round measures the peak rate as well, and figures are medians over rounds. Compare ratios within one run:
machines differ.

- peak_gflops: rate of the fastest of the model's own matrix products in fp32 (forward pass and both gradients of its
  projections, dense blocks and output layer). Median over all measurements.
- search_soft: a step trains weights and logits on one batch through all candidates, as the TensorFlow implementation
  does. retrain_*: a fixed pattern.
- flops_per_token: FLOPs of matrix products; a multiply-add counts as two. A forward pass takes, per token (D width, F
  inner width of a dense block, L segment, M memory, B batch, K = L + M; nas/costs/flops.py computes the sum)
      attention  2 D^2 (2 + 2 K/L + K/(L B)) + 6 D K      dense  4 D F
      output     2 D (size of the head, plus size of each tail times its share of the tokens)
  A backward pass takes twice that (gradients of inputs and weights), so training takes 3 forward passes: through all
  candidates in a search. An evaluation takes 1. Evaluation reads some tokens
  twice to fill its memories; these are not counted.
- utilisation: flops_per_token * tokens_per_s / the peak measured just before. peak_gflops is a median, so utilisation
  does not follow exactly from it.
- peak_mb: the highest memory of the process while only this configuration was alive, with PyTorch (Linux only).
- position_overhead_192: time of an attention block at 192/192 (forward and backward pass) divided by its time without
  the position term (projection, product and shift).
- depth_growth_6_to_24: step of a search at 24 blocks / at 6 blocks. depth_linearity: the same step / the prediction of
  a straight line through the steps at 6 and 12 blocks.
- speedup_192 (with more than one thread): each row's rate divided by its rate with one thread, in the same rounds.

The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

VOCABULARY, CUTOFFS, ZIPF = 12_000, [250, 2500], 1.07
SHAPES = {32: {"memory": 16, "batch": 32}, 192: {"memory": 192, "batch": 8}}  # by segment
# The TensorFlow implementation's soft search at 32/16, measured once on one core with this peak (not by this program).
TENSORFLOW_TOKENS_PER_S, TENSORFLOW_PEAK_GFLOPS = 3900, 130
PATTERNS = {
    "retrain_adadad": ["attention", "dense"] * 3,
    "retrain_adddad": ["attention", "dense", "dense", "dense", "attention", "dense"],
}
NAMES = ["search_soft", *PATTERNS, "evaluate"]


def zipf_corpus(tokens: int, words: int = VOCABULARY):
    """A corpus of independent random tokens; rank r has a probability proportional to 1 / (r + 1)^1.07."""
    import numpy as np

    from experiments.helpers import ArrayCorpus

    probability = (np.arange(words) + 1.0) ** -ZIPF
    stream = np.random.default_rng(0).choice(words, tokens, p=probability / probability.sum())
    return ArrayCorpus(words, train=stream, valid=stream[: tokens // 10])


def make_config(segment: int, div_value: int, blocks: int = 6):
    from nas.core.config import CANDIDATES, Config, ModelOptions, TrainOptions

    shape = SHAPES[segment]
    model = ModelOptions(
        blocks=blocks, cutoffs=CUTOFFS, div_value=div_value, tie_embeddings=div_value == 1, ngram_rows=[], dropout=0.0
    )
    config = Config(model=model)
    shape = {"batch_size": shape["batch"], "segment": segment, "memory": shape["memory"]}
    config.train = TrainOptions(
        steps=10**6, optimizer="adamw", weight_decay=0.1, short_share=0.0, residual=False, device="cpu", **shape
    )
    config.resolve_defaults()
    config.evaluate.batch_size = shape["batch_size"]
    search = config.search
    search.method, search.split, search.warmup_steps = "gumbel", "shared", 0
    search.operations = [*CANDIDATES["gumbel"]]
    return config


class Workload:
    """A row of the table: one configuration and its work."""

    def __init__(self, name: str, segment: int, corpus, div_value: int, blocks: int = 6):
        from nas.costs.flops import count_flops
        from nas.gumbel.gumbel_phase import GumbelPhase
        from nas.retraining.phase import RetrainPhase
        from nas.training.build import build_fixed
        from nas.training.device import choose_runtime

        self.name, self.segment, self.corpus, self.steps = name, segment, corpus, 0
        self.config = make_config(segment, div_value, blocks)
        runtime, costs = choose_runtime(self.config.train), count_flops(self.config, corpus.counts())
        if name == "search_soft":
            self.phase = GumbelPhase(corpus, self.config, runtime, costs)
        else:
            pattern = PATTERNS.get(name, PATTERNS["retrain_adadad"])
            self.phase = RetrainPhase(
                build_fixed(pattern, self.config, corpus.vocab_size), corpus, self.config, runtime
            )
        candidates = [costs.blocks[operation] for operation in self.config.search.operations]
        if name == "search_soft":
            self.flops_per_token = 3 * (costs.overhead + blocks * sum(candidates))
        elif name == "evaluate":
            self.flops_per_token = costs.cost(pattern)
        else:
            self.flops_per_token = 3 * costs.cost(pattern)

    def turn(self) -> int:
        """Run the smallest representative piece of work. Returns the number of tokens read."""
        from nas.training.evaluation import evaluate_split

        if self.name == "evaluate":
            model, runtime = self.phase.model, self.phase.runtime
            return evaluate_split(self.config, model, model.blocks, self.corpus, "valid", runtime)["tokens"]
        self.steps += 1
        return self.phase.step(self.steps)[1]

    def rate(self, seconds: float) -> float:
        """Tokens/s, measured for about this many seconds."""
        tokens, started = 0, time.perf_counter()
        while (taken := time.perf_counter() - started) < seconds:
            tokens += self.turn()
        return tokens / taken


def products() -> list[tuple]:
    """Pairs of matrices with the sizes of the model's products at 1,024 tokens, about the size of a batch."""
    import torch

    width, inner, tokens = 128, 512, 1024
    sizes = [
        (tokens, width, width),  # attention's projections
        (tokens, width, inner), (tokens, inner, width),  # a dense block
        (width, tokens, inner), (inner, tokens, width),  # the gradients of its weights
        (tokens, width, CUTOFFS[0] + 2), (tokens // 4, width, CUTOFFS[1] - CUTOFFS[0]),  # the output layer
    ]  # fmt: skip
    return [(torch.randn(rows, inner), torch.randn(inner, columns)) for rows, inner, columns in sizes]


def peak_rate(pairs: list[tuple], seconds: float = 0.1) -> float:
    """FLOP/s of the fastest of the products."""
    import torch

    best = 0.0
    for a, b in pairs:
        out, count, started = torch.empty(a.shape[0], b.shape[1]), 0, time.perf_counter()
        while (taken := time.perf_counter() - started) < seconds:
            for _ in range(20):
                torch.mm(a, b, out=out)
            count += 20
        best = max(best, 2 * a.numel() * b.shape[1] * count / taken)
    return best


class AttentionBlock:
    """An attention block at 192/192, with or without the position term."""

    def __init__(self, with_position: bool):
        import torch

        from models.operations.attention import Attention
        from models.operations.operation import BlockConfig, Segment
        from models.relative_attention import sinusoidal_encodings

        shape = SHAPES[192]
        self.operation = Attention(BlockConfig(128, relative=with_position), heads=4, key_heads=4)
        self.x = torch.randn(shape["batch"], 192, 128, requires_grad=True)
        memory = shape["memory"]
        self.segment = Segment(sinusoidal_encodings(192 + memory, 128), 0, memory, memory)
        self.state = self.operation.remember(torch.randn(shape["batch"], memory, 128), self.segment)
        self.grad_output = torch.randn_like(self.x)

    def seconds(self, repeats: int = 20) -> float:
        """Mean seconds of a forward and backward pass."""
        started = time.perf_counter()
        for _ in range(repeats):
            branch, _ = self.operation(self.x, self.state, self.segment)
            branch.backward(self.grad_output)
        return (time.perf_counter() - started) / repeats


def measure(threads: int, rounds: int, seconds: float, div_value: int) -> dict:
    from experiments.helpers import peak_memory_mb
    from nas.core.config import TrainOptions
    from nas.training.device import set_up_device

    set_up_device(1, TrainOptions(threads=threads, device="cpu"))
    corpus = zipf_corpus(1_000_000)
    rows = [(name, segment) for segment in SHAPES for name in NAMES]
    peaks_mb = {row: peak_memory_mb(lambda row=row: Workload(*row, corpus, div_value).rate(0.5)) for row in rows}
    workloads = {row: Workload(*row, corpus, div_value) for row in rows}
    deep = {blocks: Workload("search_soft", 32, corpus, div_value, blocks) for blocks in (12, 24)}
    deep[6] = workloads["search_soft", 32]
    attention = {with_position: AttentionBlock(with_position) for with_position in (True, False)}
    values: dict = {}
    for index in range(rounds + 1):
        figures = measure_workloads(workloads, threads, seconds)
        step = {blocks: 1 / workload.rate(seconds) for blocks, workload in deep.items()}
        figures["growth"] = step[24] / step[6]
        figures["linearity"] = step[24] / (step[6] + 3 * (step[12] - step[6]))
        figures["position"] = attention[True].seconds() / attention[False].seconds()
        print(f"round {index} of {rounds}" if index else "warmed up", file=sys.stderr, flush=True)
        for key, value in figures.items() if index else ():
            values.setdefault(key, []).append(value)
    return {"threads": threads, "div_value": div_value, **summary(values, workloads, peaks_mb)}


def measure_workloads(workloads: dict, threads: int, seconds: float) -> dict:
    """{(figure, row): value} of a round."""
    import torch

    figures, pairs = {}, products()
    for row, workload in workloads.items():
        peak, rate = peak_rate(pairs), workload.rate(seconds)
        figures["peak", row], figures["rate", row] = peak, rate
        figures["utilisation", row] = rate * workload.flops_per_token / peak
        if threads > 1 and row[1] == 192:
            torch.set_num_threads(1)
            figures["speedup", row] = rate / workload.rate(seconds)
            torch.set_num_threads(threads)
    return figures


def summary(values: dict[object, list[float]], workloads: dict, peaks_mb: dict) -> dict:
    """Medians over rounds of the values that measure() collected."""

    def median(key, digits):
        return round(statistics.median(values[key]), digits)

    rows = list(workloads)
    peaks = [peak for row in rows for peak in values["peak", row]]
    result = {
        "peak_gflops": round(statistics.median(peaks) / 1e9, 1),
        "rows": [
            {
                "name": row[0],
                "segment": row[1],
                "memory": SHAPES[row[1]]["memory"],
                "tokens_per_s": round(median(("rate", row), 1)),
                "flops_per_token": round(workloads[row].flops_per_token),
                "utilisation": median(("utilisation", row), 3),
                "peak_mb": peaks_mb[row] and round(peaks_mb[row]),
            }
            for row in rows
        ],
        "position_overhead_192": median("position", 2),
        "depth_growth_6_to_24": median("growth", 2),
        "depth_linearity": median("linearity", 3),
    }
    speedups = {row[0]: median(("speedup", row), 2) for row in rows if ("speedup", row) in values}
    return {**result, "speedup_192": speedups} if speedups else result


def report(result: dict) -> None:
    print(f"{result['threads']} threads, peak {result['peak_gflops']} GFLOP/s")
    print(f"{'':<16}{'segment':>8}{'memory':>8}{'tokens/s':>10}{'FLOPs/token':>13}{'utilisation':>13}{'peak MB':>9}")
    for row in result["rows"]:
        print(
            f"{row['name']:<16}{row['segment']:>8}{row['memory']:>8}{row['tokens_per_s']:>10,}"
            f"{row['flops_per_token']:>13,}{row['utilisation']:>13.3f}{row['peak_mb'] or '?':>9}"
        )
    soft = next(row["tokens_per_s"] for row in result["rows"] if row["name"] == "search_soft" and row["segment"] == 32)
    times = soft / TENSORFLOW_TOKENS_PER_S
    scaled = times * TENSORFLOW_PEAK_GFLOPS / result["peak_gflops"]
    print(f"tokens/s of a search / TensorFlow implementation's: {times:.1f}, at equal peak rates {scaled:.1f}")
    print(f"attention block, with / without position term, 192/192: {result['position_overhead_192']}")
    print(
        f"step of a search, 24 / 6 blocks: {result['depth_growth_6_to_24']}; 24 / linear: {result['depth_linearity']}"
    )
    for name, speedup in result.get("speedup_192", {}).items():
        print(f"{name}, 192/192: {speedup} times one thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7, help="rounds, after one for warming up")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each measurement")
    parser.add_argument("--div-value", type=int, default=1, help="as model.div_value; above 1 nothing is tied")
    arguments = parser.parse_args()
    result = measure(arguments.threads, arguments.rounds, arguments.seconds, arguments.div_value)
    report(result)
    print(json.dumps(result))


if __name__ == "__main__":
    from nas.core.errors import run_command

    run_command(main)
