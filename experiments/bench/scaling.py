"""Estimated cost of search and retraining on many GPUs: `python experiments/bench/scaling.py`.

Nothing is measured. Two sizes: the paper's (32 blocks of width 512 on WikiText-103), and `tenfold`, whose blocks have
ten times the parameters (36 blocks of width 1536; d_ffn and heads in proportion). A step reads --rows rows of 192
tokens with a memory of 192, divided over the ranks. The frequency of a word is its rank to the power of -(--zipf).

- step_costs.py defines the modes (retrain, soft, hard), FLOPs, the bytes that a rank sends, and the kinds of memory.
- late: the share of the bytes that no backward pass can hide. The table's gradient is complete only at the end of the
  backward pass; a hard search averages all gradients after it.
- memory of a rank: weights, gradients and both moments are fp32, products bf16. "minimal" reads one row at a time
  (train.grad_accum_steps) and recomputes blocks (model.recompute). Hard search is given for its mean path.
- FSDP: parameters, gradients and moments are divided over the ranks; the traffic is 1.5 times that of DDP.
- Times are FLOPs divided by the GPU's rate, and bytes divided by a link's rate. These rates are assumptions and
  options. Latencies of messages are left out. NVLink's rate holds within a machine. Between machines a ring uses one
  link (`1 link`), or one for each GPU (`8 links`), whose rates add up.
- efficiency: share of a step's time spent computing. A step waits for all late bytes. It waits for the others only as
  far as they take longer than the backward pass, which is two thirds of the computing.

--out FILE writes the tables as Markdown too. The last line is JSON.
"""

import argparse
import json
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from step_costs import MODES, StepCosts  # noqa: E402

RANKS = (1, 2, 8, 64)
VOCABULARY, CUTOFFS = 267_735, [20_000, 40_000, 200_000]
SCALES = {"paper": (32, 512), "tenfold": (36, 1536)}  # blocks, d_model
GPUS = (80e9, 141e9)  # bytes


def word_counts(vocab_size: int, exponent: float):
    """Relative frequency of each word [V], descending."""
    return np.arange(1.0, vocab_size + 1) ** -exponent


