"""Every option of a configuration, in a dataclass per section, with its type, default, help text and marks."""

import math
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from models.operations.registry import Shape

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


class Rule(NamedTuple):
    """What Annotated adds to a type. text: describes both, with {} in place of the type."""

    text: str
    holds: Callable[[Any], Any] = lambda value: True


def limit(words: str, holds: Callable) -> Callable[[float], Rule]:
    return lambda number: Rule(f"{{}} {words} {number}", lambda value: holds(value, number))


at_least, above = limit("of at least", operator.ge), limit("above", operator.gt)
at_most, below = limit("and at most", operator.le), limit("and below", operator.lt)


def fits(value, kind) -> bool:
    """Whether a value fits a type. Here whole numbers are no floats, and true and false are no numbers."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return fits(value, parts[0]) and all(rule.holds(value) for rule in parts[1:])
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is list:
        return isinstance(value, list) and all(fits(entry, parts[0]) for entry in value)
    return kind is Any or (type(value) is kind and (kind is not float or math.isfinite(value)))


def describe(kind) -> str:
    """The values that fit a type, as text."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        text = describe(parts[0])
        for rule in parts[1:]:
            text = rule.text.format(text)
        return text
    if origin is list:
        return "a list"
    if origin is Literal:
        return f"one of {', '.join(parts)}" if len(parts) > 1 else parts[0]
    return TYPE_NAMES.get(kind) or ", or ".join(describe(part) for part in parts)


def choices(kind) -> list[str]:
    """The words that fit a type."""
    parts = get_args(kind)
    return [*parts] if get_origin(kind) is Literal else [word for part in parts for word in choices(part)]


SHORT_SHARE, SHORT_FROM = 0.85, 128  # default of train.short_share, and of the shortest segment that gets it
SHORT_PARTS = 2  # short segments that a segment is divided into
MOST_NGRAMS = 4  # tables of models.transformer_xl.NGramEmbedding
PIECES = "bpe", "unigram"  # tokenizers that are trained on the text
LEARNING_RATES = {"muon": 0.01, "adamw": 0.006}  # of AdamW, by train.optimizer
MULTIPLE = re.compile(r"\d+(\.\d+)?x")  # a size, such as 4x of d_model
TIME = re.compile(r"(\d+(?:\.\d+)?) ?ms")  # a budget for 1,000 bytes of text

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
    """A dataclass field with its help text and marks."""
    metadata = {"help": help, "marks": marks}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind, *marks):
    """A dataclass field that holds other options, with marks of all of them."""
    return field(default_factory=kind, metadata={"marks": marks})


def milliseconds(budget: float | str) -> float | None:
    """The time of a budget such as 2.5ms, for 1,000 bytes of text; None if the budget is a ratio."""
    absolute = TIME.fullmatch(budget) if isinstance(budget, str) else None
    return float(absolute[1]) if absolute else None


def is_set(values: list) -> bool:
    return len({*values}) == len(values)


Auto = Literal["auto"]
Natural, Count, Two = (Annotated[int, at_least(number)] for number in (0, 1, 2))
Even = Annotated[int, Rule("an even number", lambda number: number % 2 == 0), at_least(2)]
Positive, NotNegative = Annotated[float, above(0)], Annotated[float, at_least(0)]
Share, Dropout = Annotated[float, at_least(0), at_most(1)], Annotated[float, at_least(0), below(1)]
Multiple = Annotated[str, Rule("a multiple of d_model such as 4x", MULTIPLE.fullmatch)]
RISING = Rule("{} of increasing whole numbers from 1, such as [250, 2500]", lambda ids: ids == sorted({*ids}))
FEW = Rule(f"{{}} of up to {MOST_NGRAMS} whole numbers from 1", lambda rows: len(rows) <= MOST_NGRAMS)
GRID = Rule("rows, columns and channels, such as [32, 32, 3], or []", lambda sizes: len(sizes) in (0, 3))
Operations = Annotated[list[Any], Rule("{} of operations, such as [attention, dense 8x]")]
Vocabularies = Annotated[list[Two], Rule("{} of different numbers from 2, such as [2000, 4000]", is_set)]
Widths = Annotated[list[Even], Rule("{} of different even numbers, such as [64, 128]", is_set)]
CostSource = Literal["none", "flops", "measured", "onnx"]
CostTableFile = Annotated[str, Rule("a file such as table.yaml", lambda name: name.endswith(".yaml"))]
Time = Annotated[str, Rule("a time such as 2.5ms", milliseconds)]


