"""A GPT-2 of Transformers, trained by its Trainer: `python experiments/outside/gpt2.py --out runs/frontier`
(pip install -r experiments/outside/requirements.txt).

Its text and vocabularies are those of the search. The time of a network for 1,000 bytes is at most the budget's share
of the reference's time. For each vocabulary the network with the most parameters in its blocks is trained; valid
decides the vocabulary, and then the learning rate, both after one pass over the text. The final trainings have PASSES,
because the search and the training of found take about as long. The recipe is the usual one: AdamW, betas 0.9 and 0.95,
weight decay 0.1, a warm-up and a cosine, gradients clipped at 1, tied embeddings, no dropout. Scores favour it: each
token but the first ones has at least half of a context before it, and the time is that of contexts without overlap.

--measure only measures costs and times, while nothing else should run.
"""

import math
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.frontier.problem import SPLITS, open_text, read_arguments, results_of
from nas.core.errors import run_command

CONTEXT, ROWS, SCORED = 256, 4, 8  # tokens; rows of a batch in training, and in evaluation
CHUNK = 128  # tokens whose logits are in memory at once
HEAD = 32  # channels
DEEPEST = 12  # blocks
RATE, FACTOR = 0.003, 2  # the first rate, which decides the vocabulary; others are times or through the factor
PASSES = 3
SEED = 1
WARM_UP = 50  # steps
ROUNDS = 10


