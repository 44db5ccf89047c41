import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib import pyplot

from experiments.helpers import ArrayCorpus
from models.operations.sparse import dense_mask, group_masks
from models.relative_attention import causal_mask, sinusoidal_encodings
from nas.core.config_loading import load_config
from tests.making import KINDS, TRAIN, compare, write_comparison_yaml
from tests.processes import succeed

torch.set_num_threads(1)  # as the runs of the tests, because float32 sums depend on it

SUBJECTS = ["the old man", "a red fox", "my sister", "the small ship", "every child", "one crow", "the café"]
VERBS = ["sees", "follows", "remembers", "builds", "leaves", "paints", "calls"]
OBJECTS = ["the river", "two houses", "a long road", "the naïve king", "her garden", "it", "nothing", "£5"]


def made_up_text(sentences: int, seed: int = 0) -> str:
    """Lines that resemble English and follow a grammar. Some are empty, and some have unusual spaces."""
    source, lines = random.Random(seed), []
    for _ in range(sentences):
        line = f"{source.choice(SUBJECTS)} {source.choice(VERBS)} {source.choice(OBJECTS)} ."
        lines.append(source.choice([line, line, line, f" {line} ", f"{line}  And  {line}", ""]))
    return "\n".join(lines) + "\n"


def write_text_folder(folder: Path) -> Path:
    for seed, (split, sentences) in enumerate([("train", 900), ("valid", 60), ("test", 70)]):
        (folder / f"{split}.txt").write_text(made_up_text(sentences, seed), encoding="utf-8")
    return folder


def small_content(source: Path, cache: Path) -> dict:
    """A configuration that trains in seconds on a generated text."""
    return {
        "data": {"source": str(source), "tokenizer": "words", "vocab_size": None, "cache": str(cache)},
        "model": {"d_model": 16, "heads": 2, "d_ffn": 24, "blocks": 3, "dropout": 0.1}
        | {"ngram_rows": [], "tie_embeddings": False},
        "train": {
            "steps": 24,
            "batch_size": 4,
            "segment": 8,
            "memory": 8,
            "log_every": 3,
            "evaluate_every": 8,
            "checkpoint_every": 5,
            "warmup_steps": 4,
            "lr": 3e-3,
            "weight_decay": 0.01,
            "beta2": 0.99,
            "threads": 1,
            "device": "cpu",
            "precision": "fp32",  # with auto, Muon's precision depends on the processor
        },
        "search": {"method": "gumbel"},
        "mixture": {"states": 0, "cache": [], "counts": 0},
    }


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    return write_text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def small_yaml(tmp_path_factory, text_folder, cache) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(yaml.safe_dump(small_content(text_folder, cache)))
    return path


@pytest.fixture(scope="session")
def pattern(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pattern") / "adi.yaml"
    path.write_text("format: par-pattern/2\nblocks: [attention, dense, identity]\n")
    return path


@pytest.fixture
def small_config(small_yaml):
    """config(*overrides) -> Config"""
    return lambda *overrides: load_config(small_yaml, list(overrides))


@pytest.fixture(scope="session")
def finished_comparison(tmp_path_factory, small_yaml):
    """(COMPARISON.yaml, RUN_DIR, process) of a comparison of two rules and a wider network, with two seeds."""
    folder = tmp_path_factory.mktemp("compare")
    path = write_comparison_yaml(folder, small_yaml)
    done = compare(path, "--run", folder / "run", "jobs.workers=2")
    assert done.returncode == 0, done.stderr
    return path, folder / "run", done


@pytest.fixture(scope="session")
def searched(tmp_path_factory, small_yaml) -> Path:
    """The run folder of a search. Tests do not change it."""
    folder = tmp_path_factory.mktemp("searched") / "run"
    succeed("search", small_yaml, "--run", folder)
    return folder


@pytest.fixture(scope="session")
def retrained(tmp_path_factory, small_yaml, pattern) -> Path:
    """The run folder of a training. Tests do not change it."""
    folder = tmp_path_factory.mktemp("retrained") / "run"
    succeed("retrain", pattern, small_yaml, "--run", folder)
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory, small_yaml) -> dict[str, Path]:
    """{tokenizer: run folder} of short trainings."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "pattern.yaml").write_text("format: par-pattern/2\nblocks: [window 6, dense, linear, attention]\n")
    for kind, options in KINDS.items():
        succeed("retrain", folder / "pattern.yaml", small_yaml, "--run", folder / kind, *TRAIN, *options)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory) -> dict[str, Path]:
    """{tokenizer: exported folder}. Its run folder is not needed."""
    folder = tmp_path_factory.mktemp("exported")
    for kind, run in trained.items():
        succeed("export", run, "--out", folder / kind)
    return {kind: folder / kind for kind in trained}


@pytest.fixture
def saved_figures(monkeypatch) -> Iterator[list]:
    """The figures that a test draws, which are not written."""
    figures = []
    monkeypatch.setattr("nas.reporting.figures.save", lambda figure, path: figures.append(figure))
    yield figures
    pyplot.close("all")


NO_GPU = "PyTorch sees no GPU here" if not torch.cuda.is_available() else ""


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)])]
)
def each_device(request):
    """Run a test with tensors on the CPU and, if there is a GPU, again with tensors on it."""
    with torch.device(request.param):
        yield torch.device(request.param)
    for kept in (sinusoidal_encodings, causal_mask, group_masks, dense_mask):
        kept.cache_clear()  # tensors cached under device=None are on this device


@pytest.fixture
def memory_corpus():
    return lambda vocab_size, train, valid: ArrayCorpus(vocab_size, train=train, valid=valid)
