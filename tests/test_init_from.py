"""Trainings that start from the weights of a training or an export."""

import shutil

import pytest
import yaml

from nas import load_model
from tests.making import TRAIN
from tests.processes import refuse, succeed

pytestmark = pytest.mark.slow


def test_a_training_starts_from_the_weights_of_another(trained, exported, small_yaml, tmp_path):
    """Before the first step it is that model, also with another text, whose tokens have other frequencies."""
    other = tmp_path / "text"
    other.mkdir()
    for split, content in (("train", "a red fox\nthe river\n" * 99), ("valid", "it\n" * 30), ("test", "it sees\n" * 9)):
        (other / f"{split}.txt").write_text(content)
    pattern, results = shutil.copy(exported["words"] / "pattern.yaml", tmp_path), {}
    copy = shutil.copytree(exported["words"], tmp_path / "copy")
    for origin in (trained["words"], copy):
        run = tmp_path / f"from-{origin.name}"
        more = [f"data.source={other}", f"train.init_from={origin}", "train.steps=1", "train.warmup_steps=1"]
        more += ["train.lr=1e-12", "train.muon_lr=1e-12", "train.weight_decay=0", *TRAIN[1:]]
        assert "starting from the weights of" in succeed("retrain", pattern, small_yaml, "--run", run, *more)
        results[origin] = yaml.safe_load((run / "results.yaml").read_text())["test"]["nll"]
        assert load_model(run).generate("the", 9, seed=1) == load_model(origin).generate("the", 9, seed=1)
    shutil.rmtree(copy)  # the run holds all that it needs
    succeed("retrain", pattern, small_yaml, "--run", run, "--eval-only", *more)
    expected = load_model(trained["words"]).score((other / "test.txt").read_bytes()).metrics["nll"]
    assert list(results.values()) == pytest.approx([expected] * 2, rel=1e-6)


def test_a_run_without_a_checkpoint_starts_again_from_the_weights_of_its_origin(
    trained, exported, small_yaml, tmp_path
):
    run = tmp_path / "run"
    command = ["retrain", exported["words"] / "pattern.yaml", small_yaml, "--run", run]
    command += [f"train.init_from={trained['words']}", *TRAIN, "train.log_every=1"]
    succeed(*command)
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    for name in ("checkpoint.pt", "best.pt", "results.yaml", "metrics.jsonl"):
        (run / name).unlink()
    assert "starting from the weights of" in succeed(*command, "--resume")
    assert (run / "metrics.jsonl").read_text().splitlines()[0] == first


def test_an_origin_that_does_not_fit_is_named(trained, exported, small_yaml, pattern, tmp_path):
    def message(pattern, *options):
        line = refuse("retrain", pattern, small_yaml, "--run", tmp_path / "run", *options)
        assert not (tmp_path / "run").exists()
        return line

    origin, own = f"train.init_from={trained['words']}", exported["words"] / "pattern.yaml"
    assert "has the pattern w6 d l a, not adi" in message(pattern, origin)
    told = message(own, origin, *TRAIN[1:], "model.d_ffn=32")
    assert "has model.d_ffn=24, not 32; give the options of that model" in told
    assert "has model.d_model=16, not 32" in message(own, origin, *TRAIN[1:], "model.d_model=32")
    assert "holds no finished training" in message(own, f"train.init_from={tmp_path}")
    assert "does not exist" in message(own, f"train.init_from={tmp_path / 'no'}")
