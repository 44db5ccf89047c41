"""Every option of a configuration, in a dataclass per section, with its default, help text and allowed range."""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from models.operations.registry import Shape

SHORT_SHARE, SHORT_FROM = 0.85, 128  # default of train.short_share, and of the shortest segment that gets it
SHORT_PARTS = 2  # short segments that a segment is divided into
PIECES = "bpe", "unigram"  # tokenizers that are trained on the text
# Options that may be auto, until the text is known
AUTO = "model.cutoffs", "model.ngram_rows", "model.dropout", "train.weight_decay"
CANDIDATES = {  # of search.operations, by search.method
    "trials": ("attention", "dense", "dense 8x", "conv", "window", "identity"),
    "gumbel": ("attention", "dense", "identity"),  # of the paper
}
LEARNING_RATES = {"muon": 0.01, "adamw": 0.006}  # of AdamW, by train.optimizer


def option(default, help, **allowed):
    """A dataclass field with its help text and its allowed values: choices, minimum, above, maximum, below."""
    metadata = {"help": help, **allowed}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataOptions:
    source: str = option(
        "pydoc", "pydoc, stdlib, wikitext-2, wikitext-103, enwik8, text8, a folder of .txt or .bin, a file"
    )
    tokenizer: str = option("bpe", "bpe or unigram (trained on train), bytes, words, a .model file or vocabulary")
    vocab_size: int | None = option(None, "pieces (null: at most 8000) or words (null: all)", minimum=2)
    lowercase: bool = option(False, "lowercase the text; word perplexity is then not comparable")
    newline: str = option("keep", "keep line ends; drop: word perplexity is not comparable", choices=("keep", "drop"))
    cache: str = option("~/.cache/par-nas", "folder for downloads and prepared tokens")


@dataclass
class ModelOptions:
    d_model: int = option(128, "width of the residual stream", minimum=2)
    heads: int = option(4, "attention heads; must divide d_model", minimum=1)
    # int or "4x": OmegaConf has no such union, so check_model() checks it
    d_ffn: Any = option("4x", "inner width of dense blocks; 4x: four times d_model")
    blocks: int = option(6, "largest number of blocks; exactly as many, if identity is no operation", minimum=1)
    # float or "auto": check_range() checks the type
    dropout: Any = option(
        "auto",
        "of embeddings, branches, inner activations, last layer; auto: up to 0.2 if the text is read again",
        minimum=0,
        below=1,
        number_or_auto=True,
    )
    norm: str = option("pre", "layer normalisation before or after each block", choices=("pre", "post"))
    activation: str = option("relu", "activation of dense blocks", choices=("relu_squared", "relu", "gelu"))
    # list[int] or "auto": OmegaConf has no such union, so check_cutoffs() checks the type
    cutoffs: Any = option([], "adaptive softmax: first id of each tail; auto: the fastest; []: full softmax")
    div_value: int = option(1, "adaptive softmax: tail i has width d_model / div_value^i; 1 if tied", minimum=1)
    tie_embeddings: bool = option(False, "share the weights of the embedding and the output layer")
    # list[int] or "auto": check_model() checks the type
    ngram_rows: Any = option("auto", "rows of hashed embeddings of the last 2, 3, ... tokens; auto: by text; []: none")
    grid: list[int] = option([], "rows, columns, channels of images, for learned positions; []: relative ones")
    recompute: bool = option(False, "recompute blocks in the backward pass: less memory, more time")
    init: str = option("plain", "depth_scaled: last layers times 1 / sqrt(blocks)", choices=("plain", "depth_scaled"))


@dataclass
class TrainOptions:
    steps: int | None = option(1000, "training steps", minimum=1)
    epochs: float | None = option(None, "epochs over the training text, instead of steps", above=0)
    init_from: str | None = option(None, "retrain: start from the weights of this training or exported folder")
    batch_size: int = option(32, "rows per step over all processes; each row is a contiguous text", minimum=1)
    segment: int = option(64, "tokens per row and step", minimum=1)
    memory: int = option(64, "earlier positions that attention sees; linear carries a state instead", minimum=0)
    optimizer: str = option("muon", "of the blocks' matrices; all other weights have AdamW", choices=("adamw", "muon"))
    lr: float | None = option(None, "peak learning rate of AdamW (null: 0.01 beside Muon, 0.006 alone)", above=0)
    muon_lr: float = option(0.015, "peak learning rate of Muon; it suits any width", above=0, maximum=1)
    schedule: str = option("linear", "decay of the rates, to 1/4 or 0 (cosine)", choices=("cosine", "linear"))
    warmup_steps: int = option(100, "steps of linear learning-rate warm-up", minimum=0)
    # float or "auto": check_range() checks the type
    weight_decay: Any = option(
        "auto",
        "weight decay of matrices; auto: 0.02 (adamw: 0.1), or 0.5 if the text is read often",
        minimum=0,
        number_or_auto=True,
    )
    beta2: float = option(0.999, "AdamW decay rate of squared gradients; rare words need it near 1", above=0, below=1)
    average_share: float = option(0.2, "last share of the steps, over which weights are averaged", minimum=0, maximum=1)
    short_share: float | None = option(
        None,
        f"first share of the steps, on half segments; not for gumbel (null: {SHORT_SHARE} or 0)",
        minimum=0,
        maximum=1,
    )
    clip: float = option(1.0, "maximum gradient norm of the weights; 0: no clipping", minimum=0)
    evaluate_every: int = option(500, "steps between evaluations on valid; 0: only at the end", minimum=0)
    log_every: int = option(50, "steps between lines of metrics and pi", minimum=1)
    checkpoint_every: int = option(500, "steps between checkpoints", minimum=1)
    threads: int | None = option(None, "CPU threads per process (null: PyTorch's default)", minimum=1)
    grad_accum_steps: int = option(1, "parts into which each process splits its rows to save memory", minimum=1)
    device: str = option("auto", "auto: cuda if there is a GPU, else cpu", choices=("auto", "cpu", "cuda"))
    precision: str = option(
        "auto", "of products; auto: bf16 if supported, on a CPU only for Muon", choices=("auto", "fp32", "bf16")
    )
    compile: str = option(
        "auto", "torch.compile of operations; auto: on a GPU, from 20,000 steps on", choices=("auto", "always", "never")
    )