@dataclass
class DataOptions:
    source: str = option(
        "pydoc", "pydoc, stdlib, wikitext-2, wikitext-103, enwik8, text8, a folder of .txt or .bin, a file", RESUME
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
    tie_embeddings: bool = option(False, "share the weights of the embedding and the output layer", NETWORK)
    ngram_rows: Annotated[list[Count], FEW] | Auto = option(
        "auto", "rows of hashed embeddings of the last 2, 3, ... tokens; auto: by text; []: none", NETWORK, AUTO
    )
    grid: Annotated[list[Count], GRID] = option(
        [], "rows, columns, channels of images, for learned positions; []: relative ones", NETWORK
    )
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
    beta2: Annotated[float, above(0), below(1)] = option(
        0.999, "AdamW decay rate of squared gradients; rare words need it near 1"
    )
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
    start: Positive = option(1.0, "temperature of the samples in the warm-up; it falls exponentially")
    end: Positive = option(0.1, "temperature at the last step")


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
class SearchOptions:
    operations: Operations = option([], "candidates of each block, with their sizes ([]: those of the method)")
    vocab_size: Vocabularies | Auto = option([], "vocabularies to choose from; auto; []: data.vocab_size", BY_TRIALS)
    d_model: Widths | Auto = option([], "widths to choose from, heads of one size; auto; []: model.d_model", BY_TRIALS)
    method: Literal["trials", "gumbel"] = option(
        "trials", "short trainings of networks, led by a surrogate model; gumbel: arXiv 2009.04534"
    )
    arch_fraction: Annotated[float, above(0), at_most(0.5)] = option(0.2, "share of text and steps for logits", GUMBEL)
    warmup_steps: Natural | None = option(None, "first steps, with uniform pi (null: a quarter)", GUMBEL)
    sampling: Literal["soft", "hard"] = option("soft", "mix all operations (the paper), or draw one", GUMBEL)
    split: Literal["heldout", "shared"] = option("heldout", "text of logits: held out (paper) or the weights'", GUMBEL)
    temperature: TemperatureOptions = section(TemperatureOptions, GUMBEL)
    optimizer: LogitsOptimizerOptions = section(LogitsOptimizerOptions, GUMBEL)
    latency: LatencyOptions = section(LatencyOptions)


@dataclass
class EvaluateOptions:
    batch_size: Count = option(16, "rows evaluated at once; does not change the results")
    segment: Count | None = option(None, "tokens per row and step (null: train.segment)")
    memory: Natural | None = option(None, "earlier positions that attention sees (null: train.memory)")


@dataclass
class Config:
    seed: Annotated[int, at_least(0), at_most(2**63 - 1)] = option(
        1, "seed of initialisation, dropout, sampling", SEEDS
    )
    data: DataOptions = section(DataOptions)
    model: ModelOptions = section(ModelOptions)
    train: TrainOptions = section(TrainOptions)
    search: SearchOptions = section(SearchOptions, ONLY_SEARCH)
    evaluate: EvaluateOptions = section(EvaluateOptions, EVAL_ONLY, TRIAL)

    @property
    def shape(self) -> Shape:
        """What the sizes of operations depend on."""
        keys = self.train.segment + self.train.memory
        return Shape(self.model.d_model, self.model.heads, self.model.d_ffn, self.train.segment, keys)


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


def flat_config(content: dict) -> dict[str, Any]:
    """{dotted key: value} of every option in a nested mapping, such as config.yaml; missing options have defaults."""
    given = flatten(content)
    return {key: given.get(key, default) for key, default in flatten(asdict(Config())).items()}


def config_of(values: dict[str, Any], kind=Config, prefix: str = "") -> Config:
    """The configuration, or a section of it, with these values. values: {dotted key: value} of every option."""
    given = {}
    for item in fields(kind):
        key = prefix + item.name
        given[item.name] = config_of(values, item.type, f"{key}.") if is_dataclass(item.type) else values[key]
    return kind(**given)


def changes(old: dict[str, Any], new: dict[str, Any], may_differ: Collection[str]) -> list[str]:
    """The options, besides those that may differ, that have another value: `key (old -> new)`."""
    different = [key for key in new if new[key] != old[key] and key not in may_differ]
    return [f"{key} ({old[key]} -> {new[key]})" for key in different]


def known_values(config: Config, values: dict[str, Any]) -> Config:
    """A configuration with known values in place of auto, which shares other sections. values: {dotted key: value}."""
    for key in marked(AUTO):
        section, name = key.split(".")
        options = getattr(config, section)
        if key in values and getattr(options, name) == "auto":
            config = replace(config, **{section: replace(options, **{name: values[key]})})
    return config
