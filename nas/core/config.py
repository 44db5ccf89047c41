"""Every option of a configuration, in a dataclass per section, with its type, default, help text and marks."""

import re
from collections.abc import Collection
from copy import copy
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache, reduce
from typing import Annotated, Any, Literal, NamedTuple

from models.operations.registry import Shape
from nas.core.option_types import Rule, above, at_least, at_most, below

SHORT_SHARE, SHORT_FROM = 0.85, 128  # default of train.short_share, and of the shortest segment that gets it
SHORT_PARTS = 2  # short segments that a segment is divided into
MOST_NGRAMS = 4  # tables of models.transformer_xl.NGramEmbedding
PIECES = "bpe", "unigram"  # tokenizers that are trained on the text
LEARNING_RATES = {"muon": 0.01, "adamw": 0.006}  # of AdamW, by train.optimizer
MULTIPLE = re.compile(r"\d+(\.\d+)?x")  # a size, such as 4x of d_model
TIME = re.compile(r"(\d+(?:\.\d+)?) ?ms")  # a budget for 1,000 bytes of text
SIZE, UNITS = re.compile(r"(\d+(?:\.\d+)?) ?(kB|MB|GB)"), {"kB": 1e3, "MB": 1e6, "GB": 1e9}
COUNTS_SHARE = 0.25  # of search.size.target, for the counts beside the networks of a search

# Marks of options.
BY_TRIALS, GUMBEL = "trials", "gumbel"  # only this search method has it
# It may have another value on --resume, because it determines where and how a run computes, not what it computes; in
# the trial that a training goes on from; with --eval-only; between seeds of one search.
RESUME, TRIAL, EVAL_ONLY, SEEDS = "resume", "trial", "eval-only", "seeds"
# Only a search uses it, so that other stages accept another value on --resume; an exception, which all stages use.
ONLY_SEARCH, EVERY_STAGE = "only search", "every stage"
# Costs, and the weights that fit the network, depend on it; only the costs of training steps do.
NETWORK, STEP_COSTS = "network", "step costs"
AUTO = "auto"  # it may be auto until the text is known

CANDIDATES = {  # of search.operations, by search.method
    BY_TRIALS: ("attention", "dense", "dense 8x", "conv", "window", "identity"),
    GUMBEL: ("attention", "dense", "identity"),  # of the paper
}


class Option(NamedTuple):
    kind: Any  # its type
    help: str
    marks: tuple[str, ...]

    @property
    def method(self) -> str | None:
        """The search method that alone has this option."""
        return next((mark for mark in self.marks if mark in CANDIDATES), None)


def option(default, help, *marks):
    return field(default_factory=lambda: copy(default), metadata={"help": help, "marks": marks})


def section(kind, *marks):
    return field(default_factory=kind, metadata={"marks": marks})


def milliseconds(budget: float | str) -> float | None:
    """The time of a budget such as 2.5ms, for 1,000 bytes of text; None if the budget is a ratio."""
    absolute = TIME.fullmatch(budget) if isinstance(budget, str) else None
    return float(absolute[1]) if absolute else None


def bytes_of(size: int | str | None) -> int | None:
    """The bytes of a size such as 8MB."""
    found = SIZE.fullmatch(size) if isinstance(size, str) else None
    return int(float(found[1]) * UNITS[found[2]]) if found else size


def is_set(values: list) -> bool:
    return len({*values}) == len(values)


Auto = Literal["auto"]
Natural, Count, Two = (Annotated[int, at_least(number)] for number in (0, 1, 2))
Even = Annotated[int, Rule("an even number", lambda number: number % 2 == 0), at_least(2)]
Positive, NotNegative = Annotated[float, above(0)], Annotated[float, at_least(0)]
Temperature = Annotated[float, at_least(0.001)]  # far lower ones overflow float32
Share, Dropout = Annotated[float, at_least(0), at_most(1)], Annotated[float, at_least(0), below(1)]
Multiple = Annotated[str, Rule("a multiple of d_model such as 4x", MULTIPLE.fullmatch)]
RISING = Rule("{} of increasing whole numbers from 1, such as [250, 2500]", lambda ids: ids == sorted({*ids}))
FEW = Rule(f"{{}} of up to {MOST_NGRAMS} whole numbers from 1", lambda rows: len(rows) <= MOST_NGRAMS)
EIGHT = Rule("{}, at most 8", lambda orders: len(orders) <= 8)
Orders = Annotated[list[Count], Rule("{} of different whole numbers from 1, such as [1, 2, 3]", is_set), EIGHT]
IMAGE = Rule("rows, columns and channels, such as [32, 32, 3], or []", lambda sizes: len(sizes) in (0, 3))
Grid = Annotated[list[Count], IMAGE]
Operations = Annotated[list[Any], Rule("{} of operations, such as [attention, dense 8x]")]
Vocabularies = Annotated[list[Two], Rule("{} of different numbers from 2, such as [2000, 4000]", is_set)]
Widths = Annotated[list[Even], Rule("{} of different even numbers, such as [64, 128]", is_set)]
CostSource = Literal["none", "flops", "measured", "onnx"]
CostTableFile = Annotated[str, Rule("a file such as table.yaml", lambda name: name.endswith(".yaml"))]
Time = Annotated[str, Rule("a time such as 2.5ms", milliseconds)]
Size = Annotated[str, Rule("a size such as 8MB or 500kB", lambda size: SIZE.fullmatch(size) and bytes_of(size) > 0)]