@lru_cache(None)
def costs_of(blocks: int, d_model: int, rows: int, zipf: float) -> StepCosts:
    """The options of experiments/wikitext103 at another size: heads of width 64, d_ffn four times the width."""
    from nas.core.config import Config, ModelOptions, TrainOptions
    from nas.core.config_loading import resolve_defaults

    sizes = {"blocks": blocks, "d_model": d_model, "heads": d_model // 64, "d_ffn": 4 * d_model}
    config = Config(model=ModelOptions(**sizes, dropout=0.1, cutoffs=CUTOFFS))
    config.train = TrainOptions(batch_size=rows, segment=192, memory=192, optimizer="adamw", short_share=0.0)
    config.search.paths = 4
    config.search.latency.timing = "training"  # so that FLOPs are counted at the sizes of training
    resolve_defaults(config)
    return StepCosts(config, word_counts(VOCABULARY, zipf))


# --- figures


def sizes_of(costs: StepCosts) -> dict:
    """Parameters, and forward FLOPs per token."""
    operations = {name: count for name, count in costs.operations.items() if count}
    return {
        **operations,
        "table": costs.table,
        "blocks": costs.parameters("retrain") - costs.overhead,
        "whole": costs.parameters("retrain"),
        "supernet": costs.parameters("soft"),
        "flops": {name: costs.flops.blocks[name] for name in operations} | {"overhead": costs.flops.overhead},
        "tails": [share for _, share in costs.clusters[1:]],
    }


def traffic_of(costs: StepCosts, mode: str, options) -> dict:
    """FLOPs and bytes of a step, and the times that they take."""
    train, rate = costs.config.train, options.peak * 1e12 * options.utilisation
    links = {"NVLink": 1e9 * options.nvlink, "8 links": 8e9 * options.link, "1 link": 1e9 * options.link}  # bytes/s
    flops, late = costs.step_flops(mode), costs.late_share(mode)
    by_ranks = {}
    for ranks in RANKS:
        sent, compute = costs.sent(mode, ranks), flops / ranks / rate
        send = {name: sent / link for name, link in links.items()}
        waits = {name: late * time + max(0.0, (1 - late) * time - compute * 2 / 3) for name, time in send.items()}
        efficiency = {name: compute / (compute + wait) for name, wait in waits.items()}
        by_ranks[ranks] = {"sent": sent, "compute_s": compute, "send_s": send, "efficiency": efficiency}
    # With W ranks: flops / (W rate) = 2 (W - 1) / W all_reduced / link, solved for W; with many ranks, for their rows.
    balance = {name: flops / rate / (2 * costs.all_reduced(mode) / link) for name, link in links.items()}
    return {
        "flops_per_token": flops / train.batch_size / train.segment,
        "flops_per_step": flops,
        "late": late,
        "ranks": by_ranks,
        "fsdp_sent": 1.5 * costs.sent(mode, RANKS[-1]),
        "equal_at_ranks": {name: 1 + ratio for name, ratio in balance.items()},
        "equal_at_rows": {name: train.batch_size / ratio for name, ratio in balance.items()},
    }


def memory_of(costs: StepCosts, mode: str) -> dict:
    """Bytes of each kind on a rank, for 1, 8 and 64 ranks; at a minimum; and the total with FSDP."""
    rows = costs.config.train.batch_size
    result = {f"{ranks} rank{'s' * (ranks > 1)}": costs.memory(mode, rows / ranks, ranks) for ranks in (1, 8, 64)}
    result["64 ranks, minimal"] = costs.memory(mode, rows / 64, 64, recompute=True, parts=rows // 64)
    for ranks in (8, 64):
        result[f"{ranks} ranks, FSDP"] = {"total": costs.fsdp_memory(mode, rows / ranks, ranks)}
    return result


def largest_model(mode: str, gpu: float, minimal: bool, options) -> dict:
    """The widest model (a multiple of 64) that fits on each of 64 ranks without FSDP."""
    blocks, _ = SCALES["tenfold"]
    kind = "64 ranks, minimal" if minimal else "64 ranks"
    fits, too_wide = 1, 512  # in multiples of 64
    while too_wide - fits > 1:
        middle = (fits + too_wide) // 2
        memory = memory_of(costs_of(blocks, 64 * middle, options.rows, options.zipf), mode)
        if memory[kind]["total"] <= gpu * options.usable:
            fits = middle
        else:
            too_wide = middle
    parameters = costs_of(blocks, 64 * fits, options.rows, options.zipf).parameters(mode)
    size = {"d_model": 64 * fits, "parameters": parameters, "state": 16 * parameters}
    return {"mode": mode, "gpu": gpu, "minimal": minimal, **size}


def figures_of(options) -> dict:
    scales = {}
    for name, (blocks, width) in SCALES.items():
        costs = costs_of(blocks, width, options.rows, options.zipf)
        saved = {kind: costs.saved_by(kind)._asdict() for kind in ("attention", "dense")}
        scales[name] = {
            "blocks": blocks,
            "d_model": width,
            "sizes": sizes_of(costs),
            "saved": saved | {"output": costs.saved_by_output()._asdict()},
            "traffic": {mode: traffic_of(costs, mode, options) for mode in MODES},
            "memory": {mode: memory_of(costs, mode) for mode in MODES},
        }
    cases = [(mode, gpu, minimal) for mode in MODES for gpu in GPUS for minimal in (False, True)]
    return {"scales": scales, "largest": [largest_model(*case, options) for case in cases]}


# --- tables


def format_table(title: str, header: list[str], rows: list[list]) -> str:
    """A table whose first column is aligned left, the others right."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in cells
    ]
    return "\n".join(["", title, *lines])


def mega(number: float) -> str:
    return f"{number / 1e6:,.2f}"


def giga(number: float) -> str:
    return f"{number / 1e9:,.2f}"


def format_scale(name: str, scale: dict, rows: int) -> str:
    sizes, memory = scale["sizes"], scale["memory"]
    tails = ", ".join(f"{share:.1%}" for share in sizes["tails"])
    parts = [f"\n=== {name}: {scale['blocks']} blocks of width {scale['d_model']}, {rows} rows a step"]
    parts += [f"share of the tokens in each tail: {tails}"]
    keys = ["attention", "dense", "table", "blocks", "whole", "supernet"]
    parts += [format_table("parameters, millions", ["", *keys], [["", *(mega(sizes[key]) for key in keys)]])]
    flops = sizes["flops"]
    parts += [format_table("FLOPs per token, forward, millions", ["", *flops], [["", *map(mega, flops.values())]])]
    saved = [[kind, *map(mega, part.values())] for kind, part in scale["saved"].items()]
    parts += [format_table("saved for the backward pass, MB", ["", "per row", "shared"], saved)]
    kinds = list(memory["retrain"]["1 rank"])
    for mode, cases in memory.items():
        cells = [[case, *(giga(size[kind]) if kind in size else "" for kind in kinds)] for case, size in cases.items()]
        parts += [format_table(f"memory of a rank, GB, {mode}", ["", *kinds], cells)]
    return "\n".join([*parts, *(format_traffic(mode, traffic) for mode, traffic in scale["traffic"].items())])


def format_traffic(mode: str, traffic: dict) -> str:
    flops = f"{traffic['flops_per_token'] / 1e9:.3f} GFLOPs per token, {traffic['flops_per_step'] / 1e12:,.1f} TFLOPs"
    links, (first, *others) = traffic["equal_at_ranks"], traffic["equal_at_ranks"]
    header = ["ranks", "sent, GB", "compute, ms", *(f"{link}, ms" for link in links), f"efficiency: {first}", *others]
    rows = []
    for ranks, figures in traffic["ranks"].items():
        times = [figures["compute_s"], *figures["send_s"].values()]
        cells = [ranks, giga(figures["sent"]), *(f"{1e3 * seconds:,.1f}" for seconds in times)]
        rows.append([*cells, *(f"{share:.2f}" for share in figures["efficiency"].values())])
    lines = [format_table(f"{mode}: {flops} per step; {traffic['late']:.0%} of the bytes are late", header, rows)]
    lines += [f"FSDP: {giga(traffic['fsdp_sent'])} GB at {RANKS[-1]} ranks"]
    for link, ranks in links.items():
        at_rows = f"{traffic['equal_at_rows'][link]:.1f} rows per rank with many ranks"
        lines += [f"{link}: sending takes as long as computing at {ranks:,.0f} ranks, or {at_rows}"]
    return "\n".join(lines)


def format_figures(figures: dict, options) -> str:
    assumed = (
        f"assumed: {options.rows} rows a step; {options.utilisation:.0%} of {options.peak:g} TFLOP/s and "
        f"{options.usable:.0%} of a GPU's memory;\nper direction NVLink {options.nvlink:g} GB/s, a link between "
        f"machines {options.link:g} GB/s; rank-frequency exponent {options.zipf:g}"
    )
    scales = [format_scale(name, scale, options.rows) for name, scale in figures["scales"].items()]
    rows = []
    for case in figures["largest"]:
        name = f"{case['mode']}, {case['gpu'] / 1e9:.0f} GB" + (", minimal" if case["minimal"] else "")
        rows.append([name, case["d_model"], giga(case["parameters"]), giga(case["state"])])
    title = f"the largest model of {SCALES['tenfold'][0]} blocks that each of 64 ranks holds without FSDP"
    largest = format_table(title, ["", "d_model", "parameters, G", "16 bytes each, GB"], rows)
    return "\n".join([assumed, *scales, largest])


def main() -> None:
    from nas.core.errors import InputError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="rows of a step, all ranks together (a multiple of 64)")
    parser.add_argument("--peak", type=float, default=790, help="TFLOP/s of a GPU's bf16 products")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of --peak that a step reaches")
    parser.add_argument("--nvlink", type=float, default=450, help="GB/s per GPU and direction, within a machine")
    parser.add_argument("--link", type=float, default=50, help="GB/s per direction of a link between machines")
    parser.add_argument("--usable", type=float, default=0.9, help="usable share of a GPU's memory")
    parser.add_argument("--zipf", type=float, default=1.07, help="exponent of the word frequencies")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    if options.rows % RANKS[-1]:
        raise InputError(f"--rows {options.rows} must be a multiple of {RANKS[-1]}")
    figures = figures_of(options)
    tables = format_figures(figures, options)
    print(tables)
    assumed = {key: value for key, value in vars(options).items() if key != "out"}
    if options.out:
        command = f"python experiments/bench/scaling.py {' '.join(sys.argv[1:])}"
        options.out.write_text(f"# Tables of scaling.py\n\nWritten by `{command}`.\n\n```\n{tables}\n```\n")
    print(json.dumps({"assumed": assumed, **figures}))


if __name__ == "__main__":
    from nas.core.errors import run_command

    run_command(main)
