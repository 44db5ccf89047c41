"""Blocks for the tests of models, phases for those of trainings, their losses, and search runs for derivations."""

import importlib.util
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn

from models.operations.operation import BlockConfig
from models.operations.registry import OPERATIONS, Shape, build_operation
from models.transformer_xl import TransformerXL, build_pattern
from nas.core.config import Config, ModelOptions, TrainOptions
from nas.core.pattern import expand, interleaved, resolve_block
from nas.costs.cost_table import FLOPS, CostTable
from nas.costs.flops import count_flops, operation_flops
from nas.data.corpus import Corpus, prepare
from nas.derivation.runs import SearchRun
from nas.gumbel.gumbel_phase import GumbelPhase, StochasticBlock
from nas.retraining.phase import RetrainPhase
from nas.search.space import Network, make_network
from nas.training.build import build_fixed
from nas.training.device import choose_runtime
from tests.processes import run

GUMBEL = ["search.warmup_steps=6", "search.optimizer.lr=0.05"]
STAGES = {
    "search_hard": ["search.method=gumbel", "search.sampling=hard", "search.split=shared", *GUMBEL],
    "search_soft": ["search.method=gumbel", "search.split=shared", *GUMBEL, "model.norm=post"],
    "retrain": ["model.cutoffs=[5,20]"],
    "retrain_adamw": [
        "train.optimizer=adamw",
        "train.schedule=cosine",
        "train.average_share=0",
        "model.tie_embeddings=true",
    ],
}


# Options of the trained models of the fixture `trained`
TRAIN = ["train.steps=12", "model.cutoffs=[5,20]", "model.tie_embeddings=true", "model.ngram_rows=[13,11]"]
KINDS = {"words": [], "bytes": ["data.tokenizer=bytes"], "sentencepiece": ["data.tokenizer=bpe", "data.vocab_size=310"]}

# {operation: a block of it with small sizes}, for streams of a few positions
SIZES = {
    "attention": "heads=4 key_heads=2",
    "sparse_strided": "5",
    "sparse_fixed": "5 summary=2",
    "window": "6",
    "linear": "chunk=4",
}
BLOCKS = {name: f"{name} {SIZES.get(name, '')}".strip() for name in OPERATIONS}

NAMES = ["attention", "dense", "identity"]
COSTS = CostTable(FLOPS, 10.0, {"attention": 6.0, "dense": 4.0, "identity": 0.0})


def search_run(pi, path="runs/one", operations=NAMES, **content) -> SearchRun:
    """A run in the form of read_run(), with pi [N, O]."""
    content = {"model": {"d_model": 8}, "data": {"source": "x"}, "seed": 1} | content
    content["search"] = {"method": "gumbel"} | content.get("search", {})
    return SearchRun(Path(path), content, list(operations), np.array(pi, dtype=float), 7, 7, COSTS)


def plain(vocab_size: int, d_model: int, blocks: int) -> Network:
    return make_network(vocab_size, d_model, interleaved(blocks))


def one_hot(*indices) -> np.ndarray:
    """pi [N, O] that is nearly certain of a path."""
    return np.eye(3)[list(indices)] * 0.98 + 0.02 / 3


def shape_of(d_model=16, heads=2, d_ffn=24, segment=64, keys=64) -> Shape:
    return Shape(d_model, heads, d_ffn, segment, keys)


def sized(names: list[str], **shape) -> list[tuple[str, dict[str, int]]]:
    """The operation and the sizes of each block, as build_pattern() takes them. shape: see shape_of()."""
    return [resolve_block(name, shape_of(**shape)) for name in names]


def operation_of(name: str, config: BlockConfig, **shape) -> nn.Module:
    """The operation of a block. shape: see shape_of()."""
    ((kind, sizes),) = sized([name], **{"d_model": config.d_model} | shape)
    return build_operation(kind, config, **sizes)


def flops_of(name: str, batch: int, segment: int, memory: int, relative=True, heads=4) -> float:
    """FLOPs of a block of width 16 per token."""
    config = Config(train=TrainOptions(batch_size=batch, segment=segment, memory=memory))
    config.model = ModelOptions(d_model=16, heads=heads, d_ffn=40, dropout=0, grid=[] if relative else [1, 1, 1])
    config.search.latency.timing = "training"  # the cost at the lengths of training
    return operation_flops(name, config)


