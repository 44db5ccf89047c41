"""Values for the training text in place of auto."""

from nas.core.config import Config, known_values
from nas.data.corpus import Corpus
from nas.data.optimal_cutoffs import LayerCost, optimal_cutoffs
from nas.training.passes import regularization, whole_passes

TOKENS_PER_ROW, MOST_ROWS, NGRAM_TABLES = 128, 16_384, 2  # of model.ngram_rows=auto
NGRAM_TOKENS = 500_000  # training tokens from which model.ngram_rows=auto has tables
CLUSTERS = 3  # of model.cutoffs=auto, the head included


def resolve_auto(config: Config, corpus: Corpus) -> Config:
    """The configuration with values for the training text in place of auto.

    The cutoffs are the cheapest ones. The rows of n-grams are few beside the tokens, and a small text has none, because
    models learn it by heart by its n-grams. For dropout and weight decay see regularization().
    """
    model, train, tokens, known = config.model, config.train, len(corpus.tokens("train")), {}
    if model.cutoffs == "auto":
        cost = LayerCost(model.d_model, model.div_value, train.batch_size * train.segment)
        known["model.cutoffs"] = optimal_cutoffs(corpus.counts(), CLUSTERS, cost)
    if model.ngram_rows == "auto":
        tables = NGRAM_TABLES if tokens >= NGRAM_TOKENS else 0
        known["model.ngram_rows"] = [min(MOST_ROWS, tokens // TOKENS_PER_ROW)] * tables
    resolved = known_values(config, known)
    return known_values(resolved, regularization(resolved, corpus))


def auto_lines(given: Config, resolved: Config, corpus: Corpus) -> list[str]:
    """Lines that tell what auto became."""
    lines, model, tokens = [], resolved.model, len(corpus.tokens("train"))
    if given.model.cutoffs == "auto":
        lines.append(f"model.cutoffs=auto: {model.cutoffs} of {corpus.vocab_size:,} entries of the vocabulary")
    if given.model.ngram_rows == "auto":
        lines.append(f"model.ngram_rows=auto: {model.ngram_rows} for {tokens:,} training tokens")
    if "auto" in (given.model.dropout, given.train.weight_decay):
        values = f"model.dropout={model.dropout:g}, train.weight_decay={resolved.train.weight_decay:g}"
        lines.append(f"{values} for {whole_passes(given, tokens):.2f} passes over the training text")
    return lines