@dataclass
class DataOptions:
    source: str = option(
        "pydoc",
        "pydoc, bible, stdlib, wikitext-2, wikitext-103, enwik8, text8, folder of .txt or .bin, or file",
        RESUME,
    )
    tokenizer: str = option("bpe", "bpe or unigram (trained on train), bytes, words, a .model file or vocabulary")
    vocab_size: Two | None = option(None, "pieces (null: at most 8000) or words (null: all)")
    lowercase: bool = option(False, "lowercase the text; word perplexity is then not comparable")
    newline: Literal["keep", "drop"] = option("keep", "keep line ends; drop: word perplexity is not comparable")
    cache: str = option("~/.cache/par-nas", "folder for downloads and prepared tokens", RESUME, SEEDS)


@dataclass
class ModelOptions:
    d_model: Even = option(128, "width of the residual stream", NETWORK)
    heads: Count = option(4, "attention heads; must divide d_model", NETWORK)
    d_ffn: Count | Multiple = option("4x", "inner width of dense blocks; 4x: four times d_model", NETWORK)
    blocks: Count = option(6, "largest number of blocks; exactly as many, if identity is no operation", TRIAL)
    dropout: Dropout | Auto = option(
        "auto", "of embeddings, branches, inner and last layer; auto: to 0.2 if text is read again", STEP_COSTS, AUTO
    )
    norm: Literal["pre", "post"] = option("pre", "layer normalisation before or after each block", NETWORK)
    activation: Literal["relu_squared", "relu", "gelu"] = option("relu", "activation of dense blocks", NETWORK)
    cutoffs: Annotated[list[Count], RISING] | Auto = option(
        [], "adaptive softmax: first id of each tail; auto: the fastest; []: full softmax", NETWORK, AUTO
    )
    div_value: Count = option(1, "adaptive softmax: tail i has width d_model / div_value^i; 1 if tied", NETWORK)
    tie_embeddings: bool | Auto = option(
        "auto", "share the weights of embedding and output layer; auto: if search.size.target is short", NETWORK, AUTO
    )
    ngram_rows: Annotated[list[Count], FEW] | Auto = option(
        "auto",
        "rows of hashed embeddings of the last 2, 3, ... tokens; auto: by text, and by search.size.target",
        NETWORK,
        AUTO,
    )
    grid: Grid = option([], "rows, columns, channels of images, for learned positions; []: relative ones", NETWORK)
    recompute: bool = option(False, "recompute blocks in the backward pass: less memory, more time", STEP_COSTS)
    init: Literal["plain", "depth_scaled"] = option("plain", "depth_scaled: last layers times 1 / sqrt(blocks)")


@dataclass
class TrainOptions:
    steps: Count | None = option(1000, "training steps", TRIAL)
    epochs: Positive | None = option(None, "epochs over the training text, instead of steps", TRIAL)
    init_from: str | None = option(None, "retrain: start from the weights of this training or exported folder")
    batch_size: Count = option(32, "rows per step over all processes; each row is a contiguous text")
    segment: Count = option(64, "tokens per row and step")
    memory: Natural = option(64, "earlier positions that attention sees; linear carries a state instead")
    optimizer: Literal["adamw", "muon"] = option("muon", "of the blocks' matrices; others have AdamW", STEP_COSTS)
    lr: Positive | None = option(None, "peak learning rate of AdamW (null: 0.01 beside Muon, 0.006 alone)")
    muon_lr: Annotated[float, above(0), at_most(1)] = option(0.015, "peak learning rate of Muon; it suits any width")
    schedule: Literal["cosine", "linear"] = option("linear", "decay of the rates, to 1/4 or 0 (cosine)")
    warmup_steps: Natural = option(100, "steps of linear learning-rate warm-up")
    weight_decay: NotNegative | Auto = option(
        "auto", "weight decay of matrices; auto: 0.02 (adamw: 0.1), or 0.5 if the text is read often", AUTO
    )
    beta2: Annotated[Positive, below(1)] = option(0.999, "AdamW: decay of squared gradients; near 1 for rare words")
    residual: bool = option(True, "learn most where cache and counts (mixture) fail; not for gumbel")
    average_share: Share = option(0.2, "last share of the steps, over which weights are averaged")
    short_share: Share | None = option(
        None, f"first share of the steps, on half segments; not for gumbel (null: {SHORT_SHARE} or 0)"
    )
    clip: NotNegative = option(1.0, "maximum gradient norm of the weights; 0: no clipping")
    evaluate_every: Natural = option(500, "steps between evaluations on valid; 0: only at the end", TRIAL)
    log_every: Count = option(50, "steps between lines of metrics and pi", TRIAL)
    checkpoint_every: Count = option(500, "steps between checkpoints", TRIAL)
    threads: Count | None = option(None, "CPU threads per process (null: PyTorch's default)", EVAL_ONLY, TRIAL, SEEDS)
    grad_accum_steps: Count = option(1, "parts into which each process splits its rows to save memory", RESUME)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: cuda if there is a GPU, else cpu", RESUME)
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "of products; auto: bf16 where supported, on CPUs only for Muon"
    )
    compile: Literal["auto", "always", "never"] = option(
        "auto", "torch.compile of operations; auto: on a GPU, from 20,000 steps on", RESUME
    )


