"""Numbers of steps and passes, values for the training text in place of auto, and warnings about them."""

import math

import numpy as np

from nas.core.config import SHORT_FROM, SHORT_SHARE, Config, known_values
from nas.data.corpus import Corpus
from nas.data.optimal_cutoffs import LayerCost, optimal_cutoffs
from nas.data.sources import count_words

# From how many passes, and from which square of them times parameters per token: dropout and weight decay. The last row
# that holds counts. The bounds are from trainings of ten networks (experiments/passes).
REGULARIZATION = (2, 30, 0.1, 0.0), (2, 75, 0.2, 0.1), (3, 200, 0.2, 0.5)
PASSES_DECAY, STRONG_DECAY = 3, 0.5  # passes from which models may need this weight decay
MOST_PASSES = 28  # the most that were tried
FIRST_SHARE, JUDGED_BYTES = 1 / 8, 60_000  # of a training, for the first trial; the least that judges it
WEIGHT_DECAY = {"muon": 0.02, "adamw": 0.1}  # of train.weight_decay=auto, by train.optimizer


def count_steps(config: Config, stream_tokens: int) -> int:
    """train.steps, or the steps of train.epochs passes over a stream."""
    if config.train.steps is not None:
        return config.train.steps
    return max(1, math.ceil(config.train.epochs * stream_tokens / (config.train.batch_size * config.train.segment)))


def count_passes(config: Config, stream_tokens: int) -> float:
    """train.epochs, or the passes of train.steps over a stream."""
    return config.train.epochs if config.train.steps is None else whole_passes(config, stream_tokens)


def whole_passes(config: Config, stream_tokens: int) -> float:
    """Passes over a stream of whole steps, which are equal for train.steps and the train.epochs that they come from."""
    return count_steps(config, stream_tokens) * config.train.batch_size * config.train.segment / stream_tokens


def short_share(config: Config) -> float:
    """train.short_share, or its default."""
    train = config.train
    if train.short_share is not None:
        return train.short_share
    return SHORT_SHARE if train.segment >= SHORT_FROM and not config.short_segments_conflict else 0.0


