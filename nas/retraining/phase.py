"""The training of a fixed pattern, as an ordinary Transformer-XL, and its results: the best weights, the mixture with
them, and their metrics, size and time.
"""

import math
import time
from dataclasses import replace

import numpy as np
from torch import Tensor

from models.transformer_xl import TransformerXL
from nas.core.config import SHORT_PARTS, Config
from nas.core.errors import InputError
from nas.core.run_folder import RunFolder
from nas.costs.cost_table import changed_conditions
from nas.costs.flops import count_flops
from nas.costs.measurement import device_conditions, measure_pattern, size_conditions
from nas.data.corpus import Corpus
from nas.mixture.mixture import Mixture, open_mixture
from nas.mixture.without_network import train_nll
from nas.training import distributed
from nas.training.build import check_splits, open_stream
from nas.training.device import Runtime
from nas.training.evaluation import evaluate_split, evaluation_lengths, read_text, text_metrics
from nas.training.optimizer import TailAverage
from nas.training.passes import count_steps, judged_text, short_share
from nas.training.train_step import TrainStep
from nas.training.trainer import Phase, load_checkpoint, save_checkpoint

BEST = "best.pt"
TRIAL_SHARE = 0.5  # last share of a trial's steps, over which weights are averaged
GATE_TOKENS = 20_000  # of the gate of a trial, at most


class RetrainPhase(Phase):
    """Trains the network of a fixed pattern, and keeps the weights with the lowest nll on valid.

    until: last step of a trial, or None. A trial is judged by a mean of weights of its own, because rates have not
    decayed; the training goes on as if there had been no trial.
    """

    def __init__(
        self, model: TransformerXL, corpus: Corpus, config: Config, runtime: Runtime, until: int | None = None
    ):
        self.model, self.corpus, self.config, self.runtime = model.to(runtime.device), corpus, config, runtime
        check_splits(config, corpus)
        tokens, short = corpus.tokens("train"), short_share(config)
        residual = config.train.residual
        beside = distributed.first_on_each_node(lambda: train_nll(corpus, config.beside) if residual else None)
        self.stream = open_stream(tokens, config, runtime, beside=beside)
        self.total_steps = count_steps(config, len(tokens))
        self.train_weights = TrainStep(model, config.train, self.total_steps, runtime, short_share=short, until=until)
        self.parts = {"model": model, "train_weights": self.train_weights, "stream": self.stream}
        self.best_nll = math.inf
        self.begin_trial(until)

    def begin_trial(self, until: int | None) -> None:
        """Average weights for a trial that ends after the step `until` (None: no trial)."""
        share = TRIAL_SHARE if until and self.config.train.average_share else 0
        parameters = self.train_weights.optimizer.parameters
        self.until, self.trial_average = until, TailAverage(parameters, share, until or self.total_steps)

    def step(self, step: int) -> tuple[Tensor, int]:
        if not self.model.training:  # setting the mode of every module takes time
            self.model.train()
        batch = self.stream.next()
        nll, self.stream.memories = self.train_weights(step, batch)
        self.trial_average.update(step)
        return nll, batch.targets.numel() * distributed.world_size()

    def evaluate(self, run: RunFolder, step: int) -> dict:
        metrics = self.metrics(self.train_weights.average)
        if metrics["nll_per_token"] < self.best_nll:
            self.best_nll = metrics["nll_per_token"]
            if distributed.is_main():
                with self.train_weights.average.in_use():
                    save_checkpoint(run.path / BEST, {"step": step, "model": self.model.state_dict()})
        return metrics

    def metrics(self, average: TailAverage) -> dict:
        """Metrics on valid of a mean of the weights, or of the weights if it has none yet."""
        with average.in_use():
            return evaluate_split(self.config, self.model, self.model.blocks, self.corpus, "valid", self.runtime)

    def trial_metrics(self) -> dict[str, dict]:
        """Metrics on the first part of valid as in results.yaml, of the trial's mean. A trial is judged by those of the
        mixture, because a network that is better alone may be worse beside cache and counts, which know much of the
        same.
        """
        config, short = self.config, self.config.train.segment // SHORT_PARTS
        # Before long segments begin, the model has not learned to attend much farther than in short ones.
        if self.until <= self.train_weights.short_steps:
            segment, memory = (min(length, short) for length in evaluation_lengths(config))
            config = replace(config, evaluate=replace(config.evaluate, segment=segment, memory=memory))
        tokens, text = judged_text(config, self.corpus)
        with self.trial_average.in_use():
            nll, hidden = read_text(config, self.model, tokens, self.runtime)

        def mixed() -> float:
            mixture = np.isfinite(nll).all() and open_mixture(config.beside, self.corpus, self.model.d_model)
            own = mixture.fit(tokens, nll, hidden, GATE_TOKENS) if mixture else nll
            return float(own.sum())

        sums = distributed.broadcast_from_main(mixed), float(nll.sum())
        valid, alone = (text_metrics(own, len(nll), text) for own in sums)
        return {"valid": valid, "network": {"valid": alone}}

    def state_dict(self) -> dict:
        trial = {"until": self.until, "average": self.trial_average.state_dict()}
        return super().state_dict() | {"best_nll": self.best_nll, "trial": trial}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.best_nll = state["best_nll"]
        if state["trial"]["until"] == self.until:
            self.trial_average.load_state_dict(state["trial"]["average"])


RESULTS_FORMAT = "par-results/2"
SPLITS = "valid", "test"
SAMPLE = 200  # tokens of test that a report shows