@dataclass
class TemperatureOptions:
    start: Temperature = option(1.0, "temperature of the samples in the warm-up; it falls exponentially")
    end: Temperature = option(0.1, "temperature at the last step")


@dataclass
class LogitsOptimizerOptions:
    lr: Positive = option(0.01, "learning rate of the logits (Adam)")
    weight_decay: NotNegative = option(0.0, "Adam weight decay of the logits")


@dataclass
class LatencyOptions:
    source: CostSource | CostTableFile = option(
        "none", "costs; measured: milliseconds on this device; onnx: in ONNX Runtime; table.yaml: of nas.latency"
    )
    timing: Literal["inference", "training", "generation"] = option(
        "inference",
        "a forward pass (evaluate.*), a training step (train.*), or the next token of one text with full memories",
        EVERY_STAGE,
    )
    target: Positive | Time = option(
        0.65, "highest (gumbel: expected) cost: ratio to the reference's, or 2.5ms per 1,000 bytes"
    )
    weight: NotNegative = option(1.0, "nats added to the loss per unit of that ratio above the target", GUMBEL)

    @property
    def in_milliseconds(self) -> bool:
        """Whether costs are measured."""
        return self.source not in ("none", "flops")

    @property
    def table(self) -> str | None:
        """The file that the costs come from."""
        return self.source if self.source.endswith(".yaml") else None


@dataclass
class SizeOptions:
    target: Count | Size | None = option(
        None, "bytes, or such as 8MB, of all that ships: weights, vocabulary, counts; null: any", BY_TRIALS
    )
    weights: Literal["int8", "float32"] = option("int8", "format of the weights that ship, see nas.export", BY_TRIALS)


@dataclass
class SearchOptions:
    operations: Operations = option([], "candidates of each block, with their sizes ([]: those of the method)")
    vocab_size: Vocabularies | Auto = option([], "vocabularies to choose from; auto; []: data.vocab_size", BY_TRIALS)
    d_model: Widths | Auto = option([], "widths to choose from, heads of one size; auto; []: model.d_model", BY_TRIALS)
    method: Literal["trials", "gumbel"] = option(
        "trials", "short trainings of networks, led by a surrogate model; gumbel: arXiv 2009.04534"
    )
    batch: Count | Auto = option(
        "auto", "networks proposed at once; auto: 4, or as many as train at a time", BY_TRIALS, AUTO
    )
    networks: Count | Auto = option(
        "auto", "networks of the first trials; auto: 12, or twice as many as train at a time", BY_TRIALS, AUTO
    )
    arch_fraction: Annotated[float, above(0), at_most(0.5)] = option(0.2, "share of text and steps for logits", GUMBEL)
    warmup_steps: Natural | None = option(None, "first steps, with uniform pi (null: a quarter)", GUMBEL)
    sampling: Literal["soft", "hard"] = option("soft", "mix all operations (the paper), or draw one", GUMBEL)
    split: Literal["heldout", "shared"] = option("heldout", "text of logits: held out (paper) or the weights'", GUMBEL)
    temperature: TemperatureOptions = section(TemperatureOptions, GUMBEL)
    optimizer: LogitsOptimizerOptions = section(LogitsOptimizerOptions, GUMBEL)
    latency: LatencyOptions = section(LatencyOptions)
    size: SizeOptions = section(SizeOptions)


@dataclass
class EvaluateOptions:
    batch_size: Count = option(16, "rows evaluated at once; does not change the results")
    segment: Count | None = option(None, "tokens per row and step (null: train.segment)")
    memory: Natural | None = option(None, "earlier positions that attention sees (null: train.memory)")


