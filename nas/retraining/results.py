"""The second phase: a fixed pattern, trained from scratch as an ordinary Transformer-XL."""

import time

from nas.core.run_folder import RunFolder
from nas.costs.flops import count_flops
from nas.costs.latency import measure_pattern, valid_prediction
from nas.retraining.phase import BEST, Retraining
from nas.training import distributed as ranks
from nas.training.build import evaluate_with, evaluation_lengths
from nas.training.checkpoint import load_checkpoint

RESULTS_FORMAT = "par-results/1"


def evaluate_best(phase: Retraining, run: RunFolder, pattern_file: dict) -> dict:
    """What results.yaml holds: the best weights on valid and test, size, cost, and measured latency, beside that which
    the pattern file predicts."""
    config, model, corpus = phase.config, phase.model, phase.corpus
    best = load_checkpoint(run.path / BEST, "model")
    model.load_state_dict(best["model"])
    segment, memory = evaluation_lengths(config)
    started = time.perf_counter()
    splits = {split: evaluate_with(config, model, model.blocks, corpus, split) for split in ("valid", "test")}
    seconds = time.perf_counter() - started
    pattern, counts = run.config["pattern"], corpus.counts()
    costs, context = count_flops(config, counts), phase.context
    predicted = valid_prediction(pattern_file, config, corpus.vocab_size, context)
    return {
        "format": RESULTS_FORMAT,
        "pattern": pattern,
        **splits,
        "segment": segment,
        "memory": memory,
        "best_step": best["step"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": costs.cost(pattern),
        "flops_ratio_to_interleaved": costs.ratio(pattern),
        "latency": ranks.broadcast_from_main(lambda: measure_pattern(pattern, config, counts, context, predicted)),
        "evaluated_tokens_per_s": sum(about["tokens"] for about in splits.values()) / seconds,
    }