def evaluate_best(phase: RetrainPhase, run: RunFolder, pattern_file: dict) -> tuple[dict, Mixture | None]:
    """The content of results.yaml: the best weights on valid and test, size, FLOPs, and the measured latency; and the
    mixture with the network.

    pattern_file: the content of the pattern file, which may predict the latency.
    """
    config, model, corpus = phase.config, phase.model, phase.corpus
    best = load_checkpoint(run.path / BEST, "model")
    model.load_state_dict(best["model"])
    runtime, pattern, (segment, memory) = phase.runtime, run.extra["pattern"], evaluation_lengths(config)
    start = time.perf_counter()
    read = {split: read_text(config, model, corpus.tokens(split), runtime) for split in SPLITS}
    seconds = time.perf_counter() - start
    made = predictor_metrics(config, corpus, read, model.d_model) if distributed.is_main() else ({}, None)
    metrics, mixture = distributed.broadcast_from_main(lambda: made[0]), made[1]
    costs = count_flops(config, corpus.counts(), pattern)
    predicted = valid_prediction(pattern_file, config, corpus, runtime)
    latency = distributed.broadcast_from_main(lambda: measure_pattern(pattern, config, corpus, runtime, predicted))
    return {
        "format": RESULTS_FORMAT,
        "pattern": pattern,
        **metrics,
        "segment": segment,
        "memory": memory,
        "best_step": best["step"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_token": costs.cost(pattern),
        "flops_ratio_to_interleaved": costs.ratio_to_interleaved(pattern),
        "latency": latency,
        "evaluated_tokens_per_s": sum(len(nll) for nll, _ in read.values()) / seconds,
    }, mixture


def evaluate_without_network(config: Config, corpus: Corpus) -> tuple[dict, Mixture]:
    """The content of results.yaml of a pattern without blocks: cache and counts alone; and their mixture.

    Raises InputError if there are no counts, because the cache has no vote at first.
    """
    check_splits(config, corpus)
    if not config.mixture.counts:
        raise InputError("a pattern without blocks has no network: it needs mixture.counts of 1 or more")
    start = time.perf_counter()
    metrics, mixture = predictor_metrics(config, corpus, None, 0)
    seconds = time.perf_counter() - start
    about = {"parameters": 0, "flops_per_token": 0.0, "flops_ratio_to_interleaved": 0.0, "latency": {}}
    about |= {"train_steps": 0, "train_tokens": 0, "wall_time_s": seconds}
    return {"format": RESULTS_FORMAT, "pattern": [], **metrics, **about}, mixture


def predictor_metrics(config: Config, corpus: Corpus, read: dict | None, width: int) -> tuple[dict, Mixture | None]:
    """The metrics of a predictor and of its network alone, and the mixture; None if there is only a network.

    `valid` and `test` are those of the mixture or, if there is none, of the network. On valid, each half of the text is
    mixed by weights that were fitted to the other half; on test, by weights that were fitted to all of valid.
    read: {split: what read_text() returns}, None: no network. width: of the network.
    """

    def metrics(split: str, nll: np.ndarray) -> dict:
        return text_metrics(float(nll.sum()), len(nll), corpus.meta["splits"][split])

    network = read and {split: metrics(split, nll) for split, (nll, _) in read.items()}
    mixture = open_mixture(config.beside, corpus, width)
    if not mixture:
        return network | {"network": network, "mixture": None}, None
    alone, tokens = read or dict.fromkeys(SPLITS, (None, None)), corpus.tokens("test")
    valid = metrics("valid", mixture.fit(corpus.tokens("valid"), *alone["valid"]))
    start = time.perf_counter()
    seen = mixture.look(tokens, *alone["test"])
    nll, shares = mixture.mix(seen)
    seconds = time.perf_counter() - start
    test, about = metrics("test", nll), {"parts": mixture.parts}
    about["ms_per_1000_bytes"] = 1e6 * seconds / test["bytes"]
    about["shares"] = {part: float(share) for part, share in zip(mixture.parts, shares.mean(axis=0), strict=True)}
    if mixture.width and mixture.cache and mixture.counts:
        about["test_without_counts"] = metrics("test", mixture.mix(seen, without=("counts",))[0])
    shown = slice(len(nll) // 2, len(nll) // 2 + SAMPLE)  # from the middle on: text, part with the largest share, p
    texts = [corpus.vocabulary.decode(token[None]).decode(errors="replace") for token in tokens[1:][shown]]
    parts = [mixture.parts[part] for part in shares[shown].argmax(axis=1)]
    p = [round(math.exp(-own), 4) for own in nll[shown]]
    about["sample"] = [list(one) for one in zip(texts, parts, p, strict=True)]
    return {"valid": valid, "test": test, "network": network, "mixture": about}, mixture


def valid_prediction(pattern_file: dict, config: Config, corpus: Corpus, runtime: Runtime) -> dict:
    """The predicted latency in a pattern file; empty if there is none, or if it is not for the current conditions."""
    latency = pattern_file.get("latency") or {}
    if "predicted_ms_per_1000_bytes" not in latency:
        return {}
    conditions = device_conditions(config, runtime) | size_conditions(config, corpus, pattern_file["blocks"])
    if changed := changed_conditions(latency.get("holds_for") or {}, conditions):
        print(f"NOTICE: the predicted latency is ignored: it was predicted for {changed}, which differs here")
        return {}
    return {key: latency[key] for key in ("predicted_ms_per_1000_bytes", "predicted_ratio_to_interleaved")}