@dataclass
class TemperatureOptions:
    start: float = option(1.0, "gumbel: temperature of the samples in the warm-up; it falls exponentially", above=0)
    end: float = option(0.1, "gumbel: temperature at the last step", above=0)


@dataclass
class LogitsOptimizerOptions:
    lr: float = option(0.01, "gumbel: learning rate of the logits (Adam)", above=0)
    weight_decay: float = option(0.0, "gumbel: Adam weight decay of the logits", minimum=0)


@dataclass
class LatencyOptions:
    source: str = option(
        "none",
        "cost of operations: flops, measured (milliseconds on this device), onnx (in ONNX Runtime), or a table of "
        "nas.latency from another one, such as table.yaml",
    )
    timing: str = option(
        "inference",
        "a forward pass (evaluate.*), a training step (train.*), or the next token of one text with full memories",
        choices=("inference", "training", "generation"),
    )
    target: Any = option(0.65, "highest (gumbel: expected) cost: ratio to the reference's, or 2.5ms per 1,000 bytes")
    weight: float = option(1.0, "gumbel: nats added to the loss per unit of that ratio above the target", minimum=0)

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
    # The help of an option that only one method has begins with its name: check_method() reads it.
    # text, or mappings of a name to its sizes: simplify_block() checks them
    operations: list[Any] = option([], "candidates of each block, with their sizes ([]: those of the method)")
    # lists or "auto": check_sizes() checks them
    vocab_size: Any = option([], "trials: vocabularies to choose from; auto; []: data.vocab_size")
    d_model: Any = option([], "trials: widths to choose from, with heads of one size; auto; []: model.d_model")
    method: str = option(
        "trials",
        "short trainings of networks, led by a surrogate model; gumbel: arXiv 2009.04534",
        choices=("trials", "gumbel"),
    )
    arch_fraction: float = option(0.2, "gumbel: share of text and steps for the logits", above=0, maximum=0.5)
    warmup_steps: int | None = option(None, "gumbel: first steps, with uniform pi (null: a quarter)", minimum=0)
    sampling: str = option("soft", "gumbel: mix all operations (the paper), or draw one", choices=("soft", "hard"))
    split: str = option(
        "heldout", "gumbel: text of the logits: held out (the paper) or the weights'", choices=("heldout", "shared")
    )
    temperature: TemperatureOptions = field(default_factory=TemperatureOptions)
    optimizer: LogitsOptimizerOptions = field(default_factory=LogitsOptimizerOptions)
    latency: LatencyOptions = field(default_factory=LatencyOptions)


@dataclass
class EvaluateOptions:
    batch_size: int = option(16, "rows evaluated at once; does not change the results", minimum=1)
    segment: int | None = option(None, "tokens per row and step (null: train.segment)", minimum=1)
    memory: int | None = option(None, "earlier positions that attention sees (null: train.memory)", minimum=0)


@dataclass
class Config:
    seed: int = option(1, "seed of initialisation, dropout and sampling", minimum=0, maximum=2**63 - 1)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    search: SearchOptions = field(default_factory=SearchOptions)
    evaluate: EvaluateOptions = field(default_factory=EvaluateOptions)

    @property
    def shape(self) -> Shape:
        """What the sizes of operations depend on."""
        keys = self.train.segment + self.train.memory
        return Shape(self.model.d_model, self.model.heads, self.model.d_ffn, self.train.segment, keys)


def options(section=Config, prefix=""):
    """Yield (dotted key, dataclass field) of every option, in order."""
    for item in fields(section):
        if is_dataclass(item.default_factory):
            yield from options(item.default_factory, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def default_of(item):
    """The default of an option's field."""
    return item.default_factory() if callable(item.default_factory) else item.default


def flat_config(content: dict) -> dict[str, Any]:
    """{dotted key: value} of every option in a nested mapping, such as config.yaml; missing options have defaults."""
    flat = {}
    for key, item in options():
        value = content
        for part in key.split("."):
            value = value.get(part, item) if isinstance(value, dict) else item
        flat[key] = default_of(item) if value is item else value
    return flat


def known_values(config: Config, values: dict[str, Any]) -> Config:
    """A copy of a configuration with known values in place of auto. values: {dotted key: value}."""
    for key in AUTO:
        section, name = key.split(".")
        options = getattr(config, section)
        if key in values and getattr(options, name) == "auto":
            config = replace(config, **{section: replace(options, **{name: values[key]})})
    return config