def new_model(pieces: int, width: int, blocks: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    about = {"n_positions": CONTEXT, "n_embd": width, "n_layer": blocks, "n_head": width // HEAD}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=pieces, bos_token_id=0, eos_token_id=0, **about, **off))


def nll_of(model, rows, skip: int = 0) -> float:
    """The nll of rows [B, L] from the token after `skip` on, in nats."""
    import torch

    with torch.no_grad():
        hidden = model.transformer(input_ids=rows, use_cache=False).last_hidden_state[:, skip:-1].flatten(0, 1)
        parts = zip(hidden.split(CHUNK), rows[:, skip + 1 :].flatten().split(CHUNK), strict=True)
        losses = (torch.nn.functional.cross_entropy(model.lm_head(own), to, reduction="sum") for own, to in parts)
        return float(sum(losses))


def times(shapes: list[tuple[int, int]]) -> dict:
    """{"PIECES,WIDTH": microseconds for a token of a network without blocks, and of each block}. One thread."""
    import torch

    from nas.costs.measurement import timed_rounds

    works, (few, many), smallest = {}, (1, 5), min(shapes)[0]
    own = [(*shape, few) for shape in shapes] + [(smallest, width, many) for size, width in shapes if size == smallest]
    for name in own:
        model, rows = new_model(*name).eval(), torch.randint(name[0], (SCORED, CONTEXT))
        works[name] = lambda model=model, rows=rows: nll_of(model, rows)
    rounds = timed_rounds(works, ROUNDS)
    taken = {name: 1e6 * float(np.quantile(own, 0.25)) / (SCORED * CONTEXT) for name, own in rounds.items()}
    blocks = {width: (taken[size, width, many] - taken[size, width, few]) / 4 for size, width, n in works if n == many}
    return {f"{size},{width}": (taken[size, width, few] - blocks[width], blocks[width]) for size, width in shapes}


def candidates(costs: dict, limit: float, bytes_per_token: dict[int, float]) -> list[tuple[int, int, int]]:
    """For each vocabulary the network within the time that has the most parameters in its blocks.

    limit: ms for 1,000 bytes. costs: of times(), of the same vocabularies.
    """
    best = {}
    for name, (overhead, block) in costs.items():
        pieces, width = map(int, name.split(","))
        spare = limit * bytes_per_token[pieces] - overhead
        if (blocks := min(DEEPEST, math.floor(spare / block))) >= 1:
            best[pieces] = max(best.get(pieces, (0,)), (12 * width**2 * blocks, width, blocks))
    return [(pieces, width, blocks) for pieces, (_, width, blocks) in sorted(best.items())]


def score(model, tokens: np.ndarray) -> float:
    """The nll of all tokens but the first, in nats. Windows overlap by a half, so that contexts are long."""
    import torch

    tokens, half = torch.from_numpy(np.array(tokens, dtype=np.int64)), CONTEXT // 2
    total = nll_of(model, tokens[None, :CONTEXT])
    starts = list(range(half, len(tokens) - CONTEXT + 1, half))
    for index in range(0, len(starts), SCORED):
        rows = torch.stack([tokens[start : start + CONTEXT] for start in starts[index : index + SCORED]])
        total += nll_of(model, rows, half - 1)
    if (done := (starts[-1] + CONTEXT if starts else min(CONTEXT, len(tokens)))) < len(tokens):
        rest = tokens[-CONTEXT:]
        total += nll_of(model, rest[None], len(rest) - (len(tokens) - done) - 1)
    return total


def train(corpus, network: tuple[int, int, int], rate: float, passes: int, folder: Path, splits) -> dict:
    """The figures of a network on splits."""
    import torch
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(SEED)
    model, tokens = new_model(*network), corpus.tokens("train")
    tokens = np.array(tokens[: len(tokens) // CONTEXT * CONTEXT], dtype=np.int64)
    rows = [{"input_ids": row, "labels": row} for row in torch.from_numpy(tokens).view(-1, CONTEXT)]
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=passes,
        per_device_train_batch_size=ROWS,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=WARM_UP,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    began = time.monotonic()
    Trainer(model, arguments, train_dataset=rows).train()
    found = {"gpt2": network, "rate": rate, "passes": passes, "seconds": time.monotonic() - began}
    model.eval()
    for split in splits:
        nll, about = score(model, corpus.tokens(split)), corpus.meta["splits"][split]
        bits, words = nll / math.log(2) / about["bytes"], math.exp(nll / about["words"])
        found[split] = {"bits_per_byte": bits, "word_perplexity": words}
    print(f"{network} at {rate}: {found['valid']['bits_per_byte']:.4f} bits per byte on valid", flush=True)
    return found


def cell(arguments, jobs, text: str, budget: float, opened) -> None:
    """The trainings of a cell, which all are results."""
    from nas.data.corpus import bytes_per_token

    _, corpora, _, costs, _ = opened
    per_token = {size: bytes_per_token(corpus) for size, corpus in corpora.items()}
    networks = candidates(jobs.get(f"times,{text}"), budget * costs.reference_cost, per_token)

    def trained(network, rate: float, passes: int) -> dict:
        """The result of one training; those of one pass are choices, and do not see test."""
        final, short = passes > 1, f"{'-'.join(map(str, network))}-{rate:g}"
        about = passes, arguments.out / text / "gpt2", SPLITS if final else SPLITS[:1]
        name = f"{text},{budget},gpt2,{SEED}" if final else f"{text},{budget},gpt2 tried,{short}"
        return jobs.do(name, lambda: train(corpora[network[0]], network, rate, *about))

    def best_of(found: list[dict]) -> dict:
        return min(found, key=lambda one: one["valid"]["bits_per_byte"])

    if not networks:
        jobs.do(f"{text},{budget},gpt2,{SEED}", lambda: {"gpt2": None})
        return
    best = best_of([trained(network, RATE, 1) for network in networks])
    for factor in (FACTOR, 1 / FACTOR):  # as long as the rate at the edge is the best one
        while (other := trained(best["gpt2"], best["rate"] * factor, 1)) is best_of([best, other]):
            best = other
    trained(best["gpt2"], best["rate"], PASSES)


def main() -> None:
    arguments = read_arguments(__doc__, "--measure")
    import torch

    torch.set_num_threads(1)
    jobs = results_of(arguments)
    for text in arguments.texts:
        opened = open_text(arguments, text)
        jobs.do(f"times,{text}", partial(times, opened[2]))
        for budget in () if arguments.measure else arguments.budgets:
            cell(arguments, jobs, text, budget, opened)


if __name__ == "__main__":
    run_command(main)
