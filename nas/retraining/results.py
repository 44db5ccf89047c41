"""The results of a retraining: quality, size, FLOPs and latency of the best weights."""

import time

from nas.core.config import Config
from nas.core.run_folder import RunFolder
from nas.costs.cost_table import changed_conditions
from nas.costs.flops import count_flops
from nas.costs.measurement import device_conditions, measure_pattern, size_conditions
from nas.data.corpus import Corpus
from nas.retraining.phase import BEST, RetrainPhase
from nas.training import distributed
from nas.training.device import DeviceContext
from nas.training.evaluation import evaluate_split, evaluation_lengths
from nas.training.trainer import load_checkpoint

RESULTS_FORMAT = "par-results/1"


def evaluate_best(phase: RetrainPhase, run: RunFolder, pattern_file: dict) -> dict:
    """The content of results.yaml: the best weights on valid and test, size, FLOPs, and the measured latency.

    pattern_file: the content of the pattern file, which may predict the latency.
    """
    config, model, corpus = phase.config, phase.model, phase.corpus
    best = load_checkpoint(run.path / BEST, "model")
    model.load_state_dict(best["model"])
    segment, memory = evaluation_lengths(config)
    start = time.perf_counter()
    splits = {
        split: evaluate_split(config, model, model.blocks, corpus, split, phase.context) for split in ("valid", "test")
    }
    seconds = time.perf_counter() - start
    pattern, counts = run.extra["pattern"], corpus.counts()
    costs, context = count_flops(config, counts, pattern), phase.context
    predicted = valid_prediction(pattern_file, config, corpus, context)
    return {
        "format": RESULTS_FORMAT,
        "pattern": pattern,
        **splits,
        "segment": segment,
        "memory": memory,
        "best_step": best["step"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": costs.cost(pattern),
        "flops_ratio_to_interleaved": costs.ratio_to_interleaved(pattern),
        "latency": distributed.broadcast_from_main(
            lambda: measure_pattern(pattern, config, corpus, context, predicted)
        ),
        "evaluated_tokens_per_s": sum(figures["tokens"] for figures in splits.values()) / seconds,
    }


def valid_prediction(pattern_file: dict, config: Config, corpus: Corpus, context: DeviceContext) -> dict:
    """The predicted latency in a pattern file; empty if there is none, or if it is not for the current conditions."""
    latency = pattern_file.get("latency") or {}
    if "predicted_ms_per_1000_bytes" not in latency:
        return {}
    conditions = device_conditions(config, context) | size_conditions(config, corpus, pattern_file["blocks"])
    changed = changed_conditions(latency.get("holds_for") or {}, conditions)
    if changed:
        print(f"NOTICE: the predicted latency is ignored: it was predicted for {changed}, which differs here")
        return {}
    return {key: latency[key] for key in ("predicted_ms_per_1000_bytes", "predicted_ratio_to_interleaved")}
