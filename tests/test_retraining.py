import math

import numpy as np
import pytest
import torch

import retrain
from experiments.helpers import ArrayCorpus
from models.operations import sparse
from nas.core.errors import InputError
from nas.core.files import read_jsonl, write_yaml
from nas.core.run_folder import METRICS, RunFolder
from nas.retraining.phase import BEST, evaluate_best
from nas.training.evaluation import evaluate_split, total_nll
from nas.training.passes import auto_lines, passes_warning, resolve_auto, warmup_warning
from nas.training.trainer import Trainer, load_checkpoint
from tests.making import make_retraining


def test_epochs_count_the_training_stream(small_config):
    phase = make_retraining(small_config("train.epochs=2"), ["dense"])
    tokens = len(phase.corpus.tokens("train"))
    assert phase.total_steps == math.ceil(2 * tokens / 32)


READ_AGAIN = ["train.batch_size=4", "train.segment=8", "model.dropout=auto", "train.weight_decay=auto"]


@pytest.fixture
def short_text() -> ArrayCorpus:
    return ArrayCorpus(50, train=np.zeros(320, dtype=np.int64), valid=np.zeros(9, dtype=np.int64))


def test_auto_regularizes_trainings_that_read_their_text_again(small_config, short_text):
    """By the passes, and by the parameters of the tables for each token of the text: five in a pass, or half of it."""

    def found(epochs, *options):
        given = small_config(*READ_AGAIN, f"train.epochs={epochs}", *options)
        config = resolve_auto(given, short_text)
        said.extend(auto_lines(given, config, short_text))
        return config.model.dropout, config.train.weight_decay

    said = []
    none, little, more, most = (0.0, 0.02), (0.1, 0.02), (0.2, 0.1), (0.2, 0.5)
    assert [found(epochs) for epochs in (2.4, 2.5, 3.8, 3.9, 6.3, 6.4)] == [none, little, little, more, more, most]
    assert found(3, "train.steps=24") == (0.0, 0.02) and found(1, "train.steps=25") == (0.1, 0.02)
    assert said[-1] == "model.dropout=0.1, train.weight_decay=0.02 for 2.50 passes over the training text"
    for half in ("model.d_model=8", "model.tie_embeddings=true"):
        given = [found(epochs, half) for epochs in (3.4, 3.5, 5.4, 5.5, 8.9, 9)]
        assert given == [none, little, little, more, more, most]
    assert found(3.4, "model.d_model=8", "model.ngram_rows=[10]") == (0.1, 0.02)
    wide = "model.d_model=128"
    assert found(1.9, wide) == none and found(2.9, wide) == more and found(3, wide) == most
    assert found(1.95, wide) == found(1, wide, "train.steps=20") == more  # these epochs are 19.5 steps, so 20
    assert found(1, "train.optimizer=adamw") == (0.0, 0.1) and found(4, "train.optimizer=adamw") == more
    assert found(9, "model.dropout=0") == (0, 0.5) and found(9, "train.weight_decay=0.3") == (0.2, 0.3)


def test_many_passes_cause_a_warning(small_config, short_text):
    def warning(epochs, *options):
        config = small_config(*READ_AGAIN, f"train.epochs={epochs}", *options)
        return passes_warning(resolve_auto(config, short_text), short_text)

    assert warning(28) is None and "290 steps of a pattern read the 320 training tokens 29.0 times" in warning(29)
    assert warning(29).endswith("it may overfit; give train.epochs=28, or fewer steps")
    odd = ArrayCorpus(50, train=np.zeros(321, dtype=np.int64), valid=np.zeros(9, dtype=np.int64))
    config = small_config(*READ_AGAIN, "train.epochs=28")  # 280.9 steps, so 281
    assert passes_warning(resolve_auto(config, odd), odd) is None
    both = "give model.dropout=0.2 train.weight_decay=0.5 train.epochs=28, or fewer steps"
    assert warning(29, "model.dropout=0", "train.weight_decay=0").endswith(both)
    assert warning(1, "train.steps=281").endswith("it may overfit; give train.steps=280, or fewer steps")
    assert warning(1.9, "model.dropout=0", "train.weight_decay=0") is None
    assert warning(3, "model.dropout=0", "train.weight_decay=0").endswith("give model.dropout=0.1, or fewer steps")
    assert warning(7, "model.dropout=0.1").endswith("give model.dropout=0.2, or fewer steps")
    assert warning(7, "train.weight_decay=0.02").endswith("give train.weight_decay=0.5, or fewer steps")
    assert warning(6, "train.weight_decay=0.02").endswith("give train.weight_decay=0.1, or fewer steps")
    assert warning(7, "model.dropout=0.3", "train.weight_decay=0.5") is None


def test_a_warmup_as_long_as_the_training_causes_a_warning(small_config):
    config = small_config("train.warmup_steps=60")
    assert warmup_warning(config, 61) is None
    expected = "WARNING: the learning rate does not reach its peak: give train.warmup_steps below the 60 steps"
    assert warmup_warning(config, 60) == expected


