"""nas.core.config."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from nas.core.pattern import OPERATIONS

FACTORIZATIONS = ("merged", "heads")  # those of models.sparse, known here without torch


def option(default, meaning, *, choices=None, minimum=None, above=None, maximum=None, below=None):
    """A dataclass field that carries its documentation and its range."""
    limits = {"choices": choices, "minimum": minimum, "above": above, "maximum": maximum, "below": below}
    metadata = {"meaning": meaning, **{name: limit for name, limit in limits.items() if limit is not None}}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataOptions:
    source: str = option(
        "pydoc",
        "pydoc, wikitext-2, wikitext-103, enwik8, text8, a folder with train/valid/test.txt (or .bin), or a file",
    )
    tokenizer: str = option(
        "sentencepiece", "sentencepiece (trained on the train split), bytes, words, or a .model file"
    )
    vocab_size: int | None = option(
        None,
        "pieces of sentencepiece (null: 8000, or as many as the text allows), words of `words` (null: all)",
        minimum=2,
    )
    lowercase: bool = option(False, "lowercase the text first; word figures are then not comparable")
    newline: str = option("keep", "whether line ends are tokens; word figures need keep", choices=("keep", "drop"))
    cache: str = option("~/.cache/par-nas", "folder for downloads and prepared tokens")


@dataclass
class ModelOptions:
    d_model: int = option(128, "width of the residual stream", minimum=2)
    heads: int = option(4, "attention heads; must divide d_model", minimum=1)
    d_ffn: int = option(512, "inner width of a dense block", minimum=1)
    blocks: int = option(6, "blocks of the SuperNet (a pattern file brings its own number)", minimum=1)
    dropout: float = option(
        0.0, "dropout of embeddings, branches and dense blocks; more for many passes over a text", minimum=0, below=1
    )
    norm: str = option("pre", "where a block normalises", choices=("pre", "post"))
    activation: str = option("relu", "activation of dense blocks", choices=("relu", "gelu"))
    cutoffs: Any = option(  # a list of whole numbers, or auto, which OmegaConf cannot say; check_cutoffs does
        [], "adaptive softmax: ids at which its tails begin, increasing; auto: the cheapest; []: full softmax"
    )
    clusters: int = option(3, "cutoffs auto: clusters of the vocabulary, the head among them", minimum=2)
    div_value: int = option(1, "adaptive softmax: width of tail i is d_model / div_value^i (1 where tied)", minimum=1)
    tie_embeddings: bool = option(True, "output layer shares the embedding's table")
    stride: int | None = option(
        None,
        "sparse attention: positions of a row (null: the power of two nearest to the square root of train.segment + "
        "train.memory); where the data has a period, that period",
        minimum=1,
    )
    summary: int | None = option(
        None, "sparse_fixed: last positions of each row that all see (null: 4, or the stride if less)", minimum=1
    )
    factorization: str = option(
        "merged", "sparse attention: one softmax over both sets, or each for half of the heads", choices=FACTORIZATIONS
    )
    positions: str = option(
        "relative",
        "distances in attention, or learned embeddings of the place in model.grid",
        choices=("relative", "grid"),
    )
    grid: list[int] = option([], "positions grid: rows, columns, channels of images that follow each other as bytes")
    recompute: bool = option(False, "run blocks again in the backward pass instead of keeping their inner values")
    init: str = option(
        "plain",
        "depth_scaled: scale each branch's last layer by 1 / sqrt(blocks); needs norm pre",
        choices=("plain", "depth_scaled"),
    )


@dataclass
class TrainOptions:
    steps: int | None = option(1000, "training steps", minimum=1)
    epochs: float | None = option(None, "passes over the training stream, instead of steps", above=0)
    batch_size: int = option(32, "rows, each a contiguous stretch of the corpus; of all processes together", minimum=1)
    segment: int = option(64, "tokens of a row per step", minimum=1)
    memory: int = option(64, "positions each block remembers", minimum=0)
    lr: float = option(6e-3, "peak learning rate of the weights (AdamW)", above=0)
    min_lr_ratio: float = option(
        0.0, "learning rate at the end of the cosine, as a share of the peak", minimum=0, maximum=1
    )
    warmup_steps: int = option(100, "steps of linear learning-rate warm-up", minimum=0)
    weight_decay: float = option(0.1, "AdamW weight decay of matrices", minimum=0)
    beta2: float = option(0.999, "AdamW memory of squared gradients: rare words need a long one", above=0, below=1)
    clip: float = option(1.0, "largest gradient norm of the weights; 0: no clipping", minimum=0)
    evaluate_every: int = option(500, "steps between evaluations on valid; 0: only at the end", minimum=0)
    log_every: int = option(50, "steps between lines of metrics and pi", minimum=1)
    checkpoint_every: int = option(500, "steps between checkpoints", minimum=1)
    patience: int = option(0, "retrain: evaluations without improvement before stopping early; 0: never", minimum=0)
    threads: int | None = option(None, "CPU threads of each process (null: PyTorch's choice)", minimum=1)
    grad_accum_steps: int = option(
        1, "parts in which a process reads its rows one after the other: less memory, the same gradients", minimum=1
    )
    device: str = option("auto", "auto: cuda where there is a GPU, else cpu", choices=("auto", "cpu", "cuda"))
    precision: str = option(
        "auto",
        "of matrix products; auto: bf16 on a GPU that has it, else fp32 (on a GPU by tf32). Weights are fp32 always",
        choices=("auto", "fp32", "bf16"),
    )
    compile: str = option(
        "auto",
        "operations by torch.compile and, on a GPU, launches by CUDA graphs; auto: on a GPU",
        choices=("auto", "always", "never"),
    )


@dataclass
class TemperatureOptions:
    start: float = option(
        1.0, "temperature of the relaxed sample (soft, straight_through) when logits begin to learn", above=0
    )
    end: float = option(0.1, "temperature at the last step, exactly", above=0)
    schedule: str = option("exponential", "the way from start to end", choices=("exponential", "linear", "cosine"))


@dataclass
class LogitsOptimizerOptions:
    lr: float = option(0.05, "learning rate of the logits (Adam); 0.01 suits soft sampling", above=0)
    weight_decay: float = option(0.0, "Adam weight decay of the logits", minimum=0)


@dataclass
class LatencyOptions:
    source: str = option(
        "none",
        "price of an operation: none, flops (the same everywhere), or measured (milliseconds on this device)",
        choices=("none", "flops", "measured"),
    )
    timing: str = option(
        "inference",
        "what costs are of: a forward pass at the sizes of evaluate.*, or a training step at those of train.*",
        choices=("inference", "training"),
    )
    target: float = option(0.65, "cost as a ratio to the interleaved pattern's above which the loss grows", above=0)
    weight: float = option(1.0, "nats added to the loss per unit of that ratio", minimum=0)
    mode: str = option("target", "add the cost above the target, or always (penalty)", choices=("target", "penalty"))


@dataclass
class EntropyOptions:
    start: float = option(
        0.0, "nats added to the loss per nat of pi's mean entropy when logits begin to learn; below 0: stay open"
    )
    end: float = option(0.0, "the same at the last step, linearly in between; above 0: come to a decision")


@dataclass
class WarningOptions:
    identity_share: float = option(
        0.5, "warn where identity is the choice of more than this share of the blocks", minimum=0, maximum=1
    )
    margin: float = option(
        0.1, "call a block undecided where its first choice leads the second by less than this", minimum=0, maximum=1
    )
    late_share: float = option(
        0.1, "warn of blocks whose choice changed in this last share of the steps", minimum=0, maximum=1
    )


# Why these defaults: experiments/ranking (Kendall's tau between the order of patterns by a SuperNet's weights and by
# training each alone; 0.90 between two seeds of that) and experiments/planted (corpora whose right pattern is known).
# - warmup_steps: after a quarter of 2,400 steps the SuperNet's order is no better than chance (tau -0.02, -0.03), after
#   half it is (0.59, 0.57), after three quarters as after half (0.60); without warm-up the search ends at 0.07.
# - fair_warmup: 0.59 and 0.57 after half, 0.50 without.
# - sampling hard: soft ended at 0.03 (no warm-up), 0.38 (a quarter), 0.48 (half), in two to three times the time.
# - estimator leave_one_out: straight_through ended at 0.55 to 0.72, best of all, for its paths hold more identity; but
#   where there is a price it gives up all for identity (0 of 10), and leave_one_out finds what is planted (8, 10).
# - paths: 2 are too few (0.06); 8 find more of what is planted than 4 (10 and 4 of 10 instead of 8 and 2), for 4 more
#   forward passes in each logits step.
# - weights_paths: uniform ended at 0.58 and 0.57, pi at 0.53 and 0.58: no clear difference with six blocks; with twelve
#   and a price (experiments/compare) 0.35 instead of -0.02 and 0.35.
# - A floor of uniform exploration in the weights' paths ended at 0.52 to 0.57, as without: it was taken out.
@dataclass
class SearchOptions:
    operations: list[str] = option(
        ["attention", "dense", "identity"], f"candidates of every block, of {', '.join(OPERATIONS)}"
    )
    sampling: str = option(
        "hard", "hard: one sampled operation per block; soft: a mixture of all", choices=("hard", "soft")
    )
    estimator: str = option(
        "leave_one_out", "how logits learn in hard mode", choices=("leave_one_out", "straight_through")
    )
    paths: int = option(4, "leave_one_out: paths evaluated per logits step", minimum=2)
    split: str = option(
        "heldout", "logits learn on held-out training text, or on the weights' batches", choices=("heldout", "shared")
    )
    arch_fraction: float = option(
        0.2, "heldout: share of the training stream, and of the steps, for the logits", above=0, maximum=0.5
    )
    warmup_steps: int | None = option(
        None,
        "steps in which weights train alone, at uniform pi (null: half of all; the paper takes a quarter)",
        minimum=0,
    )
    fair_warmup: bool = option(
        True,
        "hard: on uniform paths every operation of every block is trained equally often, not just on average",
    )
    weights_paths: str = option(
        "pi",
        "along which samples the weights train after the warm-up: those of pi, or uniform ones, so that no operation "
        "is judged by how often it was trained",
        choices=("pi", "uniform"),
    )
    stable_share: float = option(
        0.0, "stop early once this share of blocks keeps its choice; 0: never", minimum=0, maximum=1
    )
    stable_steps: int = option(1000, "for how many steps it must have kept it", minimum=1)
    temperature: TemperatureOptions = field(default_factory=TemperatureOptions)
    optimizer: LogitsOptimizerOptions = field(default_factory=LogitsOptimizerOptions)
    entropy: EntropyOptions = field(default_factory=EntropyOptions)
    latency: LatencyOptions = field(default_factory=LatencyOptions)
    warnings: WarningOptions = field(default_factory=WarningOptions)


@dataclass
class EvaluateOptions:
    batch_size: int = option(16, "rows evaluated at once; figures do not depend on it", minimum=1)
    segment: int | None = option(None, "tokens per step (null: train.segment)", minimum=1)
    memory: int | None = option(None, "positions remembered (null: train.memory)", minimum=0)


@dataclass
class Config:
    seed: int = option(1, "seed of initialisation, dropout and sampling", minimum=0, maximum=2**63 - 1)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    search: SearchOptions = field(default_factory=SearchOptions)
    evaluate: EvaluateOptions = field(default_factory=EvaluateOptions)


def options(config=Config, prefix=""):
    """(dotted key, field) of every option, in order."""
    for item in fields(config):
        nested = item.default_factory if is_dataclass(item.default_factory) else None
        if nested:
            yield from options(nested, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def default_of(item):
    """The default of an option's field."""
    return item.default_factory() if callable(item.default_factory) else item.default