def supernet_of(blocks: int, names: list[str], config: BlockConfig, vocab_size: int, **shape):
    """A SuperNet. shape: see shape_of()."""
    operations = sized(names, **{"d_model": config.d_model} | shape)
    return TransformerXL([StochasticBlock(operations, config) for _ in range(blocks)], config, vocab_size)


def streaming_model(pattern: list[str], vocab_size: int, norm="pre", grid=(), **options) -> TransformerXL:
    """A model of width 16 whose biases and n-grams are not zero, for the tests of streams."""
    torch.manual_seed(3)
    config = BlockConfig(16, norm=norm, relative=not grid)
    model = build_pattern(sized(pattern), config, vocab_size, grid=grid, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or name.startswith("ngrams."):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def generator(seed: int) -> torch.Generator:
    """A random generator on the default device of the test."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def load_script(name: str):
    """Import a program of experiments/, such as `bench/generation`, as a module."""
    path = Path(__file__).parents[1] / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for the module here
    spec.loader.exec_module(module)
    return module


def make_search(config, corpus=None):
    """The phase that trains weights and logits."""
    torch.manual_seed(config.seed)
    corpus = corpus or Corpus(prepare(config.data))
    costs = count_flops(config, corpus.counts())
    runtime, latency = choose_runtime(config.train), config.search.latency
    target = None if latency.source == "none" else latency.target
    return GumbelPhase(corpus, config, runtime, costs, target)


def make_retraining(config, pattern, corpus=None, until=None):
    torch.manual_seed(config.seed)
    corpus = corpus or Corpus(prepare(config.data))
    model, runtime = build_fixed(pattern, config, corpus.vocab_size), choose_runtime(config.train)
    return RetrainPhase(model, corpus, config, runtime, until)


def losses_of(stage, config) -> list[float]:
    phase = make_retraining(config, NAMES) if stage.startswith("retrain") else make_search(config)
    losses = [phase.step(step)[0] for step in range(1, 16)]
    return [loss.item() for loss in losses if loss is not None]


def assert_same_state(one, two) -> None:
    """Assert that nested dicts, lists and tensors are bit-identical."""
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_same_state(one[key], two[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same_state(a, b)
    else:
        assert one == two


def assert_same_run(one: Path, two: Path, weights_in: str) -> None:
    """Assert that two run folders have bit-identical metrics, histories of pi and weights."""
    for name in ("metrics.jsonl", "pi.jsonl"):
        assert (one / name).exists() == (two / name).exists()
        if (one / name).exists():
            assert (one / name).read_bytes() == (two / name).read_bytes()
    first, second = (torch.load(path / "checkpoint.pt", weights_only=True)["phase"][weights_in] for path in (one, two))
    assert_same_state(first, second)


def results(perplexity: float, comparable: bool = True, ms: float = 10.0, letters: str = "ad") -> dict:
    """The content of results.yaml for a text of 1,000 tokens, 500 words and 2,500 bytes."""
    nll = 500 * math.log(perplexity)
    split = {
        "nll_per_token": nll / 1000,
        "perplexity": math.exp(nll / 1000),
        "word_perplexity": perplexity,
        "word_perplexity_comparable": comparable,
        "bits_per_byte": nll / math.log(2) / 2500,
    }
    about = {"parameters": 100, "flops_per_token": 1000.0, "wall_time_s": 7200.0, "pattern": expand(letters)}
    valid, latency = split | {"word_perplexity": perplexity + 5}, {"ms_per_1000_bytes": ms}
    own = {"valid": valid, "test": split}
    return own | {"network": own, "mixture": None, **about, "latency": latency, "train_tokens_per_s": 1}


WIDE = "format: par-pattern/2\nd_model: 32\nheads: 4\nblocks: [attention, dense]\n"
COMPARISON = {
    "format": "par-comparison/2",
    "retrain": "small.yaml",
    "patterns": ["interleaved", "dense-only", "wide.yaml"],
    "seeds": [1, 2],
}
compare = partial(run, "compare")


def write_comparison_yaml(folder: Path, small_yaml: Path, **changed) -> Path:
    """A comparison of runs of 8 steps; keys that are changed to None are omitted."""
    content = yaml.safe_load(small_yaml.read_text())
    content["train"] |= {"steps": 8, "evaluate_every": 0, "warmup_steps": 2, "checkpoint_every": 2}
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    (folder / "wide.yaml").write_text(WIDE)
    path = folder / "comparison.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (COMPARISON | changed).items() if v is not None}))
    return path