def test_weights_are_chosen_on_valid_and_the_results_are_the_chosen_weights(small_config, tmp_path):
    config = small_config("train.evaluate_every=4", "train.steps=12", "train.average_share=0", "train.lr=0.5")
    phase = make_retraining(config, ["attention", "dense"])
    run = RunFolder(tmp_path / "run", config, "retrain", {"pattern": ["attention", "dense"]})
    run.start(config, {})
    Trainer(phase, run).fit()
    last = total_nll(phase.model, phase.corpus.tokens("valid"), 5, 8, 8, 1)[0]
    assert phase.evaluate(run, 12)["nll"] == pytest.approx(last, rel=1e-6)
    valid = {line["step"]: line["nll"] for line in read_jsonl(run.path / METRICS) if line["split"] == "valid"}
    best = load_checkpoint(run.path / BEST, "model")
    assert valid.keys() == {4, 8, 12} and best["step"] == min(valid, key=valid.get)
    with torch.no_grad():
        for parameter in phase.model.parameters():
            parameter.add_(1.0)  # as training after the best step would do
    results, _ = evaluate_best(phase, run, {})
    assert results["valid"]["nll_per_token"] == pytest.approx(valid[results["best_step"]], rel=1e-9)
    assert results["parameters"] == sum(parameter.numel() for parameter in phase.model.parameters())
    assert all(torch.equal(value, best["model"][key]) for key, value in phase.model.state_dict().items())
    expected = total_nll(phase.model, phase.corpus.tokens("test"), 5, 8, 8, 1)[0]
    assert results["test"]["nll"] == pytest.approx(expected, rel=1e-6)


def test_training_carries_its_memories(small_config):
    phase, seen = make_retraining(small_config(), ["attention"]), []
    phase.model.register_forward_pre_hook(lambda model, inputs: seen.append(inputs[2]))
    kept = []
    for step in range(1, 4):
        phase.step(step)
        kept.append(phase.stream.memories)
    assert seen[0] is None and seen[1] is kept[0] and seen[2] is kept[1]
    assert all(memories.blocks[0]["memory"].shape == (4, 8, 16) for memories in kept)


def test_figures_do_not_depend_on_the_batch_if_blocks_depend_on_the_place(small_config, monkeypatch):
    monkeypatch.setattr(sparse, "DENSE_UP_TO", 0)
    metrics = []
    for rows in (1, 3, 5):
        config = small_config(f"evaluate.batch_size={rows}")
        phase = make_retraining(config, ["sparse_fixed 7", "dense", "sparse_strided 7", "conv"])
        given = phase.model, phase.model.blocks, phase.corpus, "valid", phase.runtime
        metrics.append(evaluate_split(config, *given)["nll"])
    assert metrics[1:] == pytest.approx([metrics[0]] * 2, rel=1e-6)


GRID = ["data.tokenizer=bytes", "model.grid=[2,5,3]"]


def test_rows_of_a_batch_begin_with_an_image(small_config, memory_corpus):
    images = np.arange(30 * 23) % 250
    phase = make_retraining(small_config(*GRID), ["attention"], memory_corpus(256, images, images[:60]))
    assert phase.stream.loader.places[:, 0].tolist() == [0, 150, 300, 450]
    with pytest.raises(InputError, match=r"the valid split has 61 bytes, not a whole number of images of 30 .*FOLDER"):
        make_retraining(small_config(*GRID), ["attention"], memory_corpus(256, images, images[:61]))
    words = memory_corpus(256, images, images[:60])
    words.vocabulary.kind = "words"  # of a folder in data.tokenizer
    with pytest.raises(InputError, match=r"model\.grid=\[2, 5, 3\] counts bytes"):
        make_retraining(small_config(*GRID), ["attention"], words)


def test_a_grid_model_learns_from_places(small_config, memory_corpus):
    """Noisy bits that depend on their place only. Dense blocks see the place only through the grid embeddings."""
    source, place = np.random.default_rng(0), np.arange(30 * 300) % 30
    bits = (source.integers(2, size=30)[place] ^ (source.random(len(place)) < 0.1)).astype(int)
    config = small_config(*GRID, "train.steps=150", "train.lr=0.02", "model.dropout=0")
    phase = make_retraining(config, ["dense", "dense"], memory_corpus(2, bits, bits[:600]))
    losses = [phase.step(step)[0] for step in range(1, 151)]
    assert np.mean(losses[:5]) > 0.6 and np.mean(losses[-20:]) < 0.45  # the entropy of a bit given its place is 0.325


def test_runs_beside_each_other_must_have_the_same_text_and_length(tmp_path, capsys):
    about = {"pattern": ["dense"], "latency": {"ms_per_1000_bytes": 0.5, "ratio_to_interleaved": 0.7}}
    about |= {"network": {"valid": {}}, "mixture": {"ms_per_1000_bytes": 0.25}}

    def shown(*runs):
        for name, tokens, digest, *more in runs:
            origin, tokens_of_test = more or (None, 100)
            run = tmp_path / name
            run.mkdir(exist_ok=True)
            test = {"word_perplexity": 90.5, "word_perplexity_comparable": True, "bits_per_byte": 1.25, "bytes": 2e6}
            results = {"train_tokens": tokens, "train_tokens_per_s": 1, "test": test | {"tokens": tokens_of_test}}
            write_yaml(run / "results.yaml", about | results)
            write_yaml(run / "provenance.yaml", {"data_sha256": {"train": digest}})
            write_yaml(run / "config.yaml", {"train": {"init_from": origin}})
        retrain.print_beside([tmp_path / name for name, *_ in runs])
        return capsys.readouterr().out

    same = shown(("one", 100, "a"), ("two", 100, "a"))
    assert "on test:" in same and "WARNING" not in same
    assert same.count("90.50         1.2500               0.750            0.70") == 2
    assert "different lengths of text: 1.98 to 2 MB" in shown(("one", 100, "a"), ("two", 99, "a"))
    assert "WARNING" not in shown(("one", 100, "a"), ("two", 79, "a", None, 80))  # another vocabulary
    assert "read different texts" in shown(("one", 100, "a"), ("two", 90, "b"))
    assert "started from different weights" in shown(("one", 100, "a"), ("two", 100, "a", "runs/search", 100))