@dataclass
class MixtureOptions:
    states: Annotated[Natural, at_most(100_000)] = option(
        1000, "last hidden states of the network, in whose cache similar ones are looked up; 0: none"
    )
    cache: Orders = option(
        [1, 2, 3, 5], "cache of what followed the last n - 1 tokens of the stream, for each n; []: none"
    )
    counts: Annotated[Natural, at_most(8)] = option(5, "order of the n-gram counts of all training text; 0: none")
    size: Count | Size | None = option(
        None, f"of the counts, in bytes or such as 2MB; null: all, or {COUNTS_SHARE:g} of search.size.target", TRIAL
    )


@dataclass
class JobsOptions:
    cluster: str | None = option(
        None, "a Ray cluster that runs the trainings: auto or IP:PORT, see docs/cluster.md; null: this machine"
    )
    workers: Count | None = option(
        None, "trainings at a time (null: one on each GPU; on CPUs as many as have room for train.threads)"
    )


@dataclass
class Config:
    seed: Annotated[int, at_least(0), at_most(2**63 - 1)] = option(1, "of initialisation, dropout, sampling", SEEDS)
    data: DataOptions = section(DataOptions)
    model: ModelOptions = section(ModelOptions)
    train: TrainOptions = section(TrainOptions)
    search: SearchOptions = section(SearchOptions, ONLY_SEARCH)
    evaluate: EvaluateOptions = section(EvaluateOptions, EVAL_ONLY, TRIAL)
    mixture: MixtureOptions = section(MixtureOptions, EVAL_ONLY)
    jobs: JobsOptions = section(JobsOptions, RESUME, TRIAL, EVAL_ONLY, SEEDS)

    @property
    def beside(self) -> MixtureOptions:
        """What a network is mixed with; images have nothing."""
        return MixtureOptions(states=0, cache=[], counts=0) if self.model.grid else self.mixture

    @property
    def shape(self) -> Shape:
        """What the sizes of operations depend on."""
        keys = self.train.segment + self.train.memory
        return Shape(self.model.d_model, self.model.heads, self.model.d_ffn, self.train.segment, keys)

    @property
    def short_segments_conflict(self) -> str | None:
        """Why the configuration does not allow short segments, or None."""
        given, segment = f"train.short_share={self.train.short_share}", self.train.segment
        if segment % SHORT_PARTS:
            return f"{given} needs an even train.segment, not {segment}"
        return f"{given} does not work with model.grid; give 0" if self.model.grid else None

    def resolve_defaults(self) -> None:
        """Replace values that others determine, so that config.yaml records the used ones."""
        if self.train.lr is None:
            self.train.lr = LEARNING_RATES[self.train.optimizer]
        if self.data.tokenizer == "bytes":  # there are always 256
            self.data.vocab_size = None
        target, size = bytes_of(self.search.size.target), bytes_of(self.mixture.size)
        if target and size is None and self.beside.counts:
            size = int(COUNTS_SHARE * target)
        self.search.size.target, self.mixture.size = target, size if self.beside.counts else None


@cache
def options(kind=Config, prefix: str = "", marks: tuple = ()) -> dict[str, Option]:
    """{dotted key: option} of every option of a section, in order. marks: those of the section."""
    found = {}
    for item in fields(kind):
        key, own = prefix + item.name, (*marks, *item.metadata["marks"])
        if is_dataclass(item.type):
            found |= options(item.type, f"{key}.", own)
        else:
            found[key] = Option(item.type, item.metadata["help"], own)
    return found


def marked(*marks: str) -> list[str]:
    """The keys of the options that have one of these marks, in order."""
    return [key for key, option in options().items() if {*marks} & {*option.marks}]


def flatten(content: dict, prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested mappings."""
    flat = {}
    for name, value in content.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def flat_config(content: Config | dict) -> dict[str, Any]:
    """{dotted key: value} of every option, also of those that a nested mapping lacks, which have their defaults."""
    given = flatten(asdict(content) if isinstance(content, Config) else content)
    return {key: given.get(key, default) for key, default in flatten(asdict(Config())).items()}


def config_of(values: dict[str, Any]) -> Config:
    """The configuration with these values. values: {dotted key: value} of every option."""
    config = Config()
    for key, value in values.items():
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, config), name, value)
    return config


def changes(old: dict[str, Any], new: dict[str, Any], may_differ: Collection[str]) -> list[str]:
    """The options, besides those that may differ, that have another value: `key (old -> new)`."""
    different = [key for key in new if new[key] != old[key] and key not in may_differ]
    return [f"{key} ({old[key]} -> {new[key]})" for key in different]


def known_values(config: Config, values: dict[str, Any]) -> Config:
    """A copy of a configuration with known values in place of auto. values: {dotted key: value}."""
    own = flat_config(config)
    return config_of(own | {key: values[key] for key in marked(AUTO) if key in values and own[key] == "auto"})