def judged_text(config: Config, corpus: Corpus) -> tuple[np.ndarray, dict]:
    """The first part of valid, by which trials are judged, and its numbers as text_metrics() takes them.

    It is about as long as what the first trial of a network reads, in sixteenths of valid, which all vocabularies
    share. If trainings read the text again, it is all, because their ends are judged by all of it.
    """
    tokens, about, sixteenths = (
        corpus.tokens("valid"),
        corpus.meta["splits"]["valid"],
        judged_sixteenths(config, corpus),
    )
    if sixteenths == 16:
        return tokens, about
    judged = np.array(tokens[: sixteenths * len(tokens) // 16])
    data = corpus.vocabulary.decode(judged)
    return judged, about | {"words": count_words(data), "bytes": len(data)}


def judged_sixteenths(config: Config, corpus: Corpus) -> int:
    """How much of valid judged_text() has."""
    passes, splits = count_passes(config, len(corpus.tokens("train"))), corpus.meta["splits"]
    part = max(FIRST_SHARE * passes * splits["train"]["bytes"], JUDGED_BYTES) / splits["valid"]["bytes"]
    return 16 if passes > 1 else min(16, round(16 * part) + 1)


def regularization(config: Config, corpus: Corpus) -> dict[str, float]:
    """Dropout and weight decay for a training that reads its text again. config: with numbers of rows of n-grams.

    The more parameters the embeddings and the output layer (with model.div_value=1) have for each token of the text,
    the fewer passes a model needs to learn it by heart.
    """
    model, tokens = config.model, len(corpus.tokens("train"))
    tables = model.d_model * (corpus.vocab_size * (1 if model.tie_embeddings is True else 2) + sum(model.ngram_rows))
    passes = whole_passes(config, tokens)
    exposure, usual = passes**2 * tables / tokens, WEIGHT_DECAY[config.train.optimizer]
    dropout, decay = 0.0, usual
    for least_passes, least_exposure, *chosen in REGULARIZATION:
        if passes >= least_passes and exposure >= least_exposure:
            dropout, decay = chosen
    return {"model.dropout": dropout, "train.weight_decay": max(decay, usual)}


def most_passes(config: Config) -> int:
    """The passes after which any model may overfit with the given dropout and weight decay, which may be auto."""
    decay = config.train.weight_decay
    return MOST_PASSES if config.model.dropout and (decay == "auto" or decay >= STRONG_DECAY) else PASSES_DECAY


def passes_warning(config: Config, corpus: Corpus) -> str | None:
    """A warning if the training of a pattern reads its text so often that it overfits. config: without auto."""
    tokens, train = len(corpus.tokens("train")), config.train
    steps, passes = count_steps(config, tokens), count_passes(config, tokens)
    needed, advice = regularization(config, corpus), []
    if config.model.dropout < (least := needed["model.dropout"]):
        advice.append(f"model.dropout={least}")
    if config.train.weight_decay < (least := needed["train.weight_decay"]) > WEIGHT_DECAY[train.optimizer]:
        advice.append(f"train.weight_decay={least}")
    if passes > MOST_PASSES:
        enough = max(1, MOST_PASSES * tokens // (train.batch_size * train.segment))
        advice.append(f"train.steps={enough}" if train.epochs is None else f"train.epochs={MOST_PASSES}")
    if not advice:
        return None
    reads = f"{steps:,} steps of a pattern read the {tokens:,} training tokens {passes:.1f} times, and it may overfit"
    return f"WARNING: {reads}; give {' '.join(advice)}, or fewer steps"


def warmup_warning(config: Config, steps: int) -> str | None:
    """A warning if a training ends before its learning rate reaches the peak."""
    warmup = config.train.warmup_steps
    if warmup < steps:
        return None
    return f"WARNING: the learning rate does not reach its peak: give train.warmup_steps below the {steps:,} steps"


def rising_warning(metrics: list[dict]) -> str | None:
    """A warning if the last two evaluations on valid each had a higher loss than the one before."""
    last = [line["nll"] for line in metrics if line["split"] == "valid"][-3:]
    if len(last) < 3 or not last[0] < last[1] < last[2]:
        return None
    losses = " -> ".join(f"{nll:.4f}" for nll in last)
    advice = "give fewer train.epochs or train.steps, or more model.dropout and train.weight_decay"
    return f"WARNING: the loss on valid rises, {losses}, so the model overfits; {advice}"


TOKENS_PER_ROW, MOST_ROWS, NGRAM_TABLES = 128, 16_384, 2  # of model.ngram_rows=auto
NGRAM_TOKENS = 500_000  # training tokens from which model.ngram_rows=auto has tables
TABLES_SHARE = 0.5  # of search.size.target, for the tables of n-grams and tokens
CLUSTERS = 3  # of model.cutoffs=auto, the head included


def resolve_auto(config: Config, corpus: Corpus) -> Config:
    """The configuration with values for the training text in place of auto.

    The cutoffs are the cheapest ones. The rows of n-grams are few beside the tokens, and a small text has none, because
    models learn it by heart by its n-grams. If the tables of both, and of the output layer, take more bytes than
    TABLES_SHARE of search.size.target, there are none, and the output layer shares the embedding. For dropout and
    weight decay see regularization().
    """
    model, train, tokens = config.model, config.train, len(corpus.tokens("train"))
    rows = model.ngram_rows
    if rows == "auto":
        rows = [min(MOST_ROWS, tokens // TOKENS_PER_ROW)] * (NGRAM_TABLES if tokens >= NGRAM_TOKENS else 0)
    target, number = config.search.size.target, 4 if config.search.size.weights == "float32" else 1
    large = target and number * model.d_model * (2 * corpus.vocab_size + sum(rows)) > TABLES_SHARE * target
    known = {"model.tie_embeddings": bool(large) and model.div_value == 1, "model.ngram_rows": [] if large else rows}
    if model.cutoffs == "auto" and corpus.vocab_size < CLUSTERS:
        known["model.cutoffs"] = []
    elif model.cutoffs == "auto":
        cost = LayerCost(model.d_model, model.div_value, train.batch_size * train.segment)
        known["model.cutoffs"] = optimal_cutoffs(corpus.counts(), CLUSTERS, cost)
    resolved = known_values(config, known)
    return known_values(resolved, regularization(resolved, corpus))


def auto_lines(given: Config, resolved: Config, corpus: Corpus) -> list[str]:
    """Lines that tell what auto became."""
    lines, model, tokens = [], resolved.model, len(corpus.tokens("train"))
    if given.model.cutoffs == "auto":
        lines.append(f"model.cutoffs=auto: {model.cutoffs} of {corpus.vocab_size:,} entries of the vocabulary")
    if given.model.ngram_rows == "auto":
        lines.append(f"model.ngram_rows=auto: {model.ngram_rows} for {tokens:,} training tokens")
    if given.model.tie_embeddings == "auto" and model.tie_embeddings:
        lines.append("model.tie_embeddings=auto: true, because search.size.target is short")
    if "auto" in (given.model.dropout, given.train.weight_decay):
        values = f"model.dropout={model.dropout:g}, train.weight_decay={resolved.train.weight_decay:g}"
        lines.append(f"{values} for {whole_passes(given, tokens):.2f} passes over the training text")
    return lines
